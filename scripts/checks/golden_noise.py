"""Write tests/golden/noise_sigma.json: sigma and first step of each noise stage, computed independently of our code.

    python scripts/checks/golden_noise.py

The arithmetic has 40 digits and follows arXiv 2510.11696 and its reference code, not `training/rollout/noise.py`:

1. K stages are equal intervals of the run's steps; the code divides by steps / K. Stage k begins with the first step t
   for which t >= k steps / K. A stage that no step falls into has no first step (null).
2. Stage 0 has no noise. Stages 1..K-1 have sigma(x) with x = (k-1)/(K-2) in the code (a list of K-1 values, the last of
   which is sigma_end) and x = (k-1)/(K-1) as the paper prints it.
3. sigma(x), from a = sigma_start to b = sigma_end: exponential a (b/a)^x; linear a + (b - a) x; cosine
   b + (a - b) (1 + cos(pi x)) / 2; logarithmic a + (b - a) ln(1 + (e - 1) x).
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

from mpmath import cos, e, log, mp, mpf, pi

TARGET = Path(__file__).parents[2] / "tests" / "golden" / "noise_sigma.json"
SIGMAS = (("1e-2", "1e-4"), ("1e-2", "5e-4"), ("5e-2", "5e-2"))  # of the reference scripts, of the paper, constant
STAGES = (3, 4, 5, 10)
# (steps, K): divisible, not divisible, one more or less than divisible, one step per stage, fewer steps than stages
STEPS = ((100, 10), (40, 5), (13, 4), (41, 5), (39, 5), (10, 10), (7, 3), (997, 10), (11, 10), (3, 10), (1, 3), (1, 10))
FORMULAS = {
    "exponential": lambda a, b, x: a * (b / a) ** x,
    "linear": lambda a, b, x: a + (b - a) * x,
    "cosine": lambda a, b, x: b + (a - b) * (1 + cos(pi * x)) / 2,
    "logarithmic": lambda a, b, x: a + (b - a) * log(1 + (e - 1) * x),
}


def main() -> None:
    mp.dps = 40
    tables = {"sigmas": list(_sigma_rows()), "first_steps": [_first_steps(*case) for case in STEPS]}
    TARGET.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


def _sigma_rows():
    for start, end in SIGMAS:
        for schedule, formula in FORMULAS.items():
            for indexing, back in (("code", 2), ("paper", 1)):
                for stages in STAGES:
                    shares = [mpf(k - 1) / (stages - back) for k in range(1, stages)]
                    values = [float(formula(mpf(start), mpf(end), share)) for share in shares]
                    yield {
                        "sigma_start": float(start),
                        "sigma_end": float(end),
                        "schedule": schedule,
                        "indexing": indexing,
                        "num_stages": stages,
                        "sigmas": [0.0, *values],
                    }


def _first_steps(steps: int, stages: int) -> dict[str, object]:
    width = Fraction(steps, stages)
    inside = [[t for t in range(steps) if k * width <= t < (k + 1) * width] for k in range(stages)]
    return {"steps": steps, "num_stages": stages, "first_steps": [part[0] if part else None for part in inside]}


if __name__ == "__main__":
    main()
