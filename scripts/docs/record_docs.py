"""Run the commands that the documentation shows, on the model that ships with qerl, and write docs/recordings/*.txt.

Everything runs on a CPU in a fresh folder, without a network, in about four minutes:

    python scripts/docs/record_docs.py             # all, and a picture in docs/images
    python scripts/docs/record_docs.py plan doctor # only some, which must not depend on others

Whatever differs from run to run is replaced: the folder, seconds, sizes of disks, dates. Everything else is as printed.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from itertools import islice
from pathlib import Path

from qerl.data.tasks import get_task

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "docs" / "recordings"
EVAL = "--limit 200 --max-new-tokens 48 --batch-size 200"

SESSIONS = {  # file -> commands, in the order in which they build on one another
    "help": ["qerl --help"],
    "recipes": ["qerl recipes", "qerl recipes tasks", "qerl recipes copy tiny --out mine.yaml"],
    "plan": ["qerl plan --recipe dapo_7b --gpu 24 --set rollout.max_new_tokens=2048"],
    "plan-too-large": ["qerl plan --recipe dapo_14b --gpu 4090 --set rollout.max_new_tokens=12288"],
    "doctor": ["qerl doctor"],
    "errors": [
        "qerl train --recipe dapo_7 --dry-run",
        "qerl train --recipe tiny --set noise.sigma_strat=1e-2",
        "qerl train --recipe tiny --set num_generations=8",
        "qerl eval arith --model tiny --samples 4",
    ],
    "quantize": ["qerl quantize --model tiny"],
    "dry-run": ["qerl train --recipe tiny --dry-run"],
    "eval-before": [f"qerl eval arith --model checkpoints/tiny-NVFP4A16 {EVAL} --out evals/before"],
    "train": ["qerl train --recipe tiny --steps 12 --set run.save_every=6 --out runs/demo"],
    "resume": ["qerl train --resume runs/stopped"],
    "warnings": [
        "qerl train --recipe tiny --steps 6 --set noise.num_stages=3 --set rollout.max_new_tokens=2 --out runs/short"
    ],
    "eval-checkpoints": [f"qerl eval arith --run runs/demo --checkpoints all {EVAL}"],
    "eval-after": [f"qerl eval arith --model runs/demo {EVAL} --out evals/after"],
    "eval-file": [
        "head -3 rows.jsonl",
        "qerl eval rows.jsonl --model runs/demo --columns question=problem,answer=solution --max-new-tokens 48",
    ],
    "eval-lighteval": [
        "cat tasks.py",
        "qerl eval 'mine|0' --suite lighteval --suite-tasks tasks.py --model runs/demo --max-new-tokens 48",
    ],
    "compare": ["qerl compare evals/before evals/after"],
    "grade": ["qerl grade evals/after/completions.jsonl --task arith"],
    "report": ["qerl report runs/demo --before evals/before --after evals/after"],
    "merge-adapter": ["qerl merge --adapter runs/demo --to adapter"],
    "merge-bf16": ["qerl merge --adapter runs/demo --to bf16 --prompt-count 16 --max-new-tokens 48"],
    "merge-nvfp4": ["qerl merge --adapter runs/demo --to nvfp4 --prompt-count 16 --max-new-tokens 48"],
    "chat": [
        "echo 'Finn has 3 packs with 6 coins in each. He gives 15 coins to Mia. How many coins does Finn have left?' | "
        "qerl chat --model merged/demo-bf16 --temperature 0 --max-new-tokens 48"
    ],
}

# A run on a terminal of 100 x 24, stopped by Ctrl-C once STOP_AT matches; its screen is recorded then and at the end.
LIVE = (
    "qerl train --recipe tiny --steps 12 --set run.save_every=6 --set logging.completions_every=100 --out runs/stopped"
)
STOP_AT = re.compile(r"\w+ +7/12 \|")
QUICKSTART_EVAL = "--limit 300 --max-new-tokens 48 --batch-size 300"  # as scripts/quickstart.sh has it
QUICKSTART = [
    "qerl train --recipe tiny --quantize --seed 0 --out runs/quickstart",
    f"qerl eval arith --model checkpoints/tiny-NVFP4A16 {QUICKSTART_EVAL} --out evals/quickstart-before",
    f"qerl eval arith --model runs/quickstart {QUICKSTART_EVAL} --out evals/quickstart-after",
]

NUMBER = re.compile(  # numbers that depend on the machine's speed, its disk and the day
    r"(?<=s/step )\d+\.\d+|\b\d+(?:\.\d+)?(?= (?:s|seconds|min|tokens/s|GiB free)\b)|\b20\d{6}-\d{6}\b"
    r"|(?<=tokens/s )[\d,]+|\b\d:\d\d:\d\d(?= left)|(?<=eval/arith-)[0-9a-f]{8}|(?<=eval/rows-)[0-9a-f]{8}"
    r"|(?<=eval/lighteval-mine-0-)[0-9a-f]{8}\b|\b20\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d\S*"
)
TIMED_ROW = re.compile(r"^ +(?:seconds|tokens (?:a|per) second|seconds (?:a|per) step) ")
VALUE = re.compile(r"\d+(?:\.\d+)?(?=\s|$)")


def normalised(text: str, folder: Path) -> str:
    """The output with "N" for whatever changes from run to run; the borders of tables stay aligned."""
    lines = []
    for line in text.splitlines():
        clean = line
        for place in (folder, ROOT, Path(sys.prefix)):
            clean = clean.replace(f"{place}/", "")
        clean = clean.replace(f"{Path.home()}/", "~/")
        clean = NUMBER.sub("N", clean)
        if TIMED_ROW.match(clean):
            clean = VALUE.sub(lambda found: "N".rjust(len(found[0])), clean)
        if clean.endswith("│"):
            clean = clean[:-1].ljust(len(line) - 1) + "│"
        lines.append(clean.rstrip())
    return "\n".join(lines)


def environment() -> dict[str, str]:
    """The environment of a user who has installed this copy, with lines of 100 characters."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONPATH": str(ROOT), "TERM": "dumb", "PATH": path}


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one command in a shell, with both output streams together."""
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode not in (0, 1, 2):
        sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout}")
    return done


def record(name: str, folder: Path) -> None:
    """Run one session and write its file."""
    parts = []
    for command in SESSIONS[name]:
        done = run(command, folder)
        status = f"\n(exit code {done.returncode})" if done.returncode else ""
        parts.append(f"$ {command}\n{normalised(done.stdout, folder)}{status}")
    write(name, "\n\n".join(parts))


def record_live(folder: Path) -> None:
    """Record a run on a terminal: its screen while it trains, and after Ctrl-C."""
    import pyte

    screen = pyte.Screen(100, 24)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    env = {**environment(), "TERM": "xterm"}
    process = subprocess.Popen(
        LIVE.split(), cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    shown: list[str] = []
    while True:
        try:
            stream.feed(os.read(ours, 4096))
        except OSError:  # the other side is closed
            break
        if not shown and STOP_AT.search("\n".join(screen.display)):
            shown = list(screen.display)
            process.send_signal(signal.SIGINT)
    process.wait()
    after = [line for line in screen.display if line not in shown]  # the rest of the screen moves up
    screens = [normalised("\n".join(lines).rstrip(), folder) for lines in (shown, after)]
    write("live", "\n".join([f"$ {LIVE}", screens[0], "^C", screens[1], f"(exit code {process.returncode})"]))


def record_quickstart(folder: Path) -> None:
    """Draw the picture of the quickstart: its reward, and its accuracy before and after."""
    for command in QUICKSTART:
        run(command, folder)
    evals, picture = folder / "evals", ROOT / "docs" / "images" / "before-after.png"
    draw(folder / "runs" / "quickstart", evals / "quickstart-before", evals / "quickstart-after", picture)


def write(name: str, text: str) -> None:
    (RECORDINGS / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
    print(f"{name}.txt")


def prepare(folder: Path) -> None:
    """Write the user's own files that some sessions read."""
    generated = islice(get_task("arith").generate("test"), 40)
    rows = [{"problem": row["question"], "solution": row["answer"]} for row in generated]
    (folder / "data").mkdir()
    for name in ("rows.jsonl", "data/test.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shutil.copy(RECORDINGS / "tasks.py", folder)


def main() -> None:
    special = {"live": record_live, "quickstart": record_quickstart}
    order = list(SESSIONS)
    order[order.index("resume") : order.index("resume")] = special  # a run is stopped before it is resumed
    names = sys.argv[1:] or order
    if unknown := [name for name in names if name not in order]:
        sys.exit(f"there is no recording {unknown[0]}: write some of {', '.join(order)}")
    RECORDINGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for name in names:
            special[name](Path(folder)) if name in special else record(name, Path(folder))


def draw(run_dir: Path, before: Path, after: Path, picture: Path) -> None:
    """docs/images/before-after.png: the reward of each step, between the accuracies of the folders of `qerl eval`."""
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    figure, axes = plt.subplots(figsize=(8.5, 3.2), layout="constrained")
    axes.plot([row["step"] for row in rows], [row["reward"] for row in rows], "C0-", lw=1.5, label="reward in training")
    last = rows[-1]["step"]
    for folder, name, colour in ((before, "before", "C1"), (after, "after", "C2")):
        value = json.loads((folder / "result.json").read_text(encoding="utf-8"))["accuracy"]["value"]
        axes.axhline(value, color=colour, ls="--", lw=1.5)
        place = (last, value + 0.02)
        axes.annotate(f"accuracy {name}: {value:.1%}", place, ha="right", va="bottom", color=colour, weight="bold")
    axes.set(xlabel="training step", ylim=(0, 1.1), xlim=(0.5, last + 0.5), yticks=[0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
