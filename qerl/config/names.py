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

OF_OTHERS = {  # key -> what TRL, PEFT, Unsloth, Axolotl, verl and NeMo RL call it (docs/other-names.md)
    "model.base": "model_name_or_path base_model model_name model.path",
    "model.format": "load_in_4bit",
    "adapter.rank": "r lora_r max_lora_rank lora_rank lora_cfg.dim peft.dim",
    "adapter.alpha": "lora_alpha lora_cfg.alpha peft.alpha",
    "adapter.targets": "target_modules lora_target_modules lora_target_linear",
    "adapter.dropout": "lora_dropout",
    "data.max_prompt_tokens": "max_prompt_length max_input_seq_length",
    "data.task": "dataset",
    "data.source": "dataset_name datasets train_files data_path",
    "data.system_prompt": "default_system_message system_prompt_file",
    "data.held_out": "val_set_size split_validation_size",
    "data.chat_template_kwargs": "apply_chat_template_kwargs",
    "rewards": "reward_funcs custom_reward_function",
    "rollout.group_size": "num_generations num_generations_per_prompt rollout.n",
    "rollout.max_new_tokens": "max_completion_length max_seq_length max_response_length max_total_sequence_length",
    "rollout.prompts_per_step": "gradient_accumulation_steps generation_batch_size train_batch_size "
    "num_prompts_per_step",
    "rollout.memory": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "rollout.engine": "use_vllm fast_inference rollout.name generation.backend",
    "rollout.kv_cache_dtype": "float8_kv_cache",
    "rollout.router_replay": "enable_rollout_routing_replay",
    "rollout.dynamic_sampling.enabled": "filter_groups use_dynamic_sampling",
    "environment.name": "environment_factory",
    "environment.max_turns": "max_tool_calling_iterations max_assistant_turns max_rollout_turns",
    "loss.kl_coef": "beta rl_beta kl_loss_coef reference_policy_kl_penalty",
    "loss.clip_low": "epsilon clip_ratio clip_ratio_low ratio_clip_min",
    "loss.clip_high": "epsilon_high clip_ratio_high ratio_clip_max",
    "loss.delta": "clip_ratio_c ratio_clip_c",
    "loss.entropy_coef": "entropy_coeff",
    "loss.num_iterations": "ppo_epochs",
    "loss.level": "importance_sampling_level sequence_level_importance_ratios",
    "loss.advantage_scale": "scale_rewards norm_adv_by_std_in_grpo normalize_rewards",
    "loss.mask_truncated": "mask_truncated_completions overlong_filtering",
    "loss.type": "loss_type loss_mode loss_agg_mode token_level_loss",
    "loss.kl_unbiased": "use_bias_correction_kl",
    "loss.correction.mode": "vllm_importance_sampling_mode rollout_is truncated_importance_sampling_type",
    "loss.correction.cap": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap rollout_is_threshold "
    "truncated_importance_sampling_ratio",
    "loss.correction.floor": "vllm_importance_sampling_clip_min truncated_importance_sampling_ratio_min",
    "distill.teacher": "teacher_model_name_or_path teacher_model.model_path teacher.model_name",
    "sft.max_tokens": "max_length sequence_len",
    "qat.mode": "qat_scheme",
    "qat.quant_cfg": "quant_cfg quantization_config_path",
    "optim.name": "optimizer",
    "optim.learning_rate": "lr",
    "optim.schedule": "lr_scheduler_type lr_scheduler",
    "optim.warmup_ratio": "warmup_steps lr_warmup_steps lr_warmup_steps_ratio",
    "optim.max_grad_norm": "clip_grad grad_clip",
    "run.micro_batch_tokens": "per_device_train_batch_size micro_batch_size ppo_micro_batch_size_per_gpu "
    "ppo_max_token_len_per_gpu train_micro_batch_size train_mb_tokens",
    "run.gradient_checkpointing": "use_gradient_checkpointing enable_gradient_checkpointing activation_checkpointing",
    "run.steps": "max_steps num_train_epochs num_epochs total_training_steps total_epochs max_num_steps max_num_epochs",
    "run.seed": "random_state",
    "run.save_every": "save_steps saves_per_epoch save_freq save_period",
    "run.keep_checkpoints": "save_total_limit max_actor_ckpt_to_keep keep_top_k",
    "run.out": "output_dir default_local_dir checkpoint_dir",
    "validation.every": "eval_steps evals_per_epoch test_freq val_period",
    "validation.at_start": "eval_on_start val_before_train val_at_start",
    "validation.source": "eval_dataset test_datasets val_files validation.data_path",
    "validation.metric": "load_best_model_at_end metric_for_best_model metric_name",
    "validation.stop_after": "early_stopping_patience",
    "validation.limit": "validation.rows val_max_samples max_val_samples",
    "validation.samples": "num_generations_eval val_kwargs.n val_num_generations_per_prompt",
    "validation.temperature": "val_kwargs.temperature val_temperature",
    "logging.report_to": "logger wandb_project use_tensorboard wandb_enabled",
    "logging.completions_every": "log_completions",
    "logging.completions_count": "num_completions_to_print",
}
OTHER_NAMES = {name: key for key, names in OF_OTHERS.items() for name in names.split()}

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
