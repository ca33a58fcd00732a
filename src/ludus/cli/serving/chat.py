"""Chat with a checkpoint that uses its tools, and see its reasoning, tool calls and tool results."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from ludus.cli.arguments import environment_config, model_settings, policy_config
from ludus.cli.command import list_commands
from ludus.cli.ui.help_text import fill_columns
from ludus.cli.ui.terminal import load_libraries, make_console, print_line, print_text
from ludus.cli.ui.transcripts import calls, describe_tool, outcome_text, shorten
from ludus.config.schema import Config
from ludus.envs.base import Environment
from ludus.envs.registry import build_world
from ludus.errors import UserError, WorldError
from ludus.recipes import list_recipes
from ludus.rollouts.episode import EngineChatSession, world_errors
from ludus.rollouts.scheduler import sampling_params
from ludus.training.run.run_dir import RunFolder, latest_checkpoint
from ludus.types import Action, Message, StopReason, Task

if TYPE_CHECKING:
    from ludus.cli.ui.load_run import LoadedRun

PartKind = Literal["thinking", "call", "malformed call", "tool", "answer", "text", "end"]
DEFAULT_WORLD = "search"
STYLES: dict[PartKind, str] = {
    "thinking": "dim italic",
    "call": "bold cyan",
    "malformed call": "red",
    "tool": "yellow",
    "answer": "bold green",
    "text": "cyan",
    "end": "magenta",
}
_STOP_TEXTS = {
    StopReason.PROMPT_TOO_LONG: "The question does not fit into the model's context.",
    StopReason.MAX_TOKENS: "The dialogue is full (rollout.max_seq_len).",
    StopReason.TRUNCATED: "The model was cut off (rollout.max_tokens_per_turn).",
    StopReason.MAX_TURNS: "No answer within rollout.max_turns turns.",
    StopReason.EMPTY_ANSWER: "The model returned an empty answer.",
}
_FINAL = (StopReason.PROMPT_TOO_LONG, StopReason.MAX_TOKENS, StopReason.TRUNCATED)
"""Stop reasons after which the dialogue cannot be continued."""


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Chat until /exit or the end of the input."""
    if not 0 <= args.temperature < float("inf"):
        raise UserError(f"--temperature is {args.temperature:g}.", "Use 0 (greedy) or a positive number.")
    folder, config = target_config(args.target, args.world, overrides)
    if folder is not None:
        latest_checkpoint(folder)
    world = build_world(config.env, config.rollout, config.sandbox)
    load_libraries()
    from ludus.cli.ui.load_run import open_weights

    console = make_console()
    with asyncio.Runner() as runner:
        opened = runner.run(open_weights(config, folder, world))
        try:
            where = f"step {opened.step} of {args.target}" if folder else args.target
            print_text(console, f"{where}, in the world {opened.session.world.name}. /help lists the commands.")
            chat(ChatRepl(opened, args.temperature), console, runner)
        finally:
            runner.run(opened.aclose())


def target_config(target: str, world: str | None, overrides: Sequence[str]) -> tuple[RunFolder | None, Config]:
    """Return the run folder that `target` names, if it is one, and the configuration; a recipe is its cold start."""
    path = Path(target)
    shipped = [recipe.cold_start for recipe in list_recipes() if recipe.name == target and recipe.cold_start.is_dir()]
    if shipped and not path.exists():
        return target_config(str(shipped[0]), world or target, overrides)
    if (path / "config.toml").is_file():
        chosen = ["--env.name", world] if world else []
        return RunFolder(path), policy_config(RunFolder(path), [*chosen, *overrides])
    owner, slash, model = target.partition("/")  # a model name is NAME or OWNER/NAME
    is_path = target.startswith((".", "/", "~")) or "/" in model or (bool(slash) and Path(owner).is_dir())
    if not path.exists() and is_path:
        raise UserError(f"{target} is neither a run nor a model.", "Check the path.")
    name = world or DEFAULT_WORLD
    return None, environment_config(name, [*model_settings(target, name), *overrides])


def chat(repl: ChatRepl, console: Console, runner: asyncio.Runner) -> None:
    """Answer questions until an empty line, /exit or the end of the input."""

    def show(kind: PartKind, part: str) -> None:
        text = f"[{kind}] {part}"
        print_text(console, shorten(text, console.width) if kind == "tool" else text, STYLES[kind])

    interactive = sys.stdin.isatty()

    def read_line() -> str:
        with suppress(EOFError):
            return (input("you> ") if interactive else sys.stdin.readline()).strip()
        return ""

    for question in iter(read_line, ""):
        if question in ("/exit", "/quit"):
            return
        if question == "/retry" and repl.last_question:
            print_line(console, f"[you] {repl.last_text}")
            runner.run(repl.retry(show))
        elif question == "/task":
            task = repl.next_task()
            console.rule(f"task {task.id}")
            for message in task.prompt:
                print_line(console, f"[{message['role']}] {message['content']}")
            runner.run(repl.send(task, show))
        elif re.fullmatch("/[a-z]*", question):
            for line in command_lines(question, repl):
                print_line(console, fill_columns(line, console.width), STYLES["end"])
        else:
            if repl.is_new:
                console.rule("new dialogue")
            if not interactive:
                print_line(console, f"[you] {question}")
            runner.run(repl.send(question, show))


def command_lines(command: str, repl: ChatRepl) -> list[str]:
    """Run a command that needs no model; return the lines to print."""
    match command:
        case "/new":
            repl.restart()
            repl.last_question = None
            return ["A new dialogue."]
        case "/help":
            return textwrap.dedent(list_commands()["chat"].description.split("\n\n")[-1]).split("\n")
        case "/tools":
            world = repl.loaded.session.world
            tools = world.environment(Task("chat", tuple(world.opening("")), None)).tools
            return [describe_tool(tool) for tool in tools] or ["The world has no tools."]
        case "/retry":
            return ["No question has been answered yet."]
    return [f"Unknown command {command}. /help lists the commands."]


OnPart = Callable[[PartKind, str], None]
"""Shows a part of a reply: its kind and its text."""


@dataclass
class ChatRepl:
    """Successive dialogues with one engine; `temperature` 0 is greedy.

    Accepts one question at a time and passes the model's turns and the tools' results to `on_part` as they happen, for
    at most `rollout.max_turns` turns per question. Token ids are carried over between questions, as in an
    episode. If the context is full or an action was cut off, the next question starts a new dialogue.
    """

    loaded: LoadedRun
    temperature: float
    last_question: str | Task | None = field(init=False, default=None)
    """The last question, or the last task of the world."""
    _tasks: Iterator[Task] | None = field(init=False, default=None)
    _number: int = field(init=False, default=0)
    _session: EngineChatSession | None = field(init=False, default=None)
    _pending: list[Message] = field(init=False, default_factory=list)
    _before: tuple[EngineChatSession | None, list[Message]] = field(init=False, default=(None, []))
    """The dialogue before the last question."""

    @property
    def is_new(self) -> bool:
        """Whether the next question starts a dialogue."""
        return self._session is None

    @property
    def last_text(self) -> str:
        """The text of the last question or task."""
        last = self.last_question
        return last.prompt[-1]["content"] if isinstance(last, Task) else last or ""

    def next_task(self) -> Task:
        """Discard the dialogue; return the next task of the world's last split, in an endless cycle."""
        self.restart()
        if self._tasks is None:
            world = self.loaded.session.world
            self._tasks = cycle(world.tasks(world.splits[-1]))
        return next(self._tasks)

    def restart(self) -> None:
        """Discard the dialogue; the next question starts a new one."""
        if self._session is not None:
            self._session.close()
        self._session = None
        self._pending = []

    async def retry(self, on_part: OnPart) -> None:
        """Answer the last question again, sampled: at temperature 1 if the chat is greedy. Raises as `send`."""
        session, pending = self._before
        self.restart()
        self._session, self._pending = session, pending
        if self.last_question is not None:
            await self.send(self.last_question, on_part, self.temperature or 1.0)

    async def send(self, question: str | Task, on_part: OnPart, temperature: float | None = None) -> None:
        """Run turns until the answer to a question, or on a task of the world. Raises EngineError and WorldError.

        If the environment cannot start from a question without the data of a task, the reason is shown.
        """
        self._number += 1
        seed = self.loaded.session.config.run.seed + self._number
        copy = None if self._session is None else self._session.fork(f"chat/{self._number}", seed)
        self.last_question, self._before = question, (copy, self._pending)
        world = self.loaded.session.world
        task = question if isinstance(question, Task) else Task("chat", tuple(world.opening(question)), None)
        environment = world.environment(task)
        try:
            try:
                with world_errors("The environment's start raised"):
                    messages = await environment.start(task)
            except WorldError as error:
                if isinstance(question, Task):
                    raise
                on_part("end", f"A question is not enough for this world ({error}). See /task.")
                return
            session, stop = self._open(messages, environment)
            warmth = self.temperature if temperature is None else temperature
            session.params = replace(session.params, temperature=warmth)
            stop = stop or await self._run_turns(session, environment, on_part)
        finally:
            with world_errors("The environment's close raised"):
                await environment.close()
        if stop is not StopReason.ANSWERED:
            on_part("end", _STOP_TEXTS[stop])
        if stop in _FINAL:
            self.restart()

    def _open(
        self, messages: Sequence[Message], environment: Environment
    ) -> tuple[EngineChatSession, StopReason | None]:
        """Add a question to the dialogue; the system message is added only to a new one."""
        if self._session is not None:
            shown = [message for message in messages if message["role"] != "system"]
            pending, self._pending = self._pending, []
            return self._session, self._session.observe([*pending, *shown])
        session = self.loaded.session
        rollout = session.config.rollout
        self._session = EngineChatSession(
            engine=self.loaded.engine,
            renderer=session.renderer,
            params=sampling_params(rollout, self.temperature),
            max_tokens=rollout.max_seq_len,
            episode=f"chat/{self._number}",
            seed=session.config.run.seed + self._number,
        )
        return self._session, self._session.open(messages, environment.tools)

    async def _run_turns(self, session: EngineChatSession, environment: Environment, on_part: OnPart) -> StopReason:
        """Alternate model turns and environment steps; return the stop reason."""
        turns = self.loaded.session.config.rollout.max_turns
        for turn in range(1, turns + 1):
            action = await session.act()
            if isinstance(action, StopReason):
                return action
            for kind, text in _reply_parts(action):
                on_part(kind, text)
            if action.finish_reason == "length":
                return StopReason.TRUNCATED
            if not (action.calls or action.errors or action.message["content"].strip()):
                return StopReason.EMPTY_ANSWER
            with world_errors("The environment's step raised"):
                result = await environment.step(action)
            for outcome in result.outcomes:
                on_part("tool", outcome_text(outcome))
            if result.done:
                return StopReason.ANSWERED
            if turn == turns:
                self._pending = list(result.messages)
            elif (stop := session.observe(result.messages)) is not None:
                return stop
        return StopReason.MAX_TURNS


def _reply_parts(action: Action) -> Iterator[tuple[PartKind, str]]:
    if thought := action.message.get("reasoning_content", ""):
        yield "thinking", thought
    text = action.message["content"]
    for error in action.errors:
        text = text.replace(error.text, "")
    if text := text.strip():
        unfinished = action.calls or action.errors or action.finish_reason == "length"
        yield "text" if unfinished else "answer", text
    for call in calls(action.message):
        yield "call", call
    for error in action.errors:
        yield "malformed call", error.text
