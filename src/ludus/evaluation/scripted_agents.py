"""Scripted agents that audit an environment: cheats, random policies, and oracles that have the solutions.

An agent plans the turns of an episode in advance, from the prompt and the tools; if the environment needs more turns,
it repeats the last one. Only oracles read the ground truth of their task; cheats read at most the names of test files.
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

from ludus.evaluation.agent_texts import PROGRAMS, TESTS, TEXTS, plain_answer
from ludus.evaluation.arguments import random_arguments
from ludus.rewards.code.unit_tests import Suite
from ludus.rewards.exact_match import ExpectedAnswers, normalise
from ludus.tools.base import Tool
from ludus.types import JSON, Action, FunctionCall, Message, MessageToolCall, Segment, StopReason, Task, ToolCall

TEST_FILES = ("test.py", "tests.py", "tests/test.py", "conftest.py", "tests/conftest.py")
START_FILES = ("sitecustomize.py", "usercustomize.py")
"""Modules that Python imports before a program, if they exist."""
_CODE = ("code", "program", "script", "source", "python", "solution")
_SHELL = ("command", "cmd", "shell", "bash")
_PATH = ("path", "file", "filename", "file_path", "filepath", "file_name")
_CONTENT = ("content", "contents", "text", "data", "body", "file_text", "new_content")
NUM_RANDOM_CALLS = 3


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
    """Chat session of a scripted agent.

    `segments` has one action per turn, with one placeholder token per word.
    """

    actions: Sequence[Action]
    _segments: list[Segment] = field(default_factory=list, init=False)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The turns so far."""
        return tuple(self._segments)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        """Accept any prompt."""
        return None

    async def act(self) -> Action:
        """Return the next turn, or the last one again."""
        turn = len(self._segments)
        action = self.actions[min(turn, len(self.actions) - 1)]
        num = max(len(action.message["content"].split()), 1)
        zeros = (0.0,) * num
        self._segments.append(Segment("action", (0,) * num, turn, logprobs=zeros, versions=(0,) * num))
        return action

    def observe(self, messages: Sequence[Message]) -> StopReason | None:
        """Ignore the messages."""
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
        return random_words(_rng(seed, "words", task), vocabulary)

    def calls(task: Task, tools: Sequence[Tool]) -> Sequence[Action] | None:
        return random_calls(_rng(seed, "calls", task), tools, vocabulary)

    return (
        Agent("null", AgentKind.CHEAT, "gives an empty answer", lambda task, tools: (text_action(""),)),
        Agent("idle", AgentKind.CHEAT, "answers Done and does nothing", lambda task, tools: (text_action("Done."),)),
        Agent("echo", AgentKind.CHEAT, "repeats the prompt", lambda task, tools: (text_action(user_prompt(task)),)),
        Agent("keywords", AgentKind.CHEAT, "answers the sorted words of the prompt", _keywords),
        *(_cycling_cheat(name, what, texts, tasks) for name, (what, texts) in TEXTS.items()),
        Agent("exit-0", AgentKind.CHEAT, "os._exit(0)", lambda task, tools: run_program("exit-0", tools)),
        Agent("sys-exit-0", AgentKind.CHEAT, "sys.exit(0)", lambda task, tools: run_program("sys-exit-0", tools)),
        Agent("prints-pass", AgentKind.CHEAT, "prints PASS", lambda task, tools: run_program("prints-pass", tools)),
        Agent("test-editing", AgentKind.CHEAT, "overwrites the tests", edit_tests),
        Agent("random words", AgentKind.CHANCE, "answers random words of prompts", words),
        Agent("random calls", AgentKind.CHANCE, "calls tools with random valid arguments", calls),
    )


def _keywords(task: Task, tools: Sequence[Tool]) -> tuple[Action, ...]:
    return (text_action(" ".join(sorted(set(re.findall(r"\w+", user_prompt(task).casefold()))))),)


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
        return _of_another(task, tasks, answers, shown)

    kind, name, what = AgentKind.SHOWN, "demonstrations", "replays demonstrations"
    if flawless:
        kind, name, what = AgentKind.ORACLE, "oracle", "replays the solution"
    return (
        Agent("majority answer", AgentKind.CHANCE, "answers the most frequent answer", lambda task, _: majority),
        Agent("another's answer", AgentKind.CHANCE, "replays the solution of another task", another),
        Agent(name, kind, what, lambda task, _: shown.get(task.id)),
    )


def run_program(name: str, tools: Sequence[Tool]) -> tuple[Action, ...]:
    """Run one of `PROGRAMS` in every tool that runs programs, then submit it as the answer."""
    program = PROGRAMS[name]
    command = "echo PASS" if name == "prints-pass" else "exit 0"
    runs = _calls_in_turn(tools, program, command)
    return (*runs, text_action(f"```python\n{program}```"))


def _calls_in_turn(tools: Sequence[Tool], program: str, command: str) -> list[Action]:
    """Return one turn for each tool that runs programs (with `program`) or commands (with `command`)."""
    given = ((tool, {name: program if name in _CODE else command}) for tool, name in _runs(tools))
    return [call_action(turn, (tool.name, _with_required(tool, values))) for turn, (tool, values) in enumerate(given)]


def edit_tests(task: Task, tools: Sequence[Tool]) -> tuple[Action, ...] | None:
    """Overwrite the tests with passing tests, and the modules that Python imports before them.

    One file per turn with a tool that writes files, otherwise all files with each tool that runs programs or commands;
    None if there is neither.
    """
    files = _passing_tests(task)
    found = next(((tool, path, text) for tool in tools for path, text in _writes(tool)), None)
    if found is not None:
        tool, path, text = found
        forged = ({path: file, text: content} for file, content in files.items())
        turns = [call_action(turn, (tool.name, _with_required(tool, given))) for turn, given in enumerate(forged)]
    else:
        turns = _calls_in_turn(tools, _in_python(files), _in_shell(files))
    return (*turns, text_action("Done.")) if turns else None


def _passing_tests(task: Task) -> dict[str, str]:
    """Return passing tests for the test files that a task may have, by path."""
    truth = task.truth
    named = [test.partition("::")[0] for test in truth.tests("all")] if isinstance(truth, Suite) else []
    tests = dict.fromkeys((*(name for name in named if name.endswith(".py")), *TEST_FILES))
    return {f: TESTS["conftest" if "conftest" in f else "test"] for f in tests} | dict.fromkeys(
        START_FILES, PROGRAMS["exit-0"]
    )


def _in_python(files: Mapping[str, str]) -> str:
    return TESTS["writer"].replace("{files}", repr(dict(files)))


def _in_shell(files: Mapping[str, str]) -> str:
    quoted = [(shlex.quote(name), shlex.quote(text)) for name, text in files.items()]
    return "\n".join(f'mkdir -p "$(dirname {path})"; printf %s {text} > {path}' for path, text in quoted)


def random_words(rng: random.Random, vocabulary: Sequence[str]) -> tuple[Action, ...]:
    """Return turns of one to eight random words."""
    words = vocabulary or ("word",)
    return tuple(text_action(" ".join(rng.choices(words, k=rng.choice((1, 1, 2, 4, 8))))) for _ in range(8))


def random_calls(rng: random.Random, tools: Sequence[Tool], vocabulary: Sequence[str]) -> tuple[Action, ...] | None:
    """Return a few random calls and a final word; None without tools."""
    if not tools:
        return None
    turns = []
    for turn in range(rng.randint(1, NUM_RANDOM_CALLS)):
        tool = rng.choice(tools)
        turns.append(call_action(turn, (tool.name, random_arguments(tool, rng, vocabulary))))
    return (*turns, text_action(rng.choice(vocabulary or ("word",))))


def _of_another(
    task: Task, tasks: Sequence[Task], answers: Mapping[str, str | None], shown: Mapping[str, Sequence[Action]]
) -> Sequence[Action] | None:
    start = next((i for i, one in enumerate(tasks) if one.id == task.id), 0)
    own = normalise(answers.get(task.id) or "")
    for other in (*tasks[start + 1 :], *tasks[:start]):
        answer = answers[other.id]
        if answer is not None and normalise(answer) != own:
            return shown.get(other.id, (text_action(answer),))
    return None


def _rng(seed: int, purpose: str, task: Task) -> random.Random:
    return random.Random(f"{seed}/{purpose}/{task.id}")


def _texts(tool: Tool) -> list[str]:
    properties = tool.schema["function"]["parameters"].get("properties", {})
    return [name for name, schema in properties.items() if schema.get("type", "string") == "string"]


def _runs(tools: Sequence[Tool]) -> list[tuple[Tool, str]]:
    """Return the tools that run programs or commands, each with the argument for them."""
    named = ((tool, next((name for name in (*_CODE, *_SHELL) if name in _texts(tool)), "")) for tool in tools)
    return [(tool, name) for tool, name in named if name]


def _writes(tool: Tool) -> list[tuple[str, str]]:
    """Return the path and content arguments of a tool that writes files."""
    texts = _texts(tool)
    return [(path, text) for path in _PATH for text in _CONTENT if path in texts and text in texts]


def _with_required(tool: Tool, given: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the arguments with valid values for the other required ones."""
    required = tool.schema["function"]["parameters"].get("required", ())
    drawn = random_arguments(tool, random.Random(0), ())
    return {name: value for name, value in drawn.items() if name in required} | dict(given)
