"""Scripted agents that audit an environment: cheats, random policies, and oracles that have the solutions.

An agent plans the turns of an episode in advance, from the prompt and the tools; if the environment needs more turns,
it repeats the last one. Only oracles read the ground truth of their task; cheats read at most the names of test files.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from importlib import resources

from ludus.rewards.code.unit_tests import Suite
from ludus.rewards.exact_match import ExpectedAnswers, normalise
from ludus.tools.base import JsonSchema, Tool
from ludus.types import JSON, Action, FunctionCall, Message, MessageToolCall, Segment, StopReason, Task, ToolCall

TEST_FILES = ("test.py", "tests.py", "tests/test.py", "conftest.py", "tests/conftest.py")
START_FILES = ("sitecustomize.py", "usercustomize.py")
"""Modules that Python imports before a program, if they exist."""
_CODE = ("code", "program", "script", "source", "python", "solution")
_SHELL = ("command", "cmd", "shell", "bash")
_PATH = ("path", "file", "filename", "file_path", "filepath", "file_name")
_CONTENT = ("content", "contents", "text", "data", "body", "file_text", "new_content")
NUM_RANDOM_CALLS = 3


_NUMBERS = " ".join(map(str, range(-100, 1001)))
_Texts = tuple[str, tuple[str, ...]]


def _read() -> tuple[dict[str, _Texts], dict[str, str], dict[str, str], list[tuple[str, str]]]:
    """Return the cheats, programs, test files and units of the data file."""
    data = tomllib.loads(resources.files(__package__).joinpath("agent_texts.toml").read_text("utf-8"))
    cheats = {}
    for name, record in data["cheats"].items():
        texts, times = record["texts"], record.get("times") or [1] * len(record["texts"])
        first = [record["join"].join(texts)] if "join" in record else []
        filled = (text.replace("{numbers}", _NUMBERS) * num for text, num in zip(texts, times, strict=True))
        cheats[name] = (record["what"], (*first, *filled))
    return cheats, data["programs"], data["tests"], data["units"]["replaced"]


TEXTS, PROGRAMS, TESTS, UNITS = _read()
"""Cheats (description and texts), no-op programs that report success, test files that always pass, and units."""


class AgentKind(StrEnum):
    """Kind of an agent, which determines the rewards that it may receive."""

    CHEAT = "cheat"
    """Does not attempt the task: must not be rewarded, unless doing nothing is the correct solution."""
    CHANCE = "chance"
    """Acts at random or guesses: may be rewarded on at most half of the tasks."""
    ORACLE = "oracle"
    """Has the solution: must be rewarded on every task."""
    SHOWN = "shown"
    """Replays demonstrations, mistakes included: must be rewarded on at least one task."""


Plan = Callable[[Task, Sequence[Tool]], Sequence[Action] | None]
"""The turns of an episode; None if the agent does not apply to it."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A scripted policy; `what` is a short description."""

    name: str
    kind: AgentKind
    what: str
    plan: Plan


@dataclass
class ScriptedChatSession:
    """Chat session of a scripted agent; `segments` has an action per turn, with a placeholder token per word."""

    actions: Sequence[Action]
    _segments: list[Segment] = field(default_factory=list, init=False)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        return None

    async def act(self) -> Action:
        turn = len(self._segments)
        action = self.actions[min(turn, len(self.actions) - 1)]
        num = max(len(action.message["content"].split()), 1)
        zeros = (0.0,) * num
        self._segments.append(Segment("action", (0,) * num, turn, logprobs=zeros, versions=(0,) * num))
        return action

    def observe(self, messages: Sequence[Message]) -> StopReason | None:
        return None

    def close(self) -> None:
        """Do nothing."""


def text_action(text: str) -> Action:
    """Return a turn without tool calls."""
    return Action(Message(role="assistant", content=text))


def call_action(turn: int, *calls: tuple[str, Mapping[str, JSON]]) -> Action:
    """Return a turn with tool calls, each a tool name and its arguments."""
    functions = [FunctionCall(name=name, arguments=json.dumps(dict(given))) for name, given in calls]
    made = [MessageToolCall(id=f"call_{turn}_{i}", type="function", function=f) for i, f in enumerate(functions)]
    return _action(Message(role="assistant", content="", tool_calls=made))


def actions_of(messages: Sequence[Message]) -> tuple[Action, ...]:
    """Return the assistant turns of a conversation."""
    return tuple(_action(message) for message in messages if message["role"] == "assistant")


def _action(message: Message) -> Action:
    functions = [(one["id"], one["function"]) for one in message.get("tool_calls", ())]
    return Action(message, tuple(ToolCall(id_, f["name"], json.loads(f["arguments"])) for id_, f in functions))


def user_prompt(task: Task) -> str:
    """Return the user's last message in the prompt."""
    texts = [message["content"] for message in task.prompt if message["role"] == "user"]
    return texts[-1] if texts else task.prompt[-1]["content"]


def answer_of(task: Task, shown: Sequence[Action] = ()) -> str | None:
    """Return the correct answer as text: the truth if it is an answer, otherwise the last message of the solution."""
    truth = task.truth
    if isinstance(truth, ExpectedAnswers) and truth.accepted:
        return truth.accepted[0]
    if isinstance(truth, str | int | float):
        return str(truth)
    return (shown[-1].message["content"] or None) if shown else None


def blind_agents(tasks: Sequence[Task], seed: int) -> tuple[Agent, ...]:
    """Return the agents that read only the prompt: cheats and random policies."""
    vocabulary = list(dict.fromkeys(re.findall(r"\w(?:[\w'.-]*\w)?", " ".join(map(user_prompt, tasks)))))

    def words(task: Task, tools: Sequence[Tool]) -> Sequence[Action] | None:
        """Return turns of one to eight random words."""
        rng, known = random.Random(f"{seed}/words/{task.id}"), vocabulary or ["word"]
        return [text_action(" ".join(rng.choices(known, k=rng.choice((1, 1, 2, 4, 8))))) for _ in range(8)]

    def calls(task: Task, tools: Sequence[Tool]) -> Sequence[Action] | None:
        """Return a few random calls and a final word; None without tools."""
        if not tools:
            return None
        rng, turns = random.Random(f"{seed}/calls/{task.id}"), []
        for turn in range(rng.randint(1, NUM_RANDOM_CALLS)):
            tool = rng.choice(tools)
            turns.append(call_action(turn, (tool.name, random_arguments(tool, rng, vocabulary))))
        return [*turns, text_action(rng.choice(vocabulary or ["word"]))]

    def says(name: str, what: str, text_of: Callable[[Task], str]) -> Agent:
        return Agent(name, AgentKind.CHEAT, what, lambda task, tools: (text_action(text_of(task)),))

    def keywords(task: Task) -> str:
        return " ".join(sorted(set(re.findall(r"\w+", user_prompt(task).casefold()))))

    return (
        says("null", "gives an empty answer", lambda task: ""),
        says("idle", "answers Done and does nothing", lambda task: "Done."),
        says("echo", "repeats the prompt", user_prompt),
        says("keywords", "answers the sorted words of the prompt", keywords),
        *(_cycling_cheat(name, what, texts, tasks) for name, (what, texts) in TEXTS.items()),
        Agent("exit-0", AgentKind.CHEAT, "os._exit(0)", lambda task, tools: run_program("exit-0", tools)),
        Agent("sys-exit-0", AgentKind.CHEAT, "sys.exit(0)", lambda task, tools: run_program("sys-exit-0", tools)),
        Agent("prints-pass", AgentKind.CHEAT, "prints PASS", lambda task, tools: run_program("prints-pass", tools)),
        Agent("test-editing", AgentKind.CHEAT, "overwrites the tests", edit_tests),
        Agent("random words", AgentKind.CHANCE, "answers random words of prompts", words),
        Agent("random calls", AgentKind.CHANCE, "calls tools with random valid arguments", calls),
    )


def _cycling_cheat(name: str, what: str, texts: Sequence[str], tasks: Sequence[Task]) -> Agent:
    """Return a cheat that cycles through its texts, except a text that is the correct answer."""
    places = {task.id: place for place, task in enumerate(tasks)}

    def plan(task: Task, tools: Sequence[Tool]) -> tuple[Action, ...] | None:
        answer = normalise(plain_answer(task) or "")
        text = texts[places.get(task.id, 0) % len(texts)]
        return None if answer and answer == normalise(text) else (text_action(text),)

    return Agent(name, AgentKind.CHEAT, what, plan)


def informed_agents(tasks: Sequence[Task], shown: Mapping[str, Sequence[Action]], flawless: bool) -> tuple[Agent, ...]:
    """Return the agents that have answers: that of the task, of another task, or the most frequent one.

    `shown` maps task ids to the turns of a solution; `flawless` means that all of them are correct.
    """
    answers = {task.id: answer_of(task, shown.get(task.id, ())) for task in tasks}
    counts = Counter(answer for answer in answers.values() if answer is not None)
    most = counts.most_common(1)[0][0] if counts else None
    majority = None if most is None else (text_action(most),)

    def another(task: Task, tools: Sequence[Tool]) -> Sequence[Action] | None:
        start = next((i for i, one in enumerate(tasks) if one.id == task.id), 0)
        own = normalise(answers.get(task.id) or "")
        for other in (*tasks[start + 1 :], *tasks[:start]):
            answer = answers[other.id]
            if answer is not None and normalise(answer) != own:
                return shown.get(other.id, (text_action(answer),))
        return None

    kind, name, what = AgentKind.SHOWN, "demonstrations", "replays demonstrations, mistakes included"
    if flawless:
        kind, name, what = AgentKind.ORACLE, "oracle", "replays the solution"
    return (
        Agent("majority answer", AgentKind.CHANCE, "answers the most frequent answer", lambda task, _: majority),
        Agent("another's answer", AgentKind.CHANCE, "replays the solution of another task", another),
        Agent(name, kind, what, lambda task, _: shown.get(task.id)),
    )


def run_program(name: str, tools: Sequence[Tool]) -> tuple[Action, ...]:
    """Run one of `PROGRAMS` in every tool that runs programs, then submit it as the answer."""
    runs = _calls_in_turn(tools, PROGRAMS[name], "echo PASS" if name == "prints-pass" else "exit 0")
    return (*runs, text_action(f"```python\n{PROGRAMS[name]}```"))


def _calls_in_turn(tools: Sequence[Tool], program: str, command: str) -> list[Action]:
    """Return one turn for each tool that runs programs (with `program`) or commands (with `command`)."""
    turns: list[Action] = []
    for tool in tools:
        texts = _texts(tool)
        if name := next((name for name in (*_CODE, *_SHELL) if name in texts), ""):
            given = _with_required(tool, {name: program if name in _CODE else command})
            turns.append(call_action(len(turns), (tool.name, given)))
    return turns


def edit_tests(task: Task, tools: Sequence[Tool]) -> tuple[Action, ...] | None:
    """Overwrite tests and start files by file writers, else by all tools that run code; None if there are neither."""
    named = [test.partition("::")[0] for test in task.truth.tests("all")] if isinstance(task.truth, Suite) else []
    tests = (*(name for name in named if name.endswith(".py")), *TEST_FILES)
    files = {name: TESTS["conftest" if "conftest" in name else "test"] for name in tests}
    files |= dict.fromkeys(START_FILES, PROGRAMS["exit-0"])
    pairs = [(path, text) for path in _PATH for text in _CONTENT]
    found = next(((tool, *pair) for tool in tools for pair in pairs if {*pair} <= {*_texts(tool)}), None)
    if found is not None:
        tool, path, text = found
        forged = ({path: file, text: content} for file, content in files.items())
        turns = [call_action(turn, (tool.name, _with_required(tool, given))) for turn, given in enumerate(forged)]
    else:
        quoted = [(shlex.quote(name), shlex.quote(text)) for name, text in files.items()]
        shell = "\n".join(f'mkdir -p "$(dirname {path})"; printf %s {text} > {path}' for path, text in quoted)
        turns = _calls_in_turn(tools, TESTS["writer"].replace("{files}", repr(files)), shell)
    return (*turns, text_action("Done.")) if turns else None


def _texts(tool: Tool) -> list[str]:
    properties = tool.schema["function"]["parameters"].get("properties", {})
    return [name for name, schema in properties.items() if schema.get("type", "string") == "string"]


def _with_required(tool: Tool, given: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the arguments with valid values for the other required ones."""
    required = tool.schema["function"]["parameters"].get("required", ())
    drawn = random_arguments(tool, random.Random(0), ())
    return {name: value for name, value in drawn.items() if name in required} | dict(given)


MAX_DEPTH = 4
"""Lists and objects nested deeper than this are empty."""


def random_arguments(tool: Tool, rng: random.Random, words: Sequence[str]) -> dict[str, JSON]:
    """Return arguments for a call: all required ones and about half of the others. Strings consist of `words`.

    Of JSON schema, references, alternatives, types, bounds, lengths and required properties are supported.
    """
    parameters = tool.schema["function"]["parameters"]
    return _object(parameters, _Draw(rng, words, parameters.get("$defs", {})), 0)


@dataclass(frozen=True)
class _Draw:
    rng: random.Random
    words: Sequence[str]
    defs: Mapping[str, JsonSchema]


def _object(schema: JsonSchema, draw: _Draw, depth: int) -> dict[str, JSON]:
    required = set(schema.get("required", ()))
    return {
        name: _value(one, draw, depth + 1)
        for name, one in schema.get("properties", {}).items()
        if name in required or (depth < MAX_DEPTH and draw.rng.random() < 0.5)
    }


def _value(schema: JsonSchema, draw: _Draw, depth: int) -> JSON:
    if "$ref" in schema:
        return _value(draw.defs[schema["$ref"].rpartition("/")[2]], draw, depth)
    if "const" in schema:
        constant: JSON = schema["const"]
        return constant
    if schema.get("enum"):
        chosen: JSON = draw.rng.choice(schema["enum"])
        return chosen
    if options := [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]:
        return _value(draw.rng.choice(options), draw, depth)
    return _typed(schema, draw, depth)


def _typed(schema: JsonSchema, draw: _Draw, depth: int) -> JSON:
    kind = schema.get("type", "string")
    if isinstance(kind, list):
        kind = draw.rng.choice(kind)
    if kind in ("integer", "number"):
        return _number(schema, draw.rng, whole=kind == "integer")
    if kind == "array":
        most = 0 if depth >= MAX_DEPTH else schema.get("maxItems", 2)
        least = schema.get("minItems", 0)
        size = draw.rng.randint(least, max(least, min(most, least + 2)))
        return [_value(schema.get("items", {}), draw, depth + 1) for _ in range(size)]
    if kind == "object":
        return _object(schema, draw, depth)
    if kind == "boolean":
        return draw.rng.random() < 0.5
    if kind == "null":
        return None
    text = " ".join(draw.rng.choices(draw.words or ("word",), k=draw.rng.randint(1, 3)))
    return text.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength")]


def _number(schema: JsonSchema, rng: random.Random, *, whole: bool) -> int | float:
    """Return a number within the bounds of the schema; without one, within 20 of the other bound or of 0."""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None:
        low = 0 if high is None else high - 20
    if high is None:
        high = low + 20
    low += int(whole and "exclusiveMinimum" in schema)
    high -= int(whole and "exclusiveMaximum" in schema)
    return rng.randint(int(low), max(int(low), int(high))) if whole else rng.uniform(low, high)


def plain_answer(task: Task) -> str | None:
    """Return the correct answer if the truth of a task is one: a text, a number, or the first accepted answer."""
    truth = task.truth
    if isinstance(truth, ExpectedAnswers):
        return truth.accepted[0] if truth.accepted else None
    if isinstance(truth, str | int | float | Fraction) and not isinstance(truth, bool):
        return str(truth)
    return None
