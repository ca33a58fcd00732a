"""Scripted agents by which an environment is checked: cheats, chance, and those that know.

An agent writes the turns of an episode beforehand, from the task's prompt and the tools on offer; where the
environment asks for more turns, it repeats its last one. Of its task's truth none but an oracle reads more
than the names of test files.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ludus.evaluation.arguments import random_arguments
from ludus.evaluation.cheats import TEXTS
from ludus.evaluation.perturb import plain_answer
from ludus.rewards.code.unit_tests import Suite
from ludus.rewards.exact_match import ExpectedAnswers, normalise
from ludus.tools.base import Tool
from ludus.types import JSON, Action, FunctionCall, Message, MessageToolCall, Segment, StopReason, Task, ToolCall

PROGRAMS = {
    "exit-0": "import os\n\nos._exit(0)\n",
    "sys-exit-0": "import sys\n\nsys.exit(0)\n",
    "prints-pass": 'print("PASS")\nprint("1 passed in 0.01s")\n',
}
"""Programs that say that all is well, by their exit status or in words, and do nothing else."""
PASSING_TEST = "def test_passes():\n    assert True\n"
TEST_FILES = ("test.py", "tests.py", "tests/test.py", "conftest.py", "tests/conftest.py")
START_FILES = ("sitecustomize.py", "usercustomize.py")
"""What Python imports before a program, where it finds it."""
PASSING_HOOK = """import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
_CODE = ("code", "program", "script", "source", "python", "solution")
_SHELL = ("command", "cmd", "shell", "bash")
_PATH = ("path", "file", "filename", "file_path", "filepath", "file_name")
_CONTENT = ("content", "contents", "text", "data", "body", "file_text", "new_content")
NUM_RANDOM_CALLS = 3


class AgentKind(StrEnum):
    """What an agent is, and so what it may earn."""

    CHEAT = "cheat"
    """Does not do the task: is paid on no task, except where doing nothing is right."""
    CHANCE = "chance"
    """Guesses: may be right now and then, and not more often than not."""
    ORACLE = "oracle"
    """Knows how: is paid on every task."""
    SHOWN = "shown"
    """Plays what demonstrations do, flaws included: is paid on one task at least."""


Plan = Callable[[Task, Sequence[Tool]], Sequence[Action] | None]
"""The turns of an episode; None where the agent has nothing to do in it."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A scripted policy. `what` says in a few words what it does."""

    name: str
    kind: AgentKind
    what: str
    plan: Plan


@dataclass
class ScriptedChatSession:
    """The turns of an agent, as the conversation of an episode.

    `segments` has one action a turn, with a token of no meaning for each of its words.
    """

    actions: Sequence[Action]
    _taken: list[Segment] = field(default_factory=list, init=False)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The turns so far."""
        return tuple(self._taken)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        """Nothing is too long."""
        del messages, tools
        return None

    async def act(self) -> Action:
        """The next turn; the last one again where there is none."""
        turn = len(self._taken)
        action = self.actions[min(turn, len(self.actions) - 1)]
        num = max(len(action.message["content"].split()), 1)
        zeros = (0.0,) * num
        self._taken.append(Segment("action", (0,) * num, turn, logprobs=zeros, versions=(0,) * num))
        return action

    def observe(self, messages: Sequence[Message]) -> StopReason | None:
        """Nothing is read."""
        del messages
        return None

    def close(self) -> None:
        """Nothing to give back."""


def say(text: str) -> Action:
    """A turn without a call."""
    return Action(Message(role="assistant", content=text))


def call(turn: int, *calls: tuple[str, Mapping[str, JSON]]) -> Action:
    """A turn with calls, each a tool's name and its arguments."""
    made = tuple(ToolCall(f"call_{turn}_{i}", name, dict(given)) for i, (name, given) in enumerate(calls))
    told = [
        MessageToolCall(
            id=one.id, type="function", function=FunctionCall(name=one.name, arguments=json.dumps(one.arguments))
        )
        for one in made
    ]
    return Action(Message(role="assistant", content="", tool_calls=told), made)


def actions_of(messages: Sequence[Message]) -> tuple[Action, ...]:
    """The turns of the model in a dialogue."""
    return tuple(
        Action(
            message,
            tuple(
                ToolCall(one["id"], one["function"]["name"], json.loads(one["function"]["arguments"]))
                for one in message.get("tool_calls", ())
            ),
        )
        for message in messages
        if message["role"] == "assistant"
    )


def asked(task: Task) -> str:
    """What the user says last before the model begins."""
    said = [message["content"] for message in task.prompt if message["role"] == "user"]
    return said[-1] if said else task.prompt[-1]["content"]


def answer_of(task: Task, shown: Sequence[Action] = ()) -> str | None:
    """The right answer in words: of the truth where that is one, else the last words of what is shown."""
    truth = task.truth
    if isinstance(truth, ExpectedAnswers) and truth.accepted:
        return truth.accepted[0]
    if isinstance(truth, str | int | float):
        return str(truth)
    return (shown[-1].message["content"] or None) if shown else None


def cheats(tasks: Sequence[Task], vocabulary: Sequence[str], seed: int) -> tuple[Agent, ...]:
    """The agents that know nothing but the prompt; of the tasks no more than their order."""
    return (
        Agent("null", AgentKind.CHEAT, "says nothing", lambda task, tools: (say(""),)),
        Agent("idle", AgentKind.CHEAT, "says Done and does nothing", lambda task, tools: (say("Done."),)),
        Agent("echo", AgentKind.CHEAT, "repeats the prompt", lambda task, tools: (say(asked(task)),)),
        Agent("keywords", AgentKind.CHEAT, "says the words of the prompt, sorted", _keywords),
        *(_in_turn(name, what, texts, tasks) for name, (what, texts) in TEXTS.items()),
        Agent("exit-0", AgentKind.CHEAT, "os._exit(0)", lambda task, tools: run_program("exit-0", tools)),
        Agent("sys-exit-0", AgentKind.CHEAT, "sys.exit(0)", lambda task, tools: run_program("sys-exit-0", tools)),
        Agent("prints-pass", AgentKind.CHEAT, "prints PASS", lambda task, tools: run_program("prints-pass", tools)),
        Agent("test-editing", AgentKind.CHEAT, "overwrites the tests", edit_tests),
        Agent(
            "random words",
            AgentKind.CHANCE,
            "says words of prompts",
            lambda task, tools: random_words(_rng(seed, "words", task), vocabulary),
        ),
        Agent(
            "random calls",
            AgentKind.CHANCE,
            "calls tools with arguments that fit",
            lambda task, tools: random_calls(_rng(seed, "calls", task), tools, vocabulary),
        ),
    )


def _keywords(task: Task, tools: Sequence[Tool]) -> tuple[Action, ...]:
    del tools
    return (say(" ".join(sorted(set(re.findall(r"\w+", asked(task).casefold()))))),)


def _in_turn(name: str, what: str, texts: Sequence[str], tasks: Sequence[Task]) -> Agent:
    """A cheat that takes its texts in turn, but for those that have or are the right answer."""
    places = {task.id: place for place, task in enumerate(tasks)}

    def plan(task: Task, tools: Sequence[Tool]) -> tuple[Action, ...] | None:
        del tools
        answer = normalise(plain_answer(task) or "")
        text = texts[places.get(task.id, 0) % len(texts)]
        return None if answer and answer == normalise(text) else (say(text),)

    return Agent(name, AgentKind.CHEAT, what, plan)


def knowing(tasks: Sequence[Task], shown: Mapping[str, Sequence[Action]], flawless: bool) -> tuple[Agent, ...]:
    """The agents that know answers: their own task's, another one's, or the most frequent one.

    `shown` has, by task id, the turns that solve a task; `flawless` says that all of them do.
    """
    answers = {task.id: answer_of(task, shown.get(task.id, ())) for task in tasks}
    counts = Counter(answer for answer in answers.values() if answer is not None)
    most = counts.most_common(1)[0][0] if counts else None
    oracle = (
        Agent("oracle", AgentKind.ORACLE, "does what the world shows", lambda task, _: shown.get(task.id))
        if flawless
        else Agent("demonstrations", AgentKind.SHOWN, "flaws included", lambda task, _: shown.get(task.id))
    )
    return (
        Agent(
            "majority answer",
            AgentKind.CHANCE,
            "gives the most frequent answer",
            lambda task, _: None if most is None else (say(most),),
        ),
        Agent(
            "another's answer",
            AgentKind.CHANCE,
            "does what is right in another task",
            lambda task, _: _of_another(task, tasks, answers, shown),
        ),
        oracle,
    )


def run_program(name: str, tools: Sequence[Tool]) -> tuple[Action, ...]:
    """Run one of `PROGRAMS` in every tool that runs one; then give it as the answer."""
    program = PROGRAMS[name]
    command = "echo PASS" if name == "prints-pass" else "exit 0"
    runs: list[Action] = []
    for tool, argument in _runs(tools):
        given = _filled(tool, {argument: program if argument in _CODE else command})
        runs.append(call(len(runs), (tool.name, given)))
    return (*runs, say(f"```python\n{program}```"))


def edit_tests(task: Task, tools: Sequence[Tool]) -> tuple[Action, ...] | None:
    """Overwrite the tests with ones that pass, and what Python imports before them.

    A file a turn by a tool that writes files, else all of them in a turn of each tool that runs programs or
    commands; None where there is neither.
    """
    files = _forged(task)
    found = next(((tool, path, text) for tool in tools for path, text in _writes(tool)), None)
    if found is not None:
        tool, path, text = found
        made = ((tool.name, _filled(tool, {path: f, text: forged})) for f, forged in files.items())
    else:
        made = (
            (tool.name, _filled(tool, {name: _in_python(files) if name in _CODE else _in_shell(files)}))
            for tool, name in _runs(tools)
        )
    turns = [call(i, one) for i, one in enumerate(made)]
    return (*turns, say("Done.")) if turns else None


def _forged(task: Task) -> dict[str, str]:
    """The files that a task's tests may be in, with tests that pass, by path."""
    truth = task.truth
    named = [test.partition("::")[0] for test in truth.tests("all")] if isinstance(truth, Suite) else []
    tests = dict.fromkeys((*(name for name in named if name.endswith(".py")), *TEST_FILES))
    return {f: PASSING_HOOK if "conftest" in f else PASSING_TEST for f in tests} | dict.fromkeys(
        START_FILES, PROGRAMS["exit-0"]
    )


def _in_python(files: Mapping[str, str]) -> str:
    """A program that writes the files."""
    return (
        f"import pathlib\n\nfor name, text in {dict(files)!r}.items():\n"
        "    path = pathlib.Path(name)\n"
        "    path.parent.mkdir(parents=True, exist_ok=True)\n"
        "    path.write_text(text)\n"
    )


def _in_shell(files: Mapping[str, str]) -> str:
    """Commands that write the files."""
    lines: list[str] = []
    for name, text in files.items():
        path = shlex.quote(name)
        lines.append(f'mkdir -p "$(dirname {path})"; printf %s {shlex.quote(text)} > {path}')
    return "\n".join(lines)


def random_words(rng: random.Random, vocabulary: Sequence[str]) -> tuple[Action, ...]:
    """One to eight words, another time in each of a few turns."""
    words = vocabulary or ("word",)
    return tuple(say(" ".join(rng.choices(words, k=rng.choice((1, 1, 2, 4, 8))))) for _ in range(8))


def random_calls(rng: random.Random, tools: Sequence[Tool], vocabulary: Sequence[str]) -> tuple[Action, ...] | None:
    """A few calls, then a word; None where there are no tools."""
    if not tools:
        return None
    turns = []
    for turn in range(rng.randint(1, NUM_RANDOM_CALLS)):
        tool = rng.choice(tools)
        turns.append(call(turn, (tool.name, random_arguments(tool, rng, vocabulary))))
    return (*turns, say(rng.choice(vocabulary or ("word",))))


def _of_another(
    task: Task, tasks: Sequence[Task], answers: Mapping[str, str | None], shown: Mapping[str, Sequence[Action]]
) -> Sequence[Action] | None:
    """The turns or else the answer of a task with another answer."""
    start = next((i for i, one in enumerate(tasks) if one.id == task.id), 0)
    own = normalise(answers.get(task.id) or "")
    for other in (*tasks[start + 1 :], *tasks[:start]):
        answer = answers[other.id]
        if answer is not None and normalise(answer) != own:
            return shown.get(other.id, (say(answer),))
    return None


def _rng(seed: int, purpose: str, task: Task) -> random.Random:
    return random.Random(f"{seed}/{purpose}/{task.id}")


def _texts(tool: Tool) -> list[str]:
    """The arguments of a tool that take a text."""
    properties = tool.schema["function"]["parameters"].get("properties", {})
    return [name for name, schema in properties.items() if schema.get("type", "string") == "string"]


def _runs(tools: Sequence[Tool]) -> list[tuple[Tool, str]]:
    """The tools that run a program or commands, each with the argument for it."""
    named = ((tool, next((name for name in (*_CODE, *_SHELL) if name in _texts(tool)), "")) for tool in tools)
    return [(tool, name) for tool, name in named if name]


def _writes(tool: Tool) -> list[tuple[str, str]]:
    """The arguments for path and content of a tool that writes files."""
    texts = _texts(tool)
    return [(path, text) for path in _PATH for text in _CONTENT if path in texts and text in texts]


def _filled(tool: Tool, given: Mapping[str, JSON]) -> dict[str, JSON]:
    """The arguments, with values that fit for the others that are required."""
    required = tool.schema["function"]["parameters"].get("required", ())
    drawn = random_arguments(tool, random.Random(0), ())
    return {name: value for name, value in drawn.items() if name in required} | dict(given)
