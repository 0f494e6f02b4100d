#!/usr/bin/env python3
"""How far does a first update move a policy that is packed to 4 bits, by the size of the update?

    python scripts/study/first_step.py --model qerl/tiny --out benchmarks/qat/first-step-tiny.json

Masters of all linears go by one signed step of a learning rate along the gradient of KL(student || teacher), as a first
step of AdamW does, or along random signs; then they are packed anew. The teacher is the 16-bit model and the student
that model packed. Masters begin as the 16-bit weights, as those moved off ties (training/policy/build.py), or in
bfloat16, rounded at random. Both KLs are means per token of questions and worked answers of the train split that the
gradient has not seen: of the policy before against the policy after, and of the policy after against the teacher.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

Tensors = Mapping[str, torch.Tensor]
RATES = (1e-7, 1e-6, 1e-5, 1e-4, 3e-4)
HEAD_ROOM_BITS = 2  # of the global scales, as a run with `qat` has
SEED = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qerl/tiny", help="16-bit model of the task")
    parser.add_argument("--task", choices=("arith", "arith_chain"), default="arith")
    parser.add_argument("--batch", type=int, default=64, help="answers of the gradient")
    parser.add_argument("--held-out", type=int, default=256, help="answers on which the KLs are measured")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from scripts.bench.provenance import command, machine

    study = Study(given.model, given.task, given.batch, given.held_out)
    rows = list(study.rows())
    report = {"command": command(), **machine(), "kl_to_teacher_before": study.before, "rows": rows}
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))


class Study:
    """A teacher, the same model with packed weights, and two batches of answers."""

    def __init__(self, model: str, task: str, batch: int, held_out: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from qerl.formats.nvfp4.reference import power_of_two_scale

        load = AutoModelForCausalLM.from_pretrained
        self._model, teacher = (load(model, dtype=torch.float32).eval() for _ in range(2))
        tokens = tokenized(AutoTokenizer.from_pretrained(model), task, batch + held_out)
        seen, self._held_out = ([each[part] for each in tokens] for part in (slice(batch), slice(batch, None)))
        self._linears = {
            name: module
            for name, module in self._model.named_modules()
            if isinstance(module, torch.nn.Linear) and ".layers." in name
        }
        self.weights = {name: linear.weight.detach().clone() for name, linear in self._linears.items()}
        self._scales = {name: power_of_two_scale(w.abs().max(), HEAD_ROOM_BITS) for name, w in self.weights.items()}
        self.packed = self.pack(self.weights)
        self._put(self.packed)
        with torch.no_grad():
            self._teacher, seen_teacher = log_probs(teacher, self._held_out), log_probs(teacher, seen)
            self._student = log_probs(self._model, self._held_out)
        self.before = self._kl(self._student, self._teacher)
        mean_kl(log_probs(self._model, seen), seen_teacher, seen[1]).backward()
        self._signs = {name: linear.weight.grad.sign() for name, linear in self._linears.items()}
        random = torch.Generator().manual_seed(SEED)
        self._random = {name: torch.randn(w.shape, generator=random).sign() for name, w in self.weights.items()}

    def rows(self) -> Iterator[dict[str, object]]:
        """One row for each beginning, direction and rate."""
        from training.policy.build import off_ties

        moved = {name: off_ties(w.bfloat16(), self.packed[name], SEED) for name, w in self.weights.items()}
        beginnings = {"16-bit weights": self.weights, "off ties": moved, "bfloat16 masters": self.weights}
        for beginning, masters in beginnings.items():
            rounded = in_bfloat16 if beginning == "bfloat16 masters" else None
            for direction, signs in (("gradient", self._signs), ("random", self._random)):
                for rate in RATES:
                    after = {name: master - rate * signs[name] for name, master in masters.items()}
                    found = self._compared(self.pack(after if rounded is None else rounded(after)))
                    yield {"masters": beginning, "direction": direction, "rate": rate, **found}

    def pack(self, masters: Tensors) -> dict[str, torch.Tensor]:
        """What the packed masters decode to."""
        from qerl.formats.nvfp4.reference import dequantize, quantize

        return {name: dequantize(*quantize(w, self._scales[name]), torch.float32) for name, w in masters.items()}

    def _put(self, weights: Tensors) -> None:
        for name, linear in self._linears.items():
            linear.weight.data.copy_(weights[name])

    @torch.no_grad()
    def _compared(self, packed: Tensors) -> dict[str, float]:
        self._put(packed)
        after = log_probs(self._model, self._held_out)
        differ = sum((packed[name] != w).sum().item() for name, w in self.packed.items())
        return {
            "changed_share": differ / sum(w.numel() for w in packed.values()),
            "kl_before_after": self._kl(self._student, after),
            "kl_to_teacher": self._kl(after, self._teacher),
        }

    def _kl(self, one: torch.Tensor, other: torch.Tensor) -> float:
        return mean_kl(one, other, self._held_out[1]).item()


def in_bfloat16(masters: Tensors) -> dict[str, torch.Tensor]:
    """Masters rounded at random to bfloat16, as the optimizer leaves them."""
    from training.policy.rounding import round_randomly_

    rounded = {name: torch.empty_like(master, dtype=torch.bfloat16) for name, master in masters.items()}
    for number, (name, master) in enumerate(masters.items()):
        round_randomly_(rounded[name], master.contiguous(), SEED + number)
    return {name: master.float() for name, master in rounded.items()}


def tokenized(tokenizer: Callable, task: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), both (count, longest): questions of the task in the chat template, with their worked answers."""
    from importlib import import_module

    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}], tokenize=False, add_generation_prompt=True
        )
        + problem.worked
        for problem in import_module(f"qerl.data.tasks.{task}").problems("train", 0, count)
    ]
    found = tokenizer(texts, return_tensors="pt", padding=True)
    return found["input_ids"], found["attention_mask"]


def log_probs(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """(rows, tokens, vocabulary)."""
    ids, mask = batch
    return model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)


def mean_kl(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """KL(one || other) per token of the mask, from log-probabilities."""
    return ((one.exp() * (one - other)).sum(-1) * mask).sum() / mask.sum()


def table(report: dict) -> str:
    lines = [f"KL to the teacher before: {report['kl_to_teacher_before']:.2e}", ""]
    lines += [
        "| masters | direction | rate | changed | KL(before, after) | KL to the teacher |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['masters']} | {row['direction']} | {row['rate']:g} | {100 * row['changed_share']:.2f}% "
        f"| {row['kl_before_after']:.1e} | {row['kl_to_teacher']:.2e} |"
        for row in report["rows"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
