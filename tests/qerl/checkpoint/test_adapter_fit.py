"""Does an adapter name the base that it is used with? If not there is a warning only, as a model has many names."""

import json
import logging
from pathlib import Path

import pytest

from qerl.checkpoint.adapter import attach_lora, read_fitting_adapter, save_adapter
from qerl.checkpoint.load import load_model
from tests.helpers.checkpoint_factory import make_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("bases") / "Small-1B-Instruct")


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(attach_lora(load_model(base, "bf16"), 4, 8, ("q_proj",)), folder, str(base))
    return folder


@pytest.fixture
def warnings_of(adapter, caplog):
    """The warnings if the adapter is used with a base, but names `named` as its own."""

    def read(named, base):
        config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": named}))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            read_fitting_adapter(adapter, str(base))
        return [record.getMessage() for record in caplog.records if "names" in record.getMessage()]

    return read


OTHERS = "Some/Other-Model", "/gone/small-1b", "Small-3B-Instruct", "/"
SAME = (
    *(None, "Org/Small-1B-Instruct", "/elsewhere/small-1b-instruct/", "checkpoints/Small-1B-Instruct-NVFP4A16"),
    "/hub/models--Org--Small-1B-Instruct/snapshots/0a1b2c",
)


def test_another_name_gives_a_warning_with_both_names_and_what_to_do(warnings_of, base):
    for named in OTHERS:
        (warning,) = warnings_of(named, base)
        assert all(part in warning for part in (named, str(base), "--model"))
    for named in SAME:
        assert warnings_of(named, base) == []


def test_a_quantized_folder_may_have_the_name_of_its_source(warnings_of, base):
    base = Path(base)
    other = base.parent / "four-bit"
    other.mkdir()
    (other / "config.json").write_bytes((base / "config.json").read_bytes())
    assert len(warnings_of("Org/Small-1B-Instruct", other)) == 1
    (other / "quantize_report.json").write_text(json.dumps({"source": "Org/Small-1B-Instruct"}))
    assert warnings_of("Org/Small-1B-Instruct", other) == []
    assert warnings_of(str(other), base) == []


def test_a_link_may_have_its_own_name_or_that_of_its_target(warnings_of, base):
    link = Path(base).parent / "current"
    link.symlink_to(base)
    assert warnings_of("Org/Small-1B-Instruct", link) == []
    assert warnings_of("current", link) == []
