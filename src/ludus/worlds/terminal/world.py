"""The terminal world: tasks, episodes and demonstrations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from ludus.envs.base import World
from ludus.envs.difficulty_report import shipped_report
from ludus.envs.settings import read_settings
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import Dialogue, split_of
from ludus.errors import ConfigError
from ludus.rewards.base import Reward
from ludus.rewards.code.turns import TurnVerifier, suite_progress
from ludus.rewards.code.unit_tests import share_passed, suite_passes
from ludus.rewards.exact_match import well_formed
from ludus.rewards.shaping import only_if
from ludus.sandbox import Sandbox, open_sandbox
from ludus.tools.base import Tool, submit_tool
from ludus.tools.files import files_tools
from ludus.tools.python import shell_tool
from ludus.tools.workspace import LIMITS, Workspace
from ludus.types import Message, Task
from ludus.worlds.terminal.bench.load import load_bench
from ludus.worlds.terminal.environment import VERDICT, Assignment, TerminalEnv, made_progress, read_verdict
from ludus.worlds.terminal.job import TerminalJob
from ludus.worlds.terminal.solver import alternative_steps, episode, solve, solve_partly
from ludus.worlds.terminal.tasks import LEVELS, SPLITS, TOPICS, kinds_of, make_job, splits_of, splits_of_shipped_kinds

SYSTEM = (
    "You work in a shell, in the folder /box. Do what is "
    "asked, then say that you are done. Files that you are "
    "not asked to change stay as they are. What counts is the files at the end."
)
BENCH_SPLIT = "bench"
"""The split with the tasks of `bench`."""


class TerminalSettings(BaseModel):
    """Settings of the terminal world (`env.settings`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    levels: tuple[Literal[1, 2, 3, 4], ...] = Field(LEVELS, min_length=1)
    """Difficulty levels."""
    topics: tuple[str, ...] = Field(TOPICS, min_length=1)
    """Topics of the tasks."""
    per_shape: int = Field(1, ge=1)
    """Number of tasks that differ only in names and numbers; limited by the shipped file."""
    num_held_out: int = Field(0, ge=0)
    """Minimum number of tasks in `test` if `unseen = "names"`, limited by the number of different texts."""
    unseen: Literal["shapes", "names"] = "shapes"
    """What distinguishes validation and test from training: solutions, or only names and numbers."""
    tools: Literal["all", "shell", "none"] = "all"
    """A shell and file tools, a shell alone, or none (a baseline)."""
    wall_s: float = Field(20.0, gt=0)
    """Time limit of a call in seconds."""
    habit: float = Field(0.4, ge=0, le=1)
    """Fraction of demonstrations that only look at the files, or leave out the last command."""
    well_formed_weight: float = Field(0.1, ge=0, lt=0.5)
    """Weight, relative to a solved task, of an episode without failed calls that made progress."""
    check_turns: bool = False
    """Check the files after each turn with calls, invisibly to the model, for the turn verifier."""
    bench: str | None = None
    """Folder with tasks in the layout of Terminal-Bench or Harbor, which become the split `bench`."""
    bench_workdir: str = "/app"
    """Working directory of those tasks, replaced by /box."""
    bench_scripts: Literal["refuse", "trust"] = "refuse"
    """Whether to accept tasks graded by `run-tests.sh` or `test.sh`, whose verdict the policy's programs can forge."""
    bench_dockerfile: Literal["refuse", "skip", "ignore"] = "refuse"
    """Treatment of tasks that need a container because their Dockerfile does more than copy files."""
    seed: int = 0
    """Seed of the choice of tasks and pairs, and of the flaws of demonstrations."""


@dataclass(frozen=True)
class TerminalWorld(World):
    """Tasks in a shell."""

    num_text_dialogues: ClassVar[int] = 1_000

    settings: TerminalSettings = field(default_factory=TerminalSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    sandbox: Sandbox = field(default_factory=open_sandbox)
    name: str = "terminal"

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits; `bench` only if the settings name a folder."""
        return SPLITS if self.settings.bench is None else (*SPLITS, BENCH_SPLIT)

    @cached_property
    def rewards(self) -> tuple[Reward, ...]:
        """The outcome is 1 if all checks hold; the share of checks that newly hold is reported."""
        return (
            Reward("solved", suite_passes(read_verdict), outcome=True),
            Reward("share", share_passed(read_verdict, "fail_to_pass"), weight=0.0),
            Reward("well_formed", only_if(well_formed, made_progress), weight=self.settings.well_formed_weight),
        )

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        """With `check_turns`, every check that newly holds is a milestone."""
        return suite_progress(VERDICT) if self.settings.check_turns and self.settings.tools != "none" else None

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split, levels and topics mixed."""
        return split_of(self._task_lists, split, self.name)

    def job(self, task: Task) -> Assignment:
        """Return the task's files, checks and solution; no session may see them."""
        return self._jobs[task.id]

    def environment(self, task: Task) -> TerminalEnv:
        """Return a new episode with its own session."""
        job, seconds = self._jobs[task.id], self.settings.wall_s
        workspace = Workspace(self.sandbox, "shell", job.start.files, replace(LIMITS, wall_s=seconds, cpu_s=seconds))
        tools = self.tools(workspace) if self.settings.tools != "none" else ()
        return TerminalEnv(tools, self.rewards, self.limits, workspace, job, self.settings.check_turns)

    def tools(self, workspace: Workspace) -> tuple[Tool, ...]:
        """Return the tools of an episode."""
        shell = shell_tool(workspace)
        return (shell,) if self.settings.tools == "shell" else (shell, *files_tools(workspace), submit_tool())

    def with_sandbox(self, sandbox: Sandbox) -> TerminalWorld:
        """Return this world with another sandbox."""
        return replace(self, sandbox=sandbox)

    @property
    def episodes_at_once(self) -> int | None:
        """The sandbox's maximum number of sessions."""
        return self.sandbox.max_sessions

    async def close(self) -> None:
        """Close the sandbox."""
        await self.sandbox.close()

    def opening(self, question: str) -> tuple[Message, ...]:
        """Return the system message and the instruction."""
        return Message(role="system", content=SYSTEM), Message(role="user", content=question)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield demonstrations without end, some of them flawed.

        Their tasks are of the kinds of training tasks, but in no split; those of a kind are shuffled and repeat.
        """
        settings, homes = self.settings, splits_of_shipped_kinds()
        rng = random.Random(f"demonstrations/{settings.seed}/{seed}")
        by_names = settings.unseen == "names"
        kinds = [
            kind
            for kind in kinds_of(settings.topics)
            if kind.level in settings.levels and (homes[kind.name] == "train" or (by_names and not kind.held_out))
        ]
        if not kinds:
            raise ConfigError("The topics have no tasks of these levels.", "Add topics or levels.")
        left: dict[str, list[int]] = {kind.name: [] for kind in kinds}
        while True:
            kind = rng.choice(kinds)
            left[kind.name] = left[kind.name] or rng.sample(kind.shown, len(kind.shown))
            job = make_job(kind, left[kind.name].pop(), 0)
            yield self._shown(job, solve_partly(job, rng) if rng.random() < settings.habit else solve(job))

    def expert(self, task: Task) -> Dialogue | None:
        """Return the solution; None without tools, and for a Terminal-Bench task without a solution."""
        job = self._jobs.get(task.id)
        if job is None or self.settings.tools == "none":
            return None
        messages = solve(job) if isinstance(job, TerminalJob) else job.solve()
        return self._shown(job, messages) if messages else None

    def difficulty_report(self) -> str:
        """Return how many tasks differ, and how many are solved without skill, without those of `bench`."""
        default = {split: _jobs_of(TerminalSettings())[split] for split in SPLITS}
        return shipped_report(self, {split: _jobs_of(self.settings)[split] for split in SPLITS} == default)

    def alternative_solutions(self, task: Task) -> Sequence[Sequence[Message]]:
        """Return episodes with other commands, and with files written differently; none for a task of `bench`."""
        job = self._jobs.get(task.id)
        if not isinstance(job, TerminalJob) or self.settings.tools == "none":
            return ()
        return tuple(episode(job, steps) for steps in alternative_steps(job))

    @cached_property
    def _jobs(self) -> Mapping[str, Assignment]:
        return {job.id: job for jobs in _jobs_of(self.settings).values() for job in jobs}

    @cached_property
    def _task_lists(self) -> Mapping[str, Sequence[Task]]:
        return {s: tuple(self._task(job, s) for job in jobs) for s, jobs in _jobs_of(self.settings).items()}

    def _task(self, job: Assignment, split: str) -> Task:
        tags = {"split": split, "family": job.topic, "level": str(job.level), "kind": "+".join(job.parts)}
        return Task(job.id, self.opening(job.text), job.suite, tags)

    def _shown(self, job: Assignment, messages: list[Message]) -> Dialogue:
        tools = self.tools(Workspace(self.sandbox, "shell"))
        return Dialogue((*self.opening(job.text), *messages), tools)


@cache
def _jobs_of(settings: TerminalSettings) -> Mapping[str, Sequence[Assignment]]:
    """Return the tasks of each split, made once per process."""
    found: dict[str, Sequence[Assignment]] = {
        **splits_of(
            settings.levels,
            settings.topics,
            settings.per_shape,
            settings.seed,
            settings.unseen == "shapes",
            settings.num_held_out,
        )
    }
    if settings.bench is not None:
        found[BENCH_SPLIT] = load_bench(
            Path(settings.bench), settings.bench_workdir, settings.bench_dockerfile, settings.bench_scripts
        )
    return found


def make_terminal_world(settings: Mapping[str, object], limits: ToolLimits) -> TerminalWorld:
    """Return the world with these settings. Raises ConfigError for invalid ones."""
    chosen = read_settings(TerminalSettings, settings)
    if unknown := [topic for topic in chosen.topics if topic not in TOPICS]:
        raise ConfigError(f"There is no topic {unknown[0]!r} (env.settings.topics).", f"Topics: {', '.join(TOPICS)}.")
    if chosen.bench is not None or chosen.per_shape > 1 or chosen.num_held_out:
        _jobs_of(chosen)
    return TerminalWorld(chosen, limits)
