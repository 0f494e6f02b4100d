"""The configuration of a run: every key, its type, its default and what it means. These are the only defaults.

A recipe (YAML, `training/recipes/`) overrides them, and `--set a.b=c` overrides the recipe; `qerl/config/recipe.py`
reads both and turns every mistake into one line. Values that are fine alone but impossible together are refused by the
rules in `qerl/config/rules.py`. Importing this loads pydantic, a YAML reader and the folders below.

Where the QeRL paper (arXiv 2510.11696) states a number, it is the default; what it leaves open is from its scripts.
Departures: alpha is twice the rank (scripts: equal), trained norms are off (scripts: on), the batch is 16 x 8.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from qerl import formats
from qerl.config.data import DataConfig, RewardConfig
from qerl.config.environment import EnvironmentConfig
from qerl.config.names import ENGINES, KERNELS, KV_CACHE_DTYPES, MIN_TEMPERATURE, OF_STATES, PROJECTIONS
from qerl.config.noise import NoiseConfig
from qerl.config.objectives import DistillConfig, RunKind, SftConfig
from qerl.config.quant import QatConfig, with_its_format
from qerl.config.rules import rules_of
from qerl.config.section import OneOf, Section
from qerl.config.train import TrainConfig
from qerl.config.validation import ValidationConfig

# Sequences arrive as YAML lists and are kept as tuples: strict mode would refuse the list.
Projections = Annotated[tuple[Literal[(*PROJECTIONS, *OF_STATES)], ...], Field(strict=False, min_length=1)]


class ModelConfig(Section):
    """The base model, which training never changes."""

    base: str = Field(
        min_length=1, description="base model: hub id, folder (16-bit or quantized), run directory, or `tiny` (shipped)"
    )
    format: Annotated[str, OneOf(formats.names)] = Field(
        formats.DEFAULT.name, description="format of the frozen base weights; bf16 is vanilla LoRA on 16-bit weights"
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the checkpoint")


class AdapterConfig(Section):
    """The LoRA adapter: what is trained."""

    rank: int = Field(32, ge=1, description="rank of A (rank, in) and B (out, rank)")
    alpha: int = Field(64, ge=1, description="B A is multiplied by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapter's input while training")
    targets: Projections = Field(
        PROJECTIONS, description="linear layers that get an adapter; all seven stand for those of linear attention too"
    )
    start: Literal["auto", "none", "frozen", "trained"] = Field(
        "auto",
        description="what rounding took from an NVFP4 base, as far as a small rank holds it; frozen: it stays beside "
        "the base, and the adapter starts at zero; trained: the adapter starts at it; auto: frozen, if the base has it",
    )
    start_rank: int | None = Field(None, ge=1, description="rank of that; null: 32 if frozen, adapter.rank if trained")
    experts: Literal["shared", "per_expert", "none"] = Field(
        "shared",
        description="adapter on the experts of a mixture: they share A of gate and up and B of down (shared), or each "
        "has its own; none: attention alone (and dense MLPs)",
    )
    expert_rank: int | None = Field(
        None, ge=1, description="rank of the adapter on experts; null: rank, and an eighth of it with per_expert"
    )
    train_norms: bool = Field(False, description="train the norm weights too, and sync them with the adapter")


class DynamicSamplingConfig(Section):
    """Groups without a signal (rewards all equal, or nothing of it in the loss) are replaced by further prompts."""

    enabled: bool = Field(False, description="replace groups without a signal, so that every group of a step has one")


class RolloutConfig(Section):
    """How completions are sampled. A step trains on prompts_per_step * group_size completions."""

    engine: Literal[ENGINES] = Field("auto", description="what samples; auto: vllm on a GPU, transformers on a CPU")
    prompts_per_step: int = Field(16, ge=1, description="prompts in a step")
    group_size: int = Field(8, ge=2, description="completions of one prompt, compared with one another")
    max_new_tokens: int = Field(4096, ge=1, description="a completion is truncated here")
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, description="divides the logits; vllm samples at no less")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the smallest set with this mass; 1: off")
    top_k: int = Field(0, ge=0, description="sample from the k most likely tokens; 0: off")
    dynamic_sampling: DynamicSamplingConfig = Field(
        default_factory=DynamicSamplingConfig, description="groups without a signal are replaced (DAPO)"
    )
    carry_over: int = Field(
        0,
        ge=0,
        description="further steps in which an unfinished completion may go on, so that no step waits for its longest; "
        "0: each step ends its own",
    )
    router_replay: bool = Field(
        True, description="mixtures of experts: the trainer uses the experts that the engine chose for each token"
    )
    kernel: Literal[KERNELS] = Field(
        "auto", description="NVFP4 kernel (vllm engine only); auto: our own, qerl, where it runs, else marlin"
    )
    kv_cache_dtype: Literal[KV_CACHE_DTYPES] = Field(
        "auto", description="keys and values; auto: 16 bit; fp8: half of vllm's cache, by calibrated scales"
    )
    memory: float | None = Field(
        None, gt=0, description="GPU budget of the vllm engine: GiB, or up to 1 a share of the card; null: what is left"
    )
    deterministic: bool = Field(
        False, description="rollouts and training steps repeat to the bit (vllm engine only; slower)"
    )


class CorrectionConfig(Section):
    """Importance weights for sampling from another policy than the one trained (kernels, noise)."""

    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "off"] = Field(
        "token_truncate", description="ratio a token or a sequence; beyond cap or floor it is truncated or masked"
    )
    cap: float = Field(2.0, ge=1, description="largest ratio exp(old_logprobs - sampling_logprobs)")
    floor: float | None = Field(None, gt=0, le=1, description="smallest ratio; null: none")


class LossConfig(Section):
    """The policy loss and its advantages."""

    type: Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"] = Field(
        "dapo", description="loss by TRL's name; dapo: every token of the step weighs the same"
    )
    level: Literal["token", "sequence"] = Field(
        "token", description="ratio of a token or of a sequence; sequence with type grpo is GSPO"
    )
    clip_low: float = Field(0.2, ge=0, lt=1, description="ratio is clipped at 1 - clip_low")
    clip_high: float = Field(0.28, gt=0, description="ratio is clipped at 1 + clip_high (cispo: at clip_high)")
    delta: float | None = Field(
        None, gt=0, description="second upper bound of the ratio, for negative advantages; null: none"
    )
    kl_coef: float = Field(
        0.0, ge=0, description="weight of the KL divergence from the policy that the run starts with (k3 estimator)"
    )
    kl_unbiased: bool = Field(
        True, description="k3 times the ratio, whose gradient is the KL's (DeepSeek-V3.2); false: as GRPO's paper"
    )
    advantage_scale: Literal["group", "batch", "none"] = Field(
        "group", description="standard deviation that divides the advantages"
    )
    num_iterations: int = Field(1, ge=1, description="optimizer steps on one rollout")
    mask_truncated: bool = Field(True, description="truncated completions do not enter the loss")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    correction: CorrectionConfig = Field(
        default_factory=CorrectionConfig, description="sampling against trained policy"
    )
    mismatch_gate: float | None = Field(
        0.003, gt=0, description="the run stops if mismatch_kl before step 1 is above this (nats); null: no gate"
    )


class OptimConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["auto", "adamw", "adamw_8bit"] = Field(
        "auto", description="auto: adamw_8bit on a GPU with bitsandbytes, adamw elsewhere"
    )
    learning_rate: float = Field(1e-5, gt=0, lt=1, description="peak learning rate")
    weight_decay: float = Field(0.1, ge=0, lt=1, description="decoupled weight decay")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay of the gradient's square")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="learning rate after the warm-up: to 0 by a cosine or a line, or constant"
    )
    warmup_ratio: float = Field(0.1, ge=0, lt=1, description="share of the steps in which it rises from 0")
    max_grad_norm: float = Field(0.2, gt=0, description="the gradient is scaled down to this norm")


class LoopConfig(Section):
    """The training loop and the run directory."""

    steps: int = Field(ge=1, description="optimizer steps")
    seed: int = Field(0, ge=0, lt=2**32, description="seeds data order, sampling, adapter and noise")
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens (prompts and completions) per backward pass: memory and speed, not the result; null: what "
        "the GPU's memory holds",
    )
    gradient_checkpointing: Literal["auto"] | bool = Field(
        "auto", description="layers recompute their activations in the backward pass; auto: those that do not fit"
    )
    save_every: int = Field(
        50, ge=1, description="steps between checkpoints; one is due after 30 minutes too, and after the last step"
    )
    stop_within_s: float | None = Field(
        25.0,
        gt=0,
        description="time for ending the step and saving after SIGTERM or SIGHUP; a step that takes longer is "
        "abandoned, and the state before it saved; null: no limit",
    )
    keep_checkpoints: int = Field(2, ge=1, description="older checkpoints are deleted")
    out: str | None = Field(None, min_length=1, description="run directory; null: runs/<recipe>-<time>")


class MemoryConfig(Section):
    """Limits on GPU memory."""

    cap_gib: float | None = Field(None, gt=0, description="the process takes no more GPU memory than this; null: all")


class LoggingConfig(Section):
    """What is written beside metrics.jsonl."""

    report_to: Annotated[
        tuple[Literal["mlflow", "swanlab", "trackio", "tensorboard", "wandb"], ...], Field(strict=False)
    ] = Field((), description="trackers to report to")
    completions_every: int = Field(10, ge=1, description="steps between logged samples of completions")
    completions_count: int = Field(4, ge=0, description="completions in a sample, spread over its prompts; 0: none")


class RunConfig(Section):
    """All of it. Sections that a recipe leaves out keep their defaults; model, data and run have required keys."""

    model: ModelConfig = Field(description=ModelConfig.__doc__)
    adapter: AdapterConfig = Field(default_factory=AdapterConfig, description=AdapterConfig.__doc__)
    qat: QatConfig | None = Field(None, description="train through the quantizer; null: an adapter beside the base")
    data: DataConfig = Field(description=DataConfig.__doc__)
    rewards: Annotated[tuple[RewardConfig, ...], Field(strict=False, min_length=1)] = Field(
        (RewardConfig(name="accuracy"),), description="rewards and their weights"
    )
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description=RolloutConfig.__doc__)
    environment: EnvironmentConfig | None = Field(
        None, description="an environment or tools, for episodes of several turns; null: one turn"
    )
    loss: LossConfig = Field(default_factory=LossConfig, description=LossConfig.__doc__)
    distill: DistillConfig | None = Field(None, description="learn from a teacher; null: from rewards")
    sft: SftConfig | None = Field(None, description="learn from given conversations; null: from what is sampled")
    noise: NoiseConfig = Field(default_factory=NoiseConfig, description=NoiseConfig.__doc__)
    train: TrainConfig = Field(default_factory=TrainConfig, description=TrainConfig.__doc__)
    optim: OptimConfig = Field(default_factory=OptimConfig, description=OptimConfig.__doc__)
    run: LoopConfig = Field(description=LoopConfig.__doc__)
    validation: ValidationConfig = Field(default_factory=ValidationConfig, description=ValidationConfig.__doc__)
    memory: MemoryConfig = Field(default_factory=MemoryConfig, description=MemoryConfig.__doc__)
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description=LoggingConfig.__doc__)

    @property
    def kind(self) -> RunKind:
        qat = None if self.qat is None else {"mode": self.qat.mode}
        return RunKind.of({"sft": self.sft, "distill": self.distill, "qat": qat})

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row that a step may train on."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens if self.sft is None else self.sft.max_tokens

    @property
    def rows_per_step(self) -> int:
        """The rows that an optimizer step trains on."""
        sampled = self.rollout.prompts_per_step * self.rollout.group_size
        return sampled if self.sft is None else self.sft.rows_per_step

    @property
    def longest_completion(self) -> int:
        """Tokens for which the engine needs room beside a prompt: a rollout's, or more for validation."""
        new = self.rollout.max_new_tokens
        return new if self.validation.every is None else max(new, self.validation.max_new_tokens or new)

    @model_validator(mode="before")
    @classmethod
    def _format(cls, given: object) -> object:
        return with_its_format(given)

    @model_validator(mode="after")
    def _combinations(self) -> RunConfig:
        for rule in rules_of(self):
            for conflict in rule(self):
                raise conflict
        return self
