"""One of several cards is chosen, and CUDA is told before it is asked for anything."""

import os
import re
import subprocess
import sys

import pytest

from qerl.base.devices import choose_card, driver_version, visible_cards
from qerl.base.errors import ConfigError

ALIKE = """0, GPU-aaaa-0, NVIDIA H200, 20000, 143771, Disabled
1, GPU-bbbb-1, NVIDIA H200, 143000, 143771, Disabled
2, GPU-cccc-2, NVIDIA H200, 90000, 143771, Disabled"""
MIXED = """0, GPU-aaaa-0, NVIDIA GeForce RTX 3090, 24000, 24576, [N/A]
1, GPU-bbbb-1, NVIDIA GeForce RTX 4090, 20000, 24564, [N/A]"""
PARTLY_SPLIT = """0, GPU-aaaa-0, NVIDIA H100, 81000, 81559, Enabled
1, GPU-bbbb-1, NVIDIA H100, 70000, 81559, Disabled"""
ONE = "0, GPU-aaaa-0, NVIDIA GB10, [N/A], [N/A], [N/A]"
BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.fixture
def reports(tmp_path, monkeypatch):
    """Put a program nvidia-smi, which prints the given text, on an otherwise empty PATH."""

    def put(text, code=0):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{text}\nEND\nexit {code}\n", encoding="utf-8")
        tool.chmod(0o755)
        return tmp_path

    monkeypatch.setenv("PATH", str(tmp_path))
    return put


def seen_after(given, local_rank=None, gpu=None):
    environ = dict(given)
    choose_card(local_rank, environ, gpu)
    return environ


@pytest.mark.parametrize(
    ("host", "given", "wanted"),
    [
        (ALIKE, {}, BUS | {"CUDA_VISIBLE_DEVICES": "1"}),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "0,2"}, BUS | {"CUDA_VISIBLE_DEVICES": "2"}),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "GPU-aaaa-0,GPU-bbbb-1"}, BUS | {"CUDA_VISIBLE_DEVICES": "1"}),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a"}, BUS | {"CUDA_VISIBLE_DEVICES": "2"}),
        (MIXED, BUS | {"CUDA_VISIBLE_DEVICES": "1,0"}, BUS | {"CUDA_VISIBLE_DEVICES": "0"}),
    ],
    ids=["all", "numbers", "uuids", "beginnings of uuids", "kinds by the bus"],
)
def test_only_the_card_with_the_most_free_memory_is_left_visible(reports, host, given, wanted):
    reports(host)
    assert seen_after(given) == wanted


@pytest.mark.parametrize(
    ("host", "given"),
    [
        (ONE, {}),
        (PARTLY_SPLIT, {}),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": ""}),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "-1"}),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "2,-1,1"}),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "MIG-1234"}),
    ],
    ids=["one card", "one whole card", "none", "none as a number", "the rest hidden", "one MIG device"],
)
def test_without_a_choice_nothing_is_changed(reports, host, given):
    reports(host)
    assert seen_after(given) == given


@pytest.mark.parametrize(
    ("host", "names"),
    [
        (PARTLY_SPLIT, "MIG-1234,MIG-5678"),
        (PARTLY_SPLIT, "MIG-1234,GPU-bbbb-1"),
        (MIXED, "1,0"),  # CUDA counts the fastest first, nvidia-smi by the bus
        (ALIKE, "0,7"),
    ],
    ids=["MIG devices", "a MIG device and a card", "numbers of different cards", "a card that is not there"],
)
def test_cards_that_cannot_be_compared_keep_the_given_order(reports, host, names):
    reports(host)
    assert seen_after({"CUDA_VISIBLE_DEVICES": names}) == {"CUDA_VISIBLE_DEVICES": names.split(",")[0]}


def test_without_a_driver_the_first_named_card_is_taken_if_any_is_named(reports):
    assert seen_after({}) == {}
    assert seen_after({"CUDA_VISIBLE_DEVICES": "3,1"}) == {"CUDA_VISIBLE_DEVICES": "3"}
    reports("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", code=9)
    assert seen_after({}) == {}
    assert driver_version() is None


@pytest.mark.parametrize(
    ("host", "given", "gpu"),
    [(ALIKE, {}, 2), (ALIKE, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-c"}, 2), (ONE, {}, 0), (PARTLY_SPLIT, {}, 1)],
    ids=["all", "uuids", "one card", "one whole card"],
)
def test_a_card_can_be_named(reports, host, given, gpu):
    reports(host)
    assert seen_after(given, gpu=gpu) == given | BUS | {"CUDA_VISIBLE_DEVICES": str(gpu)}


@pytest.mark.parametrize(
    ("host", "given", "gpu", "said"),
    [
        (ALIKE, {}, 3, r"--gpu 3: nvidia-smi shows these cards: 0 \(NVIDIA H200, 20 of 140 GiB free\), 1 "),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "2"}, 0, r"these cards within CUDA_VISIBLE_DEVICES=2: 2 \("),
        (PARTLY_SPLIT, {}, 0, r"these cards: 1 \(NVIDIA H100"),
        ("", {}, 0, "these cards: none; name one"),
    ],
    ids=["no such card", "hidden", "split into MIG devices", "no card"],
)
def test_a_card_that_is_not_there_is_refused(reports, host, given, gpu, said):
    reports(host)
    with pytest.raises(ConfigError, match=said):
        seen_after(given, gpu=gpu)


def test_each_process_of_a_host_takes_its_own_card(reports):
    reports(ALIKE)
    ranks = [seen_after({"CUDA_VISIBLE_DEVICES": "2,0"}, local_rank) for local_rank in (0, 1)]
    assert [environ["CUDA_VISIBLE_DEVICES"] for environ in ranks] == ["2", "0"]
    with pytest.raises(ConfigError, match="3 processes were started on a host with 2 cards"):
        seen_after({"CUDA_VISIBLE_DEVICES": "2,0"}, 2)


def test_the_output_of_the_driver_is_parsed(reports):
    reports(ALIKE)
    assert str(visible_cards({})[1]) == "1 (NVIDIA H200, 140 of 140 GiB free)"
    reports(ONE)
    assert visible_cards({})[0].total_gib == 0
    reports("580.65.06\n580.65.06")
    assert driver_version() == "580.65.06"


ASKED = """
import os, sys
import torch

class Asked(BaseException):
    pass

def answer(*_):
    raise Asked(os.environ.get("CUDA_VISIBLE_DEVICES"))

for name in ("is_available", "device_count", "init", "_lazy_init"):
    setattr(torch.cuda, name, answer)
from qerl.cli.main import main

given = dict(os.environ)
for command in sys.argv[1:]:
    sys.argv = ["qerl", *command.split()]
    try:
        main()
    except Asked as asked:
        print("CUDA was asked with", asked, file=sys.stderr, flush=True)
    os.environ.clear()
    os.environ.update(given)
"""


COMMANDS = (
    "train --recipe tiny --set model.format=bf16 --set data.limit=24 --out run",
    "chat --model tiny",
)


def test_a_command_chooses_before_it_asks_cuda(reports, tmp_path):
    path = reports(ALIKE)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    environ |= {"PATH": f"{path}:/usr/bin:/bin", "PYTHONPATH": os.getcwd(), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", ASKED, *COMMANDS],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        input="",
    )
    said = [line for line in result.stderr.splitlines() if re.search("CUDA was asked|using card", line)]
    chosen, asked = "using card 1 (NVIDIA H200, 140 of 140 GiB free) of 3", "CUDA was asked with 1"
    assert [line.partition(chosen)[1] or line for line in said] == [chosen, asked] * 2, result.stderr
