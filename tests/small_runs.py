"""Small runs of the real recipe: the packaged cold start on the real search world, with tiny budgets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ludus.config.load import load_config

BUDGET = {
    "training.steps": "4",
    "training.prompts_per_step": "3",
    "training.checkpoint_every": "2",
    "algorithm.group_size": "4",
    "evaluation.tasks": "6",
    "evaluation.splits": '["test"]',
    "evaluation.temperatures": "[0.0]",
    "evaluation.every": "2",
    "evaluation.tasks_during": "4",
    "rollout.concurrency": "16",
    "run.threads": "1",
    "env.check": "false",
}


SMALLEST = {
    "algorithm__group_size": "2",
    "training__steps": "2",
    "training__prompts_per_step": "2",
    "training__checkpoint_every": "1",
    "evaluation__tasks": "2",
    "evaluation__every": "9",
}
"""Settings of a run that takes seconds: two steps of four episodes, each with a checkpoint."""


def words(folder: Path, **changes: str) -> list[str]:
    """Return the command line of a small run; keywords use `__` for the dot."""
    settings = BUDGET | {"run.dir": str(folder)} | {k.replace("__", "."): v for k, v in changes.items()}
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


def config(folder: Path, **changes: str):
    """Return the configuration of a small run."""
    return load_config("search", words(folder, **changes))


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start `ludus ARGUMENTS` in another process."""
    command = [sys.executable, "-m", "ludus", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def lasting_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a run that must be reproducible: all except timings, log, manifest, config and lock."""
    passing = {"timings.jsonl", "log.txt", "run.json", "lock", "config.toml"}
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in passing and not path.name.endswith(".times.jsonl")
    }


class RecordingReporter:
    """A reporter that records its calls."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.alarms: list[str] = []
        self.episodes = 0
        self.phases: list[str] = []

    def phase(self, name: str, total: int | None, engine=None) -> None:
        self.phases.append(name)

    def episode(self, episode) -> None:
        self.episodes += 1

    def step(self, step, metrics, timings) -> None:
        self.steps.append((step, dict(metrics)))

    def alarm(self, text: str) -> None:
        self.alarms.append(text)


class RunInterrupted(Exception):
    """Raised by `InterruptingReporter` to end a run."""


class InterruptingReporter(RecordingReporter):
    """A reporter that ends the run after step `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def step(self, step, metrics, timings) -> None:
        super().step(step, metrics, timings)
        if step == self.at:
            raise RunInterrupted
