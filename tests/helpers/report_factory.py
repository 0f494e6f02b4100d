"""Run directories for the tests of the report, in the form in which training writes them."""

import json

import yaml

SIGMAS = [0.0, 0.0, 0.01, 0.01, 0.001]

ROWS = [
    {
        "step": i + 1,
        "noise/stage": stage,
        "noise/sigma": sigma,
        "entropy": entropy,
        "reward": 0.1 * i,
        "mismatch_kl": 1e-4,
        "sampling/entropy": entropy + sigma,
    }
    for i, (stage, sigma, entropy) in enumerate(zip([0, 0, 1, 1, 2], SIGMAS, [0.5, 0.7, 0.9, 0.7, 0.4], strict=True))
]


def write_run(folder, rows):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


DYNAMIC = [  # two rollouts; the row between them is a further update on the first
    {"sampled_groups": 10, "discarded_groups": 6, "discarded_tokens": 600, "extra_rollouts": 2, "filled_groups": 1},
    {},
    {"sampled_groups": 4, "discarded_groups": 0, "discarded_tokens": 0, "extra_rollouts": 0, "filled_groups": 0},
]


CONFIG = {"model": {"base": "tiny"}, "data": {"task": "arith"}, "run": {"steps": 5, "seed": 0, "out": "runs/x"}}


def sample(completion, reward, prompt="What is 3 + 4?", **rewards):
    return {"prompt": prompt, "completion": completion, "advantage": 0.1, "rewards": {"accuracy": reward, **rewards}}


def full_run(folder, samples=(), config=CONFIG):
    run = write_run(folder, ROWS)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    about = {"recipe": "tiny", "base": "tiny", "command": ["/x/bin/qerl", "train"], "versions": {"trl": "1.16.0"}}
    (run / "run.json").write_text(json.dumps(about))
    (run / "completions").mkdir()
    lines = [json.dumps(row) + "\n" for row in samples]
    (run / "completions" / "step-000004.jsonl").write_text("".join(lines))
    return run


IDENTITY = {"task": "arith", "questions": 4, "data": "d", "samples": 1, "temperature": 0, "top_p": 1, "seed": 0}


def write_evaluation(folder, correct, text="#### 7", **result):
    """An evaluation as `qerl eval` writes it, with one question for each mark in `correct`; returns the folder."""
    folder.mkdir(parents=True)
    found = {"task": "arith", "model": "tiny", "samples": 1, "completions": len(correct), "questions": len(correct)}
    found["accuracy"] = {"value": sum(correct) / len(correct), "low": 0.05, "high": 0.95}
    found |= {"truncated_share": 0.25, "no_answer_share": 0.0, "identity": IDENTITY}
    (folder / "result.json").write_text(json.dumps(found | result))
    row = {"sample": 0, "question": "What is 3 + 4?", "answer": "7", "completion": text, "truncated": False}
    rows = [{**row, "row": number, "id": str(number), "correct": mark} for number, mark in enumerate(correct)]
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
