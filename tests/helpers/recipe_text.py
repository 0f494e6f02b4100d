"""A valid recipe as text, which tests edit to make it wrong."""

import pytest

from qerl.base.errors import ConfigError
from qerl.config.recipe import load_recipe

RECIPE = """\
model:
  base: Qwen/Qwen2.5-7B-Instruct
  format: nvfp4
  trust_remote_code: false
adapter:
  rank: 32
  targets: [q_proj, v_proj]
  train_norms: false
data:
  task: gsm8k
  prompt_template: default
  limit: 100
rewards:
  - name: accuracy
    weight: 1.0
  - name: soft_overlong
    args: {cache: 256}
rollout:
  engine: auto
  prompts_per_step: 16
  group_size: 8
  max_new_tokens: 1024
  temperature: 1.0
  top_p: 1.0
  kernel: auto
loss:
  type: dapo
  level: token
  clip_low: 0.2
  clip_high: 0.28
  delta: null
  kl_coef: 0.0
  num_iterations: 1
  correction:
    mode: token_truncate
    cap: 2.0
    floor: null
  mismatch_gate: 0.003
noise:
  enabled: true
  sigma_start: 1e-2
  sigma_end: 5e-4
  num_stages: 10
  where: rollout
optim:
  learning_rate: 1e-5
  warmup_ratio: 0.1
run:
  steps: 100
  seed: 0
  micro_batch_tokens: 8192
  save_every: 50
"""


def edited(tmp_path, old, new):
    assert RECIPE.count(old + "\n") == 1
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE.replace(old + "\n", new + "\n"))
    return path


def check_wrong_edit(tmp_path, old, new, says):
    """Assert that the edited line is refused by a one-line error that starts with its number and says this."""
    path = edited(tmp_path, old, new)
    with pytest.raises(ConfigError) as error:
        load_recipe(path)
    message = str(error.value)
    assert says in message
    assert "\n" not in message
    line = RECIPE[: RECIPE.index(old + "\n")].count("\n") + 1
    assert message.startswith(f"{path}:{line}: ")
