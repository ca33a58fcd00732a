"""Runs of a few seconds with a small vision-language model on the world of pictures."""

from pathlib import Path

from tests.tiny_run import CommandResult, ludus

RECIPE = f"""
[model]
path = "MODEL"

[env]
name = "{Path(__file__).parent / "vision_world.py"}"

[sft]
steps = 40
batch_size = 16
microbatch_tokens = 4096
learning_rate = 3e-3
warmup_steps = 5

[rollout]
max_turns = 2
max_tokens_per_turn = 4
max_seq_len = 128
concurrency = 32

[algorithm]
group_size = 4

[training]
steps = 2
prompts_per_step = 4
learning_rate = 1e-4
checkpoint_every = 1

[evaluation]
tasks = 32
every = 1
tasks_during = 4
splits = ["test"]

[run]
threads = 1
"""


def command(name: str, model: Path, folder: Path, *words: object) -> CommandResult:
    """Run `ludus NAME` on the recipe with this model."""
    path = folder / "vision.toml"
    path.write_text(RECIPE.replace("MODEL", str(model)))
    return ludus(name, path, *words)
