"""What the process imports from which those of the tests are forked (run_process.py)."""

import gc
import sys

import training.run  # noqa: F401

OF_A_RUN = [name for name in sys.modules if name.split(".")[0] in ("qerl", "training")]

import qerl.cli.main  # noqa: E402, F401

gc.collect()
gc.freeze()  # a forked process would copy all this memory when it looks for garbage
