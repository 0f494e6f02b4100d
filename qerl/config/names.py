"""Names and bounds that recipes state and that folders above this one give their meaning."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from qerl import formats

if TYPE_CHECKING:
    from qerl.config.schema import AdapterConfig

ENGINES = ("auto", "transformers", "vllm")
KERNELS = ("auto", *dict.fromkeys(kernel for each in formats.all_formats() for kernel in each.kernels))
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_per_token_head")
MIN_TEMPERATURE = 0.01  # below this vLLM 0.25.1 samples at 0.01 and only warns (sampling_params.py line 449)

OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")  # in adapter.targets: linears of dense MLPs and of experts
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", *OF_EXPERTS)
OF_STATES = ("in_proj_qkv", "in_proj_z", "out_proj")  # of linear attention, whose layers have no q, k, v and o
PER_EXPERT_SHARE = 8  # each of many experts gets an eighth of the rank: as many parameters as a few experts have

TASKS = (  # of qerl/data/tasks/__init__.py
    *("gsm8k", "dapo_math", "bigmath", "bigmath_hard", "amc23", "aime24", "aime25", "math500"),
    *("arith", "word_game", "environment", "own"),
)
ENVIRONMENTS = {"calculator", "word_game"}  # `qerl.episodes.build.register` adds to these while a program runs

NAME = re.compile(r"\{([A-Za-z_]\w*(?:\.\w+)*)\}")
LITERAL = re.compile(r"(?:\\[A-Za-z]+\*?|[{}^_$\\\]])\Z")  # before braces of LaTeX (\boxed{x}, x^{n}) and doubled ones


def adapts_experts(adapter: AdapterConfig) -> bool:
    """Whether the experts of a model that has some get an adapter."""
    return adapter.experts != "none" and any(name in adapter.targets for name in OF_EXPERTS)


def expert_rank(adapter: AdapterConfig) -> int:
    """The rank of the adapter on each expert, by `adapter.expert_rank` or what it is by default."""
    if adapter.expert_rank is not None:
        return adapter.expert_rank
    return adapter.rank if adapter.experts == "shared" else max(1, adapter.rank // PER_EXPERT_SHARE)


def unknown_name(template: str) -> str | None:
    """The first name in braces that is not put in, such as `input` in "{question} {input}"; None if there is none.

    Braces that belong to LaTeX, or that hold white space, are text.
    """
    found = (match for match in NAME.finditer(template) if not LITERAL.search(template[: match.start()]))
    return next((match[1] for match in found if match[1] != "question"), None)


def unknown_text(name: str) -> str:
    """Why such a template cannot be used, and what to write."""
    return (
        f"{{{name}}} would be printed as it stands, since only {{question}} is put in: put the column {name} into the "
        f"question of each row, or write {{ {name} }} for the text in braces"
    )
