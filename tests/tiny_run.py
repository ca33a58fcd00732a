"""A complete run of a few seconds: cold start, two steps of RL, evaluations."""

import io
import shutil
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

from ludus.cli.main import main
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path, write_rollouts

WORLD = Path(__file__).parent / "tiny_world.py"

RECIPE = f"""
[env]
name = "{WORLD}"
check = false

[model.init]
vocab_size = 420
hidden_size = 48
intermediate_size = 96
num_layers = 2
num_heads = 2
num_kv_heads = 2
context_tokens = 512

[sft]
steps = 30
batch_size = 8
microbatch_tokens = 4096
learning_rate = 1e-2
warmup_steps = 5

[rollout]
max_turns = 3
max_tokens_per_turn = 48
max_seq_len = 320
concurrency = 32

[algorithm]
group_size = 3

[training]
steps = 2
prompts_per_step = 3
learning_rate = 1e-3
checkpoint_every = 1

[evaluation]
tasks = 8
every = 1
tasks_during = 4

[run]
threads = 1
"""


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def ludus(*words) -> CommandResult:
    """Run a command in this process; errors of argparse become exit codes."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = int(end.code or 0)
    return CommandResult(code, out.getvalue(), err.getvalue())


def refused(*words, code=2) -> str:
    """Run a command that must fail with `code` and without a traceback; return the error message."""
    said = ludus(*words)
    assert said.code == code, said
    announced, found, text = said.err.partition("ludus: ")
    assert found, said
    assert all(line.endswith(" ...") for line in announced.splitlines()), said
    assert "Traceback" not in text
    return found + text


def make_recipe(folder: Path) -> Path:
    path = folder / "tiny.toml"
    path.write_text(RECIPE)
    return path


def make_run(folder: Path) -> Path:
    """Train, after the check of the world; return the run folder."""
    words = ("--from-scratch", "--env.check", "true", "--run.dir", folder / "run")
    said = ludus("train", make_recipe(folder), *words)
    assert said.code == 0, said
    return folder / "run"


def copy_run(run: Path, to: Path) -> Path:
    """Copy a run; return the copy."""
    return Path(shutil.copytree(run, to / "run"))


def with_unlike_rewards(tiny_run: Path, folder: Path) -> Path:
    """Copy the tiny run with rewards that differ within every group, higher for earlier samples."""
    run = Path(shutil.copytree(tiny_run, folder))
    for step in (1, 2):
        path = rollouts_path(run, step)
        records = list(read_rollouts(path))
        write_rollouts(
            path, [replace(r, trajectory=replace(r.trajectory, reward=-r.trajectory.sample)) for r in records]
        )
    return run


def cold_start(tiny_run: Path) -> Path:
    """Return the initial checkpoint of the tiny run."""
    return sorted((tiny_run / "cold_start" / "checkpoints").iterdir())[-1]
