"""An adapter on a base that rounds its activations to 4 bits: what is merged rounds them alike."""

import json

import pytest
import torch

from qerl.checkpoint.activations import kind_of_activations, read_activations
from qerl.checkpoint.folder import TINY_FOLDER, format_of
from qerl.formats import NVFP4
from quantize.export.options import ONLY_QERL, ExportOptions, only_qerl_reads, serve_adapter_line
from quantize.export.run import NO_LONGER_ROUNDED, export
from tests.helpers.checkpoint_tensors import load_all
from tests.helpers.merged import random_adapter
from tests.helpers.model_folders import with_activations

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["static", "dynamic"])
def rounding(request, base, tmp_path_factory):
    """(kind, a packed base that rounds its input, an adapter on it)."""
    folder = tmp_path_factory.mktemp(request.param)
    packed = with_activations(base, request.param, folder / "base")
    return request.param, packed, random_adapter(folder / "adapter", TINY_FOLDER)


@pytest.mark.parametrize("onto", ["original", "trained"])
def test_a_model_in_4_bits_rounds_as_its_base(rounding, onto, tmp_path):
    kind, packed, adapter = rounding
    options = ExportOptions(str(adapter), "nvfp4", tmp_path / "out", model=str(packed), onto=onto, prompt_count=0)
    report = export(options)
    assert kind_of_activations(report.out, NVFP4) == kind
    assert read_activations(report.out, NVFP4) == read_activations(packed, NVFP4)
    assert ("vllm" in report.commands) == (kind == "static")
    assert (ONLY_QERL in report.warnings()) == (kind == "dynamic")


def test_a_model_in_16_bits_holds_no_scales(rounding, tmp_path):
    _, packed, adapter = rounding
    report = export(ExportOptions(str(adapter), "bf16", tmp_path / "out", model=str(packed), prompt_count=0))
    assert not format_of(report.out).quantized
    assert not any("scale" in name for name in load_all(report.out))
    assert {tensor.dtype for tensor in load_all(report.out).values()} == {torch.bfloat16}
    assert "vllm" in report.commands
    assert_noted(report, NO_LONGER_ROUNDED)


def assert_noted(report, note):
    assert report.warnings() == [note]
    assert f"> {note}\n" in (report.out / "README.md").read_text()
    assert json.loads((report.out / "merge_report.json").read_text())["warnings"] == [note]


def test_a_model_in_8_bits_says_that_it_rounds_otherwise(rounding, tmp_path):
    _, packed, adapter = rounding
    options = ExportOptions(str(adapter), "fp8_block", tmp_path / "out", model=str(packed), prompt_count=0)
    assert_noted(export(options), NO_LONGER_ROUNDED)


def test_an_adapter_on_activations_in_16_bits_needs_no_note(base, rounding, tmp_path):
    _, _, adapter = rounding
    report = export(ExportOptions(str(adapter), "bf16", tmp_path / "out", model=str(base), prompt_count=0))
    assert report.warnings() == []


def test_an_adapter_is_served_only_on_a_base_that_vllm_reads(rounding):
    kind, packed, adapter = rounding
    assert only_qerl_reads(packed) == (kind == "dynamic")
    assert (serve_adapter_line(adapter, str(packed), 4, has_norms=False) is None) == (kind == "dynamic")
