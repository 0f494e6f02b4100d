"""What 4 bits cost the reinforcement learning of a real model, and what gives it back: SmolLM2-135M on word problems.

    python scripts/models/real_model.py checkpoints/smollm2
    python scripts/study/study_real.py run --model checkpoints/smollm2 --jobs bf16:2e-4:0-4 rtn:2e-4:0-4 --out OUT.json
    python scripts/study/study_real.py report OUT.json                 # OUT.md, and docs/images/study-real.png

A job is `arm:rates:seeds`; the arms are those of scripts/study/study_real_arms.py. Each run is `qerl train` with
scripts/study/study_real.yaml over the rows of scripts/study/real_task.py; equal seeds have equal prompts. `trl` is
TRL's own trainer on the same rows (scripts/study/study_real_trl.py). With `--variant sparse` the problems are those
that the model rarely solves, groups without a signal are replaced, and `--samples 64` also gives pass@1 and pass@64.
`prepare` only makes the rows and the bases, which `run` does where they are missing.

1. `--parallel` processes share the card, and each does one run after another: what it imported serves the next run. The
   first run of a kind compiles alone, since those that start at the same time cannot share what they compile.
2. Runs whose results are in `--out` are not repeated. After `--minutes` the results so far are written.
3. A run answers the test rows after its last step on its own engine. The first run of an arm also answers them before.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--model", type=Path, required=True, help="the folder of scripts/models/real_model.py")
    shared.add_argument(
        "--jobs", nargs="+", required=True, metavar="ARM:RATES:SEEDS", help="such as bf16:2e-4,1e-3:0-4"
    )
    shared.add_argument("--work", type=Path, default=Path("/tmp/qerl-study-real"), help="bases, rows, runs and caches")
    shared.add_argument("--variant", choices=("plain", "sparse"), default="plain")
    commands.add_parser("prepare", parents=[shared], help="make rows and bases, which `run` does as well")
    run = commands.add_parser("run", parents=[shared], help="do the jobs that --out does not have yet")
    run.add_argument("--out", type=Path, required=True, help="JSON file for results; those already in it are kept")
    run.add_argument("--steps", type=int, default=80)
    run.add_argument("--parallel", type=int, default=12, help="processes that share the card")
    run.add_argument("--minutes", type=float, default=8.5, help="end all runs after this time and write what is done")
    run.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    run.add_argument("--test-rows", type=int, default=512)
    run.add_argument("--samples", type=int, default=0, help="of each question for pass@k; 0: none")
    run.add_argument("--sample-rows", type=int, default=128, help="test rows that are sampled so often")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for `qerl train`, in all runs")
    report = commands.add_parser("report", help="write the tables beside the results, and the picture")
    report.add_argument(
        "results", type=Path, nargs="+", help="results; runs of several files with equal settings are one study"
    )
    report.add_argument(
        "--long", type=Path, nargs="*", default=[], help="results whose default base was calibrated on rows of 1024"
    )
    report.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.command == "report":
        from study_real_report import write_report

        write_report(args.results, args.long, args.images)
        return
    from study_real_arms import Settings, jobs_of, prepare

    try:
        jobs = jobs_of(args.jobs)
    except ValueError as error:
        sys.exit(f"--jobs {' '.join(args.jobs)}: {error}; a job is arm:rate,...:seeds, such as bf16:2e-4,1e-3:0-4")
    prepare(args.model, args.work.resolve(), args.variant, {job.arm for job in jobs})
    if args.command == "run":
        from study_real_queue import Queue

        samples = (args.sample_rows, args.samples) if args.samples else (0, 0)
        settings = Settings(args.variant, args.steps, args.engine, args.set, args.test_rows, *samples)
        sys.exit(1 if Queue(args, settings, jobs).run() else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
