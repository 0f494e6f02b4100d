"""A run of seconds on a random base: what the tests of the trainer share."""

from qerl.recipe import load_recipe

REWARD = '''
def digits(completions, **columns):
    """Share of characters that are digits: dense, so that groups differ even on a random model."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
'''
SETTINGS = (
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "rollout.max_new_tokens=8",
    "run.micro_batch_tokens=56",
    "run.save_every=2",
    "noise.num_stages=3",
    "noise.sigma_start=0.05",
    "noise.sigma_end=0.01",
    "data.limit=12",
    "loss.mask_truncated=false",
    "optim.warmup_ratio=0",
    "logging.completions_every=2",
)


def small_config(base, folder, *overrides, steps=6, out="run"):
    """The tiny recipe, smaller, on `base`, with a dense reward; writes the reward's file into `folder`."""
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    rewards = f"rewards=[{{name: '{reward}:digits'}}]"
    return load_recipe("tiny", [*SETTINGS, rewards, *overrides], base=str(base), steps=steps, out=str(folder / out))
