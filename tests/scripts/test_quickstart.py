"""What scripts/quickstart.sh refuses; .ci/run runs the whole script."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_an_option_that_does_not_exist_is_refused_before_anything_is_done(tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "quickstart.sh", tmp_path / "scripts")
    (tmp_path / "setup_env.sh").write_text("#!/bin/sh\n")  # the environment is already set up
    (tmp_path / "setup_env.sh").chmod(0o755)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    before = sorted(tmp_path.iterdir())
    done = subprocess.run(
        [tmp_path / "scripts" / "quickstart.sh", "--sead", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert "no such option: --sead; did you mean --seed" in done.stderr
    assert done.stdout == ""
    assert sorted(tmp_path.iterdir()) == before
