"""Does quantization noise help? Trains BF16, NVFP4, NVFP4 + AQN and NF4 bases by the same reinforcement learning.

    python scripts/study/study_noise.py run --base qerl/tiny --task arith --engine transformers --parallel 1 ...
    python scripts/study/study_noise.py report benchmarks/study-noise-tiny.json   # -> docs/images, and a page

docs/study.md has the complete command, and the one for a GPU and the model of scripts/models/pretrain_arith.py.

Every run is `qerl train` with scripts/study/study_noise.yaml, with equal rollouts and equal numbers of steps: each arm
(scripts/study/study_arms.py) with each of `--rates` and each of `--seeds`. The learning rate of an arm is the one that
is best on validation rows; the reported results are measured on other rows. Several runs share the device, each in its
own process, so the seconds per step are those of a shared device.

1. Runs whose results are in `--out` are not repeated, and an interrupted run continues under `--work`. After
   `--minutes` no run is started, those that are running are ended, and the results so far are written.
2. With vLLM, the first run that needs other caches starts alone until its first step is done, because it fills the
   caches of vLLM and of its kernels, which processes that start at the same time cannot share.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def arguments(about: str, arms: Sequence[str], rates: Sequence[float]) -> argparse.Namespace:
    """The options of a study's command line, with its default arms and learning rates."""
    from study_arms import ARMS, TASK, TEST_ROWS, VALIDATION_ROWS

    parser = argparse.ArgumentParser(description=about)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train and evaluate the arms")
    run.add_argument("--base", type=Path, required=True, help="16-bit checkpoint that solves a part of the task")
    run.add_argument("--out", type=Path, required=True, help="JSON file for results; those already in it are kept")
    run.add_argument("--work", type=Path, default=Path("/tmp/qerl-study"), help="runs, logs and caches")
    run.add_argument("--arms", nargs="*", choices=ARMS, default=[*arms])
    run.add_argument("--rates", type=float, nargs="*", default=[*rates], help="learning rates of adapters")
    run.add_argument("--weights-rates", type=float, nargs="*", default=[1e-4, 3e-4], help="those of whole weights")
    run.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3])
    run.add_argument("--steps", type=int, default=80)
    run.add_argument("--parallel", type=int, default=12, help="runs that share the device")
    run.add_argument("--minutes", type=float, default=8.5, help="end all runs after this time and write what is done")
    run.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    run.add_argument("--task", default=TASK)
    run.add_argument(
        "--memory-gib",
        type=float,
        default=7,
        help="budget of each vllm engine; below 6 it sizes its cache by a profile that other processes disturb",
    )
    run.add_argument("--test-rows", type=int, default=TEST_ROWS)
    run.add_argument("--validation-rows", type=int, default=VALIDATION_ROWS)
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for `qerl train`, in all runs")
    report = commands.add_parser("report", help="write the tables beside the results, and the picture")
    report.add_argument("results", type=Path)
    report.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    job = commands.add_parser("job", help="one run, as `run` starts it")
    job.add_argument("spec", type=Path)
    job.add_argument("out", type=Path)
    return parser.parse_args()


def follow(args: argparse.Namespace) -> None:
    """Run, report or do one job."""
    if args.command == "job":
        import study_arms

        study_arms.main(args.spec, args.out)
    elif args.command == "report":
        import study_report

        study_report.write_report(args.results, args.images)
    else:
        import study_queue

        sys.exit(1 if study_queue.Study(args).run() else 0)


def main() -> None:
    from study_arms import NOISE_ARMS

    follow(arguments(__doc__.splitlines()[0], NOISE_ARMS, (3e-4, 1e-3, 3e-3)))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
