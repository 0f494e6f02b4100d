"""The recipe in TRL's words, and in transformers' where TRL inherits them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from trl import GRPOConfig

from qerl.base.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

    from qerl.config.schema import RunConfig

EPSILON = 1e-8  # of Adam


def trl_config(config: RunConfig, run_dir: Path) -> GRPOConfig:
    """One generation serves one optimizer step, or `num_iterations` of them.

    TRL sees a step as one micro-batch of all its rows, without gradient checkpointing: the trainer cuts it by tokens
    and says which layers recompute. A run on given rows generates nothing, and has no groups that a step would hold.
    """
    rollout, loss, optim, run = config.rollout, config.loss, config.optim, config.run
    on_gpu = torch.cuda.is_available()
    generations, size = (1, rollout.group_size) if config.kind.samples else (2, 2)  # of two rows at least, TRL wants
    return GRPOConfig(
        steps_per_generation=generations,
        num_generations=size,
        num_iterations=loss.num_iterations,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        loss_type=loss.type,
        importance_sampling_level=loss.level,
        epsilon=loss.clip_low,
        epsilon_high=loss.clip_high,
        delta=loss.delta,
        beta=loss.kl_coef,
        use_bias_correction_kl=loss.kl_unbiased,
        scale_rewards=loss.advantage_scale,
        mask_truncated_completions=loss.mask_truncated,
        entropy_coef=loss.entropy_coef,
        router_aux_loss_coef=0.0,  # it balances the experts by training routers, and these are frozen
        vllm_importance_sampling_mode=loss.correction.mode if loss.correction.mode != "off" else "token_truncate",
        output_dir=str(run_dir),
        max_steps=run.steps,
        seed=run.seed,
        per_device_train_batch_size=config.rows_per_step,
        gradient_accumulation_steps=1,
        learning_rate=optim.learning_rate,
        weight_decay=optim.weight_decay,
        adam_beta2=optim.beta2,
        adam_epsilon=EPSILON,
        max_grad_norm=optim.max_grad_norm,
        warmup_steps=optim.warmup_ratio,
        lr_scheduler_type=optim.schedule if optim.schedule != "constant" else "constant_with_warmup",
        optim=_optimizer_name(optim.name, on_gpu),
        gradient_checkpointing=False,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        save_strategy="steps",
        save_steps=run.save_every,
        ignore_data_skip=True,  # the sampler starts at the resumed step itself
        logging_steps=1,
        logging_nan_inf_filter=False,  # a loss that is not finite stops the run
        report_to="none",  # training/run_dir/trackers.py makes the callbacks
        project=config.logging.project or "qerl",
        run_name=config.logging.run_name or run_dir.name,
        disable_tqdm=True,
        eval_on_start=config.validation.every is not None,  # the trainer knows whether that validation is due
        remove_unused_columns=False,
    )


def check_installed(config: RunConfig) -> None:
    """Raise EngineError for an optimizer that this machine lacks."""
    _optimizer_name(config.optim.name, torch.cuda.is_available())


def _optimizer_name(name: str, on_gpu: bool) -> str:
    import importlib.util

    has_8bit = on_gpu and importlib.util.find_spec("bitsandbytes") is not None
    if name == "adamw_8bit" and not has_8bit:
        raise EngineError(
            "optim.name is adamw_8bit, which needs a CUDA device and bitsandbytes (`pip install 'qerl[gpu]'`): "
            "write adamw, or auto to take it where it runs"
        )
    return "adamw_bnb_8bit" if name == "adamw_8bit" or (name == "auto" and has_8bit) else "adamw_torch"
