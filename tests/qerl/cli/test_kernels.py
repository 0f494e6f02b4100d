"""The lines of qerl doctor about kernels, which are compared with their twins.

With `-m gpu` our kernels run on this card; this last passed on an H200 on 2026-11-22.
"""

import pytest
import torch

from qerl.cli import doctor_kernels
from qerl.cli.doctor_kernels import kernel_check, kernel_checks
from qerl.formats.nvfp4 import tuning


def test_a_kernel_is_ok_if_it_gives_the_values_of_its_twin():
    twin = torch.arange(1.0, 9.0)
    assert kernel_check("k", lambda: (twin, twin), exact=True).level == "ok"
    near, far, broken = twin * 1.001, twin * 1.1, twin * float("nan")
    assert kernel_check("k", lambda: (near, twin)).level == "ok"
    assert "relative error 1.0e-03" in kernel_check("k", lambda: (near, twin), exact=True).found
    assert kernel_check("k", lambda: (far, twin)).level == kernel_check("k", lambda: (broken, twin)).level == "error"


def test_a_kernel_that_cannot_start_is_an_error_in_one_line():
    def fails():
        raise RuntimeError("no kernel image\nfor this card")

    assert kernel_check("k", fails).found == "RuntimeError: no kernel image"


@pytest.mark.parametrize(
    ("capability", "tried", "said"),
    [
        ((9, 0), {"decode", "product", "lora", "attention", "attention, 8-bit cache"}, ""),
        ((8, 9), {"decode", "product", "attention", "attention, 8-bit cache"}, "a guess on this card: compare"),
        ((8, 6), {"decode", "product", "attention"}, "not on compute capability (8, 6), which has no FP8"),
        ((10, 0), {"decode", "product"}, "not used on this card: vLLM attends"),
        ((7, 5), set(), "they need a card from Ampere on"),
    ],
)
def test_which_of_our_kernels_a_card_runs(monkeypatch, tmp_path, capability, tried, said):
    """A kernel of each card is named by its task and `(cuda`; what is not run says why."""
    hopper, ampere = capability == (9, 0), capability >= (8, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(doctor_kernels, "has_kernels", lambda device: hopper)
    monkeypatch.setattr(doctor_kernels, "has_portable_kernels", lambda device: ampere)
    card = tuning.Card("NVIDIA A10", capability, 72)
    monkeypatch.setattr(tuning, "card_at", lambda device: card)
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    names = []
    monkeypatch.setattr(doctor_kernels, "kernel_check", lambda name, *rest, **kind: names.append(name))
    lines = [check for check in kernel_checks() if check is not None]
    ours = (name.removeprefix("kernel ").partition(" (cuda") for name in names)
    assert {task for task, of_cuda, _ in ours if of_cuda} == tried
    assert said in " ".join(check.found for check in lines)
    tilings = [check.found for check in lines if check.what == "kernel tilings"]
    assert len(tilings) == ampere
    assert all(("a guess: no card" in found) is not hopper for found in tilings)
    tuning.table_file(card).write_text("{")
    damaged = [check for check in kernel_checks() if check is not None and check.level == "warning"]
    assert ["delete it" in check.remedy for check in damaged] == [True] * ampere


@pytest.mark.gpu
def test_the_kernels_work_on_this_card():
    made = kernel_checks()
    assert len(made) >= 3
    assert [check for check in made if check.level != "ok"] == []
