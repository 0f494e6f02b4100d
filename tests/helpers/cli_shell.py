"""Run `qerl` as a person does: processes in one folder, each with its own log."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Shell:
    """Runs `qerl` in one folder, with a log file per process."""

    folder: Path

    def begin(self, name, *arguments):
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with self.log(name).open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "qerl.cli.main", *map(str, arguments)],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": path, "COLUMNS": "160"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run(self, name, *arguments):
        """The output of a command, which has to succeed."""
        process = self.begin(name, *arguments)
        try:
            code = process.wait(timeout=240)
        finally:
            process.kill()
        assert code == 0, f"{name}: exit code {code}\n{self.tail(name)}"
        return self.log(name).read_text()

    def log(self, name):
        return self.folder / f"{name}.log"

    def tail(self, name):
        return self.log(name).read_text()[-3000:]
