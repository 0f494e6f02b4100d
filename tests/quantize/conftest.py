"""Rows that the tests of quantization share."""

import pytest

from tests.helpers.row_files import write_sums


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """The path of questions and answers, enough for calibration and for what is held out."""
    return write_sums(tmp_path_factory.mktemp("rows") / "rows.jsonl", 400)
