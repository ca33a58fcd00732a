"""The terminal world: tasks, episodes and demonstrations."""

from __future__ import annotations

import asyncio
import json
import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar, Final

from ludus.envs.base import SessionWorld, shipped_report
from ludus.envs.settings import read_settings
from ludus.envs.task_archive import SPLITS
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.envs.tool_world import Dialogue, assistant, split_of, tool_turn
from ludus.errors import ConfigError, WorldError
from ludus.rewards.base import Reward, truth_of
from ludus.rewards.code.turns import TurnVerifier, suite_progress, turn_report
from ludus.rewards.code.unit_tests import Suite, read_report, share_passed, suite_passes
from ludus.rewards.exact_match import well_formed
from ludus.rewards.extract import last_output
from ludus.rewards.shaping import only_if
from ludus.tools.base import Tool, ToolError, submit_tool
from ludus.tools.files import files_tools
from ludus.tools.workspace import LIMITS, Workspace, shell_tool
from ludus.types import Action, Message, StepResult, Task, ToolOutcome, ToolStatus, Trajectory
from ludus.worlds.terminal.bench import BenchTask, load_bench
from ludus.worlds.terminal.checks import Check, ProcessId, SessionState, matches
from ludus.worlds.terminal.splits import TerminalSettings, kinds_of, make_task, splits_of
from ludus.worlds.terminal.task import TerminalTask, start_services

SYSTEM = (
    "You work in a shell, in the folder /box. Do what is asked, then say that you are done. Files that you are "
    "not asked to change stay as they are. What counts is the files at the end."
)
BENCH_SPLIT = "bench"
"""The split with the tasks of `bench`."""
ShellTask = TerminalTask | BenchTask
"""The subject of an episode: a task of this world, or a Terminal-Bench task."""
VERDICT: Final = "verdict"
"""Tool name of the outcome with the report."""
read_verdict = last_output(VERDICT)
SETTLE_S: Final = 0.5
"""Seconds before the final process list, because signals and starts take effect late."""


class TerminalEnv(ToolEnv):
    """An episode, graded by the files that it leaves.

    At the end the files are copied out of the session, which is closed. They are graded on the host
    (`ludus.worlds.terminal.checks`), or by programs run in a fresh sandbox over some of them; no part of the grader
    is ever in the session. If the task has services, the sandbox reports the running processes before the session
    closes (`ludus.worlds.terminal.task`). The report is an outcome that the model does not see; with `check_turns`
    there is also one after each turn with calls. Without tools no session is opened.
    """

    def __init__(self, world: TerminalWorld, task: ShellTask) -> None:
        seconds = world.settings.wall_s
        limits = replace(LIMITS, wall_s=seconds, cpu_s=seconds)
        self._workspace = Workspace(world.sandbox, "shell", task.start.files, limits)
        tools = world.tools(self._workspace) if world.settings.tools != "none" else ()
        super().__init__(tools, world.rewards, world.limits, [self._workspace] if tools else [])
        self._task = task
        self._check_turns = world.settings.check_turns and bool(tools)
        self._started: Mapping[str, ProcessId] = {}
        self._final: SessionState | None = None
        self._turns = 0

    async def start(self, task: Task) -> list[Message]:
        """Open the session with the task's files and services. Raises WorldError if a service does not start."""
        messages = await super().start(task)
        if self.tools and self._task.start.executable:
            await self._workspace.restore(self._task.start)
        if self.tools and self._task.services:
            try:
                self._started = await start_services(self._workspace, self._task.services, self._task.after_start)
            except ToolError as error:
                raise WorldError(f"The task's services cannot be started: {error}") from error
        return messages

    async def step(self, action: Action) -> StepResult:
        """Run the calls; at the end grade the files. All checks fail if the session failed or has too many files."""
        result = await super().step(action)
        self._turns += 1
        if not result.done and not (self._check_turns and action.calls):
            return result
        try:
            state = await self._state(settle=result.done)
        except ToolError:
            outcomes = (_verdict("{}"),) if result.done else ()
        else:
            if result.done:
                await self._workspace.close()
                self._final = state
            report = await self._grade(state)
            outcomes = (_verdict(report) if result.done else turn_report(self._turns - 1, report),)
        return replace(result, outcomes=(*result.outcomes, *outcomes))

    async def grade_again(self) -> ToolOutcome | None:
        return None if self._final is None else _verdict(await self._grade(self._final))

    async def _state(self, settle: bool) -> SessionState:
        """Return files and processes. Raises ToolError if the session fails."""
        running = bool(self.tools and self._task.services)
        if running and settle:
            await asyncio.sleep(SETTLE_S)
        found = await self._workspace.snapshot() if self.tools else self._task.start
        processes = await self._workspace.processes() if running else ()
        return SessionState(found.files, found.executable, self._started, processes)

    async def _grade(self, state: SessionState) -> str:
        return json.dumps(dict(await self._task.grade(state, self._workspace.sandbox)), sort_keys=True)


def _verdict(report: str) -> ToolOutcome:
    return ToolOutcome("", VERDICT, ToolStatus.OK, report)


@dataclass(frozen=True)
class TerminalWorld(SessionWorld):
    """Shell tasks."""

    num_text_dialogues: ClassVar[int] = 1_000

    settings: TerminalSettings = field(default_factory=TerminalSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    name: str = "terminal"

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits; `bench` only if the settings name a folder."""
        return SPLITS if self.settings.bench is None else (*SPLITS, BENCH_SPLIT)

    @cached_property
    def rewards(self) -> tuple[Reward, ...]:
        return (
            Reward("solved", suite_passes(read_verdict), outcome=True),
            Reward("share", share_passed(read_verdict, "fail_to_pass"), weight=0.0),
            Reward("well_formed", only_if(well_formed, made_progress), weight=self.settings.well_formed_weight),
        )

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        return suite_progress(VERDICT) if self.settings.check_turns and self.settings.tools != "none" else None

    def tasks(self, split: str) -> Sequence[Task]:
        return split_of(self._task_lists, split, self.name)

    def environment(self, task: Task) -> TerminalEnv:
        return TerminalEnv(self, self.shell_tasks[task.id])

    def tools(self, workspace: Workspace) -> tuple[Tool, ...]:
        shell = shell_tool(workspace)
        return (shell,) if self.settings.tools == "shell" else (shell, *files_tools(workspace), submit_tool())

    def opening(self, question: str) -> tuple[Message, ...]:
        return Message(role="system", content=SYSTEM), Message(role="user", content=question)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield demonstrations without end, some of them flawed.

        The tasks have the kinds of training tasks but belong to no split; those of a kind are shuffled and repeat.
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
            steps = task.steps
            if rng.random() < settings.flaw_rate:  # omit the last command, or only read the files
                steps = steps[:-1] if rng.random() < 0.5 else ()
            yield self._dialogue(task, episode(task, steps))

    def expert(self, task: Task) -> Dialogue | None:
        """Return the solution; None without tools, and for a Terminal-Bench task without a solution."""
        found = self.shell_tasks.get(task.id)
        if found is None or self.settings.tools == "none":
            return None
        messages = episode(found, found.steps) if isinstance(found, TerminalTask) else found.solve()
        return self._dialogue(found, messages) if messages else None

    def difficulty_report(self) -> str:
        """Return the number of distinct tasks and the success rates of trivial policies, `bench` excluded."""
        own, default = _tasks_of(self.settings), _tasks_of(TerminalSettings())
        return shipped_report(self, all(own[split] == default[split] for split in SPLITS))

    def alternative_solutions(self, task: Task) -> Sequence[Sequence[Message]]:
        """Return episodes with other commands, and with files written differently; none for a task of `bench`."""
        found = self.shell_tasks.get(task.id)
        if not isinstance(found, TerminalTask) or self.settings.tools == "none":
            return ()
        return tuple(episode(found, steps) for steps in alternative_steps(found))

    @cached_property
    def shell_tasks(self) -> Mapping[str, ShellTask]:
        """Files, checks and solutions by the task's id; they must not reach a session."""
        return {task.id: task for tasks in _tasks_of(self.settings).values() for task in tasks}

    @cached_property
    def _task_lists(self) -> Mapping[str, Sequence[Task]]:
        return {s: tuple(self._task(task, s) for task in tasks) for s, tasks in _tasks_of(self.settings).items()}

    def _task(self, task: ShellTask, split: str) -> Task:
        tags = {"split": split, "family": task.topic, "level": str(task.level), "kind": "+".join(task.parts)}
        return Task(task.id, self.opening(task.text), task.suite, tags)

    def _dialogue(self, task: ShellTask, messages: list[Message]) -> Dialogue:
        return Dialogue((*self.opening(task.text), *messages), self.tools(Workspace(self.sandbox, "shell")))


def made_progress(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if a check newly holds at the end and no check that held at the start fails, else 0."""
    passed, suite = read_report(read_verdict(trajectory)).passed, truth_of(task, Suite)
    return float(any(test in passed for test in suite.fail_to_pass) and passed.issuperset(suite.pass_to_pass))


@cache
def _tasks_of(settings: TerminalSettings) -> Mapping[str, Sequence[ShellTask]]:
    if settings.bench is None:
        return splits_of(settings)
    bench = load_bench(Path(settings.bench), settings.bench_workdir, settings.bench_dockerfile, settings.bench_scripts)
    return {**splits_of(settings), BENCH_SPLIT: bench}


def make_terminal_world(settings: Mapping[str, object], limits: ToolLimits) -> TerminalWorld:
    """Return the world with these settings. Raises ConfigError for invalid ones."""
    chosen = read_settings(TerminalSettings, settings)
    if chosen.bench is not None or chosen.per_shape > 1 or chosen.num_held_out:
        _tasks_of(chosen)
    return TerminalWorld(chosen, limits)


# Scripted solutions; the output of commands is computed without running them (a test compares it with the shell)

NO_OUTPUT = "[no output]"
HEAD_LINES = 4
_SCRIPT = "/tmp/way.sh"


def episode(task: TerminalTask, steps: Sequence[str]) -> list[Message]:
    """Return the messages of an episode that reads the files, runs these commands and ends."""
    files, messages = task.start.files, list[Message]()
    listed = "\n".join(sorted(f"./{path}" for path in files if "/.git" not in f"/{path}"))
    calls = [("find . -type f -not -path '*/.git*' | sort", listed or NO_OUTPUT)]
    for path in task.preview:
        head = "\n".join(files[path].decode().split("\n")[:HEAD_LINES]).rstrip("\n")
        calls.append((f"head -n {HEAD_LINES} {path}", head or NO_OUTPUT))
    for number, (command, output) in enumerate([*calls, *((step, NO_OUTPUT) for step in steps)]):
        messages += tool_turn(number, "shell", {"command": command}, output)
    tops = sorted({path.partition("/")[0] for path in files} - {".gitconfig"})
    return [*messages, assistant(f"Done with {', '.join(tops[:3]) or 'the script'}.")]


def alternative_steps(task: TerminalTask) -> Iterator[tuple[str, ...]]:
    """Yield other commands that solve the task: all steps as one script; the steps, then texts written differently."""
    steps = "\n".join(task.steps)
    yield (f"cat > {_SCRIPT} <<'END_OF_WAY'\n{steps}\nEND_OF_WAY", f"bash {_SCRIPT} && rm {_SCRIPT}")
    taken = tuple(pattern for one in task.command_checks for pattern in one.takes)
    checked = [check for check in task.file_checks if check.kind == "has_text"]
    texts = {str(check.arguments["path"]): equivalent_text(check) for check in checked}
    changed = {path: text for path, text in texts.items() if text and not matches(path, taken)}
    if changed:
        yield *task.steps, *(f"printf %s {shlex.quote(text)} > {shlex.quote(p)}" for p, text in changed.items())


def equivalent_text(check: Check) -> str:
    """Return a text other than the expected one that the check `has_text` accepts; empty if there is none."""
    due = str(check.arguments["due"])
    lines, how, other = due.rstrip("\n").split("\n"), check.arguments["how"], ""
    if how == "json":
        other = json.dumps(json.loads(due), indent=3, sort_keys=True)
    elif how == "unordered":
        other = "\n".join(reversed(lines))
    elif how == "lines" and lines[0]:
        other = "\n".join([f"{lines[0]} ", *lines[1:]])
    return other if other != due else ""
