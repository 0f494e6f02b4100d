"""Files in a folder that several users share."""

import os

import pytest
import torch
from safetensors.torch import save_file

from qerl.base.files import mode_by_umask, write_shared


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664), (0o077, 0o600)])
def test_the_mode_of_a_file_follows_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
        mode_by_umask(tmp_path / "a.safetensors")
        write_shared(tmp_path / "a-0.cubin", b"first")
        write_shared(tmp_path / "a-0.cubin", b"second")
    finally:
        os.umask(before)
    assert (tmp_path / "a-0.cubin").read_bytes() == b"second"
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"a.safetensors": mode, "a-0.cubin": mode}
