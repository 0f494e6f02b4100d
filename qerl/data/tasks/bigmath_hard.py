"""Big-Math at levels 4 and 5 of open-r1, on which QeRL trains 32B models; see qerl/data/tasks/bigmath.py."""

from dataclasses import replace

from qerl.data.tasks import bigmath

TASK = replace(bigmath.TASK, name="bigmath_hard", hub_config="level_4_5")
