"""The terminal world: tasks, episodes and demonstrations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from ludus.envs.base import World, room_of
from ludus.envs.settings import read_settings
from ludus.envs.tool_env import ToolEnv
from ludus.envs.tool_world import Dialogue, check_split
from ludus.envs.toolbox import ToolLimits
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
from ludus.worlds.terminal.alternative_solutions import other_ways
from ludus.worlds.terminal.bench.load import load_bench
from ludus.worlds.terminal.difficulty_report import idle_line, measured, report
from ludus.worlds.terminal.episode import VERDICT, Assignment, TerminalEpisode, mended, read_verdict
from ludus.worlds.terminal.job import TerminalJob
from ludus.worlds.terminal.solver import fall_short, played, solve
from ludus.worlds.terminal.splits import LEVELS, SPLITS, TOPICS, homes_of_kinds, kinds_of, splits_of
from ludus.worlds.terminal.task_file import make_job

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
    """Which levels."""
    topics: tuple[str, ...] = Field(TOPICS, min_length=1)
    """What tasks are about."""
    per_shape: int = Field(1, ge=1)
    """Tasks that differ in names and numbers alone, as many as the shipped file has at most."""
    num_held_out: int = Field(0, ge=0)
    """With `unseen = "names"` the split `test` has so many tasks at least, as far as their texts differ."""
    unseen: Literal["shapes", "names"] = "shapes"
    """What validation and test do not share with training: ways to do it, or names and numbers alone."""
    tools: Literal["all", "shell", "none"] = "all"
    """A shell and tools for files, a shell alone, or nothing: a baseline."""
    wall_s: float = Field(20.0, gt=0)
    """Seconds that a call may take."""
    habit: float = Field(0.4, ge=0, le=1)
    """Share of the demonstrations that only look, or leave the last command out."""
    well_formed_weight: float = Field(0.1, ge=0, lt=0.5)
    """Of an episode without a failed call that mended something and broke nothing; a solved task weighs 1."""
    check_turns: bool = False
    """Judge the files after each turn with calls, unseen, for the turn verifier."""
    bench: str | None = None
    """A folder with tasks in the layout of Terminal-Bench or Harbor, which become the split `bench`."""
    bench_workdir: str = "/app"
    """The folder that those tasks speak of; it becomes /box."""
    bench_scripts: Literal["refuse", "trust"] = "refuse"
    """Tasks judged by `run-tests.sh` or `test.sh`: programs of the policy that it runs may decide that."""
    bench_dockerfile: Literal["refuse", "skip", "ignore"] = "refuse"
    """What to do with a task that needs a container, as its Dockerfile does more than copy files."""
    seed: int = 0
    """Which tasks of each kind come first, which make pairs, and what demonstrations leave out."""


@dataclass(frozen=True)
class TerminalWorld(World):
    """Work in a shell."""

    num_text_dialogues: ClassVar[int] = 1_000

    settings: TerminalSettings = field(default_factory=TerminalSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    sandbox: Sandbox = field(default_factory=open_sandbox)
    name: str = "terminal"

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits; `bench` only where the settings name a folder."""
        return SPLITS if self.settings.bench is None else (*SPLITS, BENCH_SPLIT)

    @cached_property
    def rewards(self) -> tuple[Reward, ...]:
        """All that has to hold decides; the share that does is reported."""
        return (
            Reward("solved", suite_passes(read_verdict), outcome=True),
            Reward("share", share_passed(read_verdict, "fail_to_pass"), weight=0.0),
            Reward("well_formed", only_if(well_formed, mended), weight=self.settings.well_formed_weight),
        )

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        """A milestone is one more check that holds; there is no verifier unless `check_turns` is on."""
        return suite_progress(VERDICT) if self.settings.check_turns and self.settings.tools != "none" else None

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, levels and topics mixed, in a fixed order."""
        check_split(split, self.splits, self.name)
        return self._task_lists[split]

    def job(self, task: Task) -> Assignment:
        """What a task is made of, its checks and solution included: not for an environment's session."""
        return self._jobs[task.id]

    def environment(self, task: Task) -> TerminalEpisode:
        """A fresh episode in a session of its own."""
        job = self._jobs[task.id]
        if self.settings.tools == "none":
            return TerminalEpisode(ToolEnv((), self.rewards, self.limits), None, job, self.sandbox)
        workspace = Workspace(
            self.sandbox, "shell", job.start.files, replace(LIMITS, wall_s=self._wall_s, cpu_s=self._wall_s)
        )
        plain = ToolEnv(self.tools(workspace), self.rewards, self.limits, resources=[workspace])
        return TerminalEpisode(plain, workspace, job, self.sandbox, self.settings.check_turns)

    def tools(self, workspace: Workspace) -> tuple[Tool, ...]:
        """The tools of an episode."""
        shell = shell_tool(workspace)
        if self.settings.tools == "shell":
            return (shell,)
        return (shell, *files_tools(workspace), submit_tool())

    def with_sandbox(self, sandbox: Sandbox) -> TerminalWorld:
        """This world with that sandbox."""
        return replace(self, sandbox=sandbox)

    @property
    def episodes_at_once(self) -> int | None:
        """As many as the sandbox has room for sessions."""
        return room_of(self.sandbox)

    async def close(self) -> None:
        """End what runs in the sandbox."""
        await self.sandbox.close()

    def opening(self, question: str) -> tuple[Message, ...]:
        """System message and task."""
        return Message(role="system", content=SYSTEM), Message(role="user", content=question)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """An endless stream by the flawed oracle.

        Its tasks are of the kinds of training tasks, but in no split. Those of a kind come shuffled, and
        again when all have come.
        """
        settings, homes = self.settings, homes_of_kinds()
        rng = random.Random(f"demonstrations/{settings.seed}/{seed}")
        dealt = settings.unseen == "names"
        kinds = [
            kind
            for kind in kinds_of(settings.topics)
            if kind.level in settings.levels and (homes[kind.name] == "train" or (dealt and not kind.held_out))
        ]
        if not kinds:
            raise ConfigError("The topics have no tasks of these levels.", "Add topics or levels.")
        left: dict[str, list[int]] = {kind.name: [] for kind in kinds}
        while True:
            kind = rng.choice(kinds)
            left[kind.name] = left[kind.name] or rng.sample(kind.shown, len(kind.shown))
            job = make_job(kind, left[kind.name].pop(), 0)
            yield self._shown(job, fall_short(job, rng) if rng.random() < settings.habit else solve(job))

    def expert(self, task: Task) -> Dialogue | None:
        """The oracle without flaws; None without tools, and where a foreign task brings no solution."""
        job = self._jobs.get(task.id)
        if job is None or self.settings.tools == "none":
            return None
        messages = solve(job) if isinstance(job, TerminalJob) else job.solve()
        return self._shown(job, messages) if messages else None

    def survey(self, measure: bool) -> str:
        """How many tasks differ, and what is solved without skill; nothing of foreign tasks."""
        made = _made(self.settings)
        splits = {split: [job for job in made[split] if isinstance(job, TerminalJob)] for split in SPLITS}
        told = f"{report(splits)}\n\n{idle_line(splits)}\n"
        if measure:
            return told + "\n".join(measured(splits, self.sandbox))
        seconds = 2 * len(splits["test"])
        return f"{told}majority: runs commands, for some {seconds} seconds; --survey measures it"

    def other_ways(self, task: Task) -> Sequence[Sequence[Message]]:
        """Other commands, and files in another writing; none for a foreign task."""
        job = self._jobs.get(task.id)
        if not isinstance(job, TerminalJob) or self.settings.tools == "none":
            return ()
        return tuple(played(job, steps) for steps in other_ways(job))

    @property
    def _wall_s(self) -> float:
        return self.settings.wall_s

    @cached_property
    def _jobs(self) -> Mapping[str, Assignment]:
        return {job.id: job for jobs in _made(self.settings).values() for job in jobs}

    @cached_property
    def _task_lists(self) -> Mapping[str, Sequence[Task]]:
        return {split: tuple(self._task(job, split) for job in jobs) for split, jobs in _made(self.settings).items()}

    def _task(self, job: Assignment, split: str) -> Task:
        tags = {"split": split, "family": job.topic, "level": str(job.level), "kind": "+".join(job.parts)}
        return Task(job.id, self.opening(job.text), job.suite, tags)

    def _shown(self, job: Assignment, messages: list[Message]) -> Dialogue:
        tools = self.tools(Workspace(self.sandbox, "shell"))
        return Dialogue((*self.opening(job.text), *messages), tools)


@cache
def _made(settings: TerminalSettings) -> Mapping[str, Sequence[Assignment]]:
    """The tasks of each split, made once in a process."""
    by_shape = settings.unseen == "shapes"
    found: dict[str, Sequence[Assignment]] = {
        **splits_of(
            settings.levels, settings.topics, settings.per_shape, settings.seed, by_shape, settings.num_held_out
        )
    }
    if settings.bench is not None:
        found[BENCH_SPLIT] = load_bench(
            Path(settings.bench), settings.bench_workdir, settings.bench_dockerfile, settings.bench_scripts
        )
    return found


def make_terminal_world(settings: Mapping[str, object], limits: ToolLimits) -> TerminalWorld:
    """The factory by which the world is registered. Raises ConfigError for settings that do not fit."""
    chosen = read_settings(TerminalSettings, settings)
    if strange := [topic for topic in chosen.topics if topic not in TOPICS]:
        known = ", ".join(TOPICS)
        raise ConfigError(f"There is no topic {strange[0]!r} (env.settings.topics).", f"Topics: {known}.")
    world = TerminalWorld(chosen, limits)
    if chosen.bench is not None or chosen.per_shape > 1 or chosen.num_held_out:
        _made(chosen)
    return world
