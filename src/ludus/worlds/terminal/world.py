"""The terminal world: tasks, episodes and demonstrations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar

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
from ludus.worlds.terminal.environment import VERDICT, ShellTask, TerminalEnv, made_progress, read_verdict
from ludus.worlds.terminal.solver import alternative_steps, episode, solve, solve_partly
from ludus.worlds.terminal.splits import SPLITS, TOPICS, TerminalSettings, kinds_of, make_task, splits_of
from ludus.worlds.terminal.task import TerminalTask

SYSTEM = (
    "You work in a shell, in the folder /box. Do what is "
    "asked, then say that you are done. Files that you are "
    "not asked to change stay as they are. What counts is the files at the end."
)
BENCH_SPLIT = "bench"
"""The split with the tasks of `bench`."""


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

    def shell_task(self, task: Task) -> ShellTask:
        """Return the task's files, checks and solution; no session may see them."""
        return self._by_id[task.id]

    def environment(self, task: Task) -> TerminalEnv:
        """Return a new episode with its own session."""
        found, seconds = self._by_id[task.id], self.settings.wall_s
        workspace = Workspace(self.sandbox, "shell", found.start.files, replace(LIMITS, wall_s=seconds, cpu_s=seconds))
        tools = self.tools(workspace) if self.settings.tools != "none" else ()
        return TerminalEnv(tools, self.rewards, self.limits, workspace, found, self.settings.check_turns)

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
        settings = self.settings
        rng = random.Random(f"demonstrations/{settings.seed}/{seed}")
        chosen = SPLITS[:3] if settings.unseen == "names" else SPLITS[:1]
        kinds = [kind for kind in kinds_of(settings.topics) if kind.level in settings.levels and kind.split in chosen]
        if not kinds:
            raise ConfigError("The topics have no tasks of these levels.", "Add topics or levels.")
        left: dict[str, list[int]] = {kind.name: [] for kind in kinds}
        while True:
            kind = rng.choice(kinds)
            left[kind.name] = left[kind.name] or rng.sample(kind.shown, len(kind.shown))
            task = make_task(kind, left[kind.name].pop(), 0)
            yield self._dialogue(task, solve_partly(task, rng) if rng.random() < settings.habit else solve(task))

    def expert(self, task: Task) -> Dialogue | None:
        """Return the solution; None without tools, and for a Terminal-Bench task without a solution."""
        found = self._by_id.get(task.id)
        if found is None or self.settings.tools == "none":
            return None
        messages = solve(found) if isinstance(found, TerminalTask) else found.solve()
        return self._dialogue(found, messages) if messages else None

    def difficulty_report(self) -> str:
        """Return how many tasks differ, and how many are solved without skill, without those of `bench`."""
        own, default = _tasks_of(self.settings), _tasks_of(TerminalSettings())
        return shipped_report(self, all(own[split] == default[split] for split in SPLITS))

    def alternative_solutions(self, task: Task) -> Sequence[Sequence[Message]]:
        """Return episodes with other commands, and with files written differently; none for a task of `bench`."""
        found = self._by_id.get(task.id)
        if not isinstance(found, TerminalTask) or self.settings.tools == "none":
            return ()
        return tuple(episode(found, steps) for steps in alternative_steps(found))

    @cached_property
    def _by_id(self) -> Mapping[str, ShellTask]:
        return {task.id: task for tasks in _tasks_of(self.settings).values() for task in tasks}

    @cached_property
    def _task_lists(self) -> Mapping[str, Sequence[Task]]:
        return {s: tuple(self._task(task, s) for task in tasks) for s, tasks in _tasks_of(self.settings).items()}

    def _task(self, task: ShellTask, split: str) -> Task:
        tags = {"split": split, "family": task.topic, "level": str(task.level), "kind": "+".join(task.parts)}
        return Task(task.id, self.opening(task.text), task.suite, tags)

    def _dialogue(self, task: ShellTask, messages: list[Message]) -> Dialogue:
        tools = self.tools(Workspace(self.sandbox, "shell"))
        return Dialogue((*self.opening(task.text), *messages), tools)


@cache
def _tasks_of(settings: TerminalSettings) -> Mapping[str, Sequence[ShellTask]]:
    """Return the tasks of each split, made once per process."""
    if settings.bench is None:
        return splits_of(settings)
    bench = load_bench(Path(settings.bench), settings.bench_workdir, settings.bench_dockerfile, settings.bench_scripts)
    return {**splits_of(settings), BENCH_SPLIT: bench}


def make_terminal_world(settings: Mapping[str, object], limits: ToolLimits) -> TerminalWorld:
    """Return the world with these settings. Raises ConfigError for invalid ones."""
    chosen = read_settings(TerminalSettings, settings)
    if unknown := [topic for topic in chosen.topics if topic not in TOPICS]:
        raise ConfigError(f"There is no topic {unknown[0]!r} (env.settings.topics).", f"Topics: {', '.join(TOPICS)}.")
    if chosen.bench is not None or chosen.per_shape > 1 or chosen.num_held_out:
        _tasks_of(chosen)
    return TerminalWorld(chosen, limits)
