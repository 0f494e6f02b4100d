"""What a run shows when its terminal is written to by a signal handler, or is gone."""

import io
import os
import signal

from training.run_dir.terminal_gone import TERMINAL_LOG, LastingStream


class Interrupted(io.FileIO):
    """A file whose first write is interrupted by Ctrl-C."""

    interrupted = False

    def write(self, data):
        if not self.interrupted:
            self.interrupted = True
            signal.raise_signal(signal.SIGINT)
        return super().write(data)


def test_what_a_signal_handler_says_in_the_middle_of_a_write_is_shown(tmp_path, monkeypatch):
    """Python's buffered streams refuse such a write."""
    shown = tmp_path / "terminal"
    stream = io.TextIOWrapper(io.BufferedWriter(Interrupted(shown, "w")), encoding="utf-8", line_buffering=True)
    lasting = LastingStream(stream, tmp_path / TERMINAL_LOG)
    before = signal.signal(signal.SIGINT, lambda *_: print("stopping after this step", file=lasting, flush=True))
    try:
        print("step 1", file=lasting)
    finally:
        signal.signal(signal.SIGINT, before)
    print("step 2", file=lasting)
    assert sorted(shown.read_text().splitlines()) == ["step 1", "step 2", "stopping after this step"]
    assert not (tmp_path / TERMINAL_LOG).exists()


def test_a_closed_pipe_is_replaced_by_the_log(tmp_path):
    reader, writer = os.pipe()
    lasting = LastingStream(os.fdopen(writer, "w", buffering=1), tmp_path / TERMINAL_LOG)
    print("step 1", file=lasting)
    os.close(reader)
    print("step 2", file=lasting)
    print("step 3", file=lasting)
    assert (tmp_path / TERMINAL_LOG).read_text() == "step 2\nstep 3\n"
