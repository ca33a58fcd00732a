"""The functions world: settings, tasks, episodes and demonstrations.

The flaws of demonstrations are systematic, since noise averages out in training: a request is half completed, a missing
value is invented, or a function is called although none fits. A first call with a wrong signature is corrected.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

from ludus.envs.base import SandboxWorld, shipped_report
from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.task_archive import SPLITS, in_turn, repeat_lines, split_sizes
from ludus.envs.tool_env import ToolEnv, ToolLimits, describe_error
from ludus.envs.tool_world import Dialogue, assistant, check_split, tool_call
from ludus.errors import ConfigError
from ludus.rewards.base import Reward, truth_of
from ludus.rewards.code.turns import TurnVerifier
from ludus.rewards.exact_match import well_formed
from ludus.rewards.paper_rewards import ExpectedCall
from ludus.rewards.shaping import either, only_if
from ludus.tools.base import ArgumentError
from ludus.types import JSON, Message, Task, ToolOutcome, ToolStatus
from ludus.worlds.functions.bfcl.reader import ApiEnv, ApiTruth, gold_messages, load_tasks
from ludus.worlds.functions.catalogue import Scene, catalogue
from ludus.worlds.functions.grader import GoldCall, Truth, gold_calls_made, part_made, solved
from ludus.worlds.functions.tasks import make_task, read_tasks

FILE_SPLIT = "file"
"""The split with the tasks of `data`."""


class FunctionsSettings(WorldSettings):
    """Settings of the functions world (`env.settings`)."""

    num_tasks: int = Field(2000, ge=20)
    """Number of training tasks; validation, test and composition have a tenth, a quarter and a fifth of it."""
    num_held_out: int | None = Field(None, ge=1)
    """Number of tasks of test and of composition, instead of those shares."""
    levels: tuple[Literal[1, 2, 3, 4, 5], ...] = Field((1, 2, 3, 4, 5), min_length=1)
    """Levels of the tasks."""
    changed_in_training: bool = True
    """Also change signatures in train, validation and demonstrations, as in test and composition."""
    access: Literal["tool", "none"] = "tool"
    """`none` offers no functions: a baseline."""
    well_formed_weight: float = Field(0.1, ge=0, lt=0.5)
    """Weight of an episode without failed calls that is solved or made a gold call; `solved` has weight 1."""
    flaw_rate: float = Field(0.3, ge=0, le=1)
    """Share of the demonstrations that stop after the first of several calls, or call although no call is right."""
    correction_rate: float = Field(0.1, ge=0, le=1)
    """Share of the demonstrations with calls whose first call is rejected and then corrected."""
    data: str | None = None
    """File of tasks in BFCL format (JSON lines), which become the split `file`."""
    seed: int = 0
    """Seed of tasks and demonstrations."""
    data_answers: str | None = None
    """File with the `ground_truth` of `data`, if separate."""
    data_bad_lines: Literal["refuse", "skip"] = "refuse"
    """Invalid lines of `data`: raise an error that lists them, or log and skip them."""


@dataclass(frozen=True)
class FunctionsWorld(SandboxWorld):
    """Requests over a catalogue of functions."""

    settings: FunctionsSettings = field(default_factory=FunctionsSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    name: str = "functions"
    _tasks: dict[str, tuple[Task, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits; `file` only if `data` is set."""
        return SPLITS if self.settings.data is None else (*SPLITS, FILE_SPLIT)

    @property
    def rewards(self) -> tuple[Reward, ...]:
        """The outcome, 0 or 1, and a smaller format reward, for an episode without failed calls that is solved or
        made a gold call."""
        form = only_if(well_formed, either(solved, part_made))
        return Reward("solved", solved, outcome=True), Reward("well_formed", form, self.settings.well_formed_weight)

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        """A milestone is a gold call; None without functions."""
        return gold_calls_made if self.settings.access == "tool" else None

    def tasks(self, split: str) -> Sequence[Task]:
        check_split(split, self.splits, self.name)
        if split not in self._tasks:
            self._tasks[split] = self._make(split)
        return self._tasks[split]

    def environment(self, task: Task) -> ToolEnv | ApiEnv:
        """Return a new episode with its own state; calls of tasks of several turns run in the sandbox."""
        has_tools = self.settings.access == "tool"
        if isinstance(task.truth, ApiTruth):
            return ApiEnv(task.truth, self.rewards, self.limits, self.sandbox, has_tools)
        if isinstance(task.truth, Truth):
            scene = task.truth.scene
        else:  # a question of a user: one function of each domain
            first = {function.domain: function for function in [*catalogue().values()][::-1]}
            scene = Scene(task.seed, functions=tuple(first.values()))
        return ToolEnv(scene.tools() if has_tools else (), self.rewards, self.limits)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield dialogues of the flawed solver without end, on tasks that are in no split."""
        settings = self.settings
        rng = random.Random(f"demonstrations/{settings.seed}/{seed}")
        flaws = CallFlaws(settings.flaw_rate, settings.correction_rate)
        streams = [repeat_lines("functions", f"demonstrations/{level}", rng) for level in settings.levels]
        for line in in_turn(streams):
            yield _show(make_task(json.loads(line), "demonstrations-0-0", settings.changed_in_training), flaws, rng)

    def expert(self, task: Task) -> Dialogue | None:
        """Return a dialogue without flaws (of several turns: without responses); None if there are no functions."""
        if self.settings.access == "none":
            return None
        if isinstance(task.truth, ApiTruth):
            return Dialogue((*task.prompt, *gold_messages(task.truth)), tuple(self.environment(task).tools))
        return _show(task, CallFlaws(), random.Random(task.id)) if isinstance(task.truth, Truth) else None

    def difficulty_report(self) -> str:
        return shipped_report(self, self.settings == FunctionsSettings())

    def alternative_solutions(self, task: Task) -> Sequence[Sequence[Message]]:
        """Return episodes with reordered arguments, with defaults, with single calls, or with other words."""
        if self.settings.access == "none" or not isinstance(task.truth, Truth):
            return ()
        return tuple(alternative_solutions(task))

    def texts(self) -> Iterator[str]:
        """Yield descriptions of functions and dialogues as text, for the training of a tokenizer."""
        for dialogue in itertools.islice(self.demonstrations(seed=0), self.num_text_dialogues):
            for tool in dialogue.tools:
                function = tool.schema["function"]
                properties = function["parameters"]["properties"].items()
                params = ", ".join(f"{name}: {schema.get('type', 'any')}" for name, schema in properties)
                yield f"{function['name']}({params}) {function['description']}"
            yield from dialogue.texts()

    @property
    def runs_programs(self) -> bool:
        """Whether calls of a task of `data` run in the sandbox."""
        has_file = self.settings.data is not None
        return has_file and any(isinstance(task.truth, ApiTruth) for task in self.tasks(FILE_SPLIT))

    def _make(self, split: str) -> tuple[Task, ...]:
        settings = self.settings
        if split == FILE_SPLIT and settings.data is not None:
            answers = Path(settings.data_answers) if settings.data_answers is not None else None
            return load_tasks(Path(settings.data), answers, split, settings.data_bad_lines)
        num = split_sizes(settings.num_tasks, settings.num_held_out)[split]
        changed = settings.changed_in_training or split in ("test", "composition")
        tasks = tuple(itertools.islice(read_tasks(split, settings.levels, settings.seed, changed), num))
        if len(tasks) < num:
            message = f"The split {split!r} has {len(tasks)} different tasks of these levels, not {num}."
            raise ConfigError(message, "Decrease env.settings.num_tasks or num_held_out, or add levels.")
        return tasks


def make_functions_world(settings: Mapping[str, object], limits: ToolLimits) -> FunctionsWorld:
    """Return the world. Raises ConfigError for invalid settings."""
    return FunctionsWorld(read_settings(FunctionsSettings, settings), limits)


def _show(task: Task, flaws: CallFlaws, rng: random.Random) -> Dialogue:
    messages, truth = play(task, flaws, rng).messages, truth_of(task, Truth)
    has_call = truth.right in ("call", "any_call")
    return Dialogue((*task.prompt, *messages), truth.scene.tools(), "tool_use" if has_call else "negatives")


# Reference solutions, with optional flaws in known proportions, and right alternatives to them

DONE = "Done."
NO_TOOL = "No tool fits."


@dataclass(frozen=True, slots=True)
class CallFlaws:
    """Probabilities of flaws."""

    flaw_rate: float = 0.0
    """Stop after the first of several calls; otherwise call although no call is right."""
    correction_rate: float = 0.0
    """First call without an argument or by the names of the catalogue, then rightly. The wrong call is not
    trained on."""


@dataclass
class Attempt:
    """A scripted episode on a new state."""

    task: Task
    messages: list[Message] = field(default_factory=list)
    outcomes: list[ToolOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tools = {tool.name: tool for tool in truth_of(self.task, Truth).scene.tools()}

    def call(self, *calls: ExpectedCall, train: bool = True) -> None:
        """Add one turn of calls and their responses."""
        turn = sum(message["role"] == "assistant" for message in self.messages)
        made = [tool_call(f"call_{turn}_{i}", call.name, call.arguments) for i, call in enumerate(calls)]
        message = Message(role="assistant", content="", tool_calls=made)
        self.messages.append(message if train else Message({**message, "train": False}))
        for one, call in zip(made, calls, strict=True):
            status, text = self._execute(call)
            self.messages.append(Message(role="tool", content=text, tool_call_id=one["id"], name=call.name))
            self.outcomes.append(ToolOutcome(one["id"], call.name, status, text))

    def answer(self, text: str) -> None:
        self.messages.append(assistant(text))

    def _execute(self, call: ExpectedCall) -> tuple[ToolStatus, str]:
        tool = self._tools[call.name]
        try:
            checked = tool.check(call.arguments)
        except ArgumentError as error:
            return ToolStatus.BAD_ARGUMENTS, f"Error: {error}."
        try:
            return ToolStatus.OK, tool.answer(checked)
        except (LookupError, ValueError) as error:
            return ToolStatus.RAISED, f"Error: {describe_error(error)}"


def play(task: Task, flaws: CallFlaws, rng: random.Random) -> Attempt:
    """Return an attempt at the task."""
    truth, attempt, text = truth_of(task, Truth), Attempt(task), DONE
    is_flawed = rng.random() < flaws.flaw_rate
    if truth.right == "call":
        turns = turns_of(truth.gold)
        wrong = _flawed_call(truth, turns[0][0]) if rng.random() < flaws.correction_rate else None
        if wrong is not None:
            attempt.call(wrong, train=False)
        if is_flawed and len(truth.gold) > 1:
            turns = [turns[0][:1]]
        for calls in turns:
            attempt.call(*(call.expected for call in calls))
    elif truth.right == "any_call":
        function = truth.scene.tools()[0].schema["function"]
        attempt.call(ExpectedCall(function["name"], _required_values(function["parameters"])))
    elif is_flawed and truth.invented is not None:
        attempt.call(truth.invented)
    else:
        text = _right_answers(truth)[0]
    attempt.answer(text)
    return attempt


def turns_of(gold: Sequence[GoldCall]) -> list[list[GoldCall]]:
    """Group the gold calls in turns, each call in the first turn after the results that it needs."""
    depth: list[int] = []
    for call in gold:
        depth.append(1 + max((depth[place] for place in call.after), default=-1))
    return [[gold[i] for i, d in enumerate(depth) if d == turn] for turn in range(max(depth) + 1)]


def alternative_solutions(task: Task) -> Iterator[Sequence[Message]]:
    """Yield other right episodes: all arguments in reverse order, other values one by one, or other words."""
    truth = truth_of(task, Truth)

    def with_all(gold: GoldCall) -> ExpectedCall:
        return ExpectedCall(gold.name, {name: gold.accepted[name][0] for name in reversed([*gold.accepted])})

    if truth.right == "call":
        turns = turns_of(truth.gold)
        episodes = [
            _episode(task, [[gold.expected for gold in turn] for turn in turns]),
            _episode(task, [[with_all(gold) for gold in turn] for turn in turns]),
            _episode(task, [[gold.with_values(-1)] for turn in turns for gold in reversed(turn)]),
        ]
        yield from (one for i, one in enumerate(episodes) if i and one not in episodes[:i])
    elif truth.right != "any_call":
        yield from ([assistant(text)] for text in _right_answers(truth)[1:])


def _episode(task: Task, turns: Sequence[Sequence[ExpectedCall]]) -> Sequence[Message]:
    attempt = Attempt(task)
    for calls in turns:
        attempt.call(*calls)
    attempt.answer(DONE)
    return attempt.messages


def _right_answers(truth: Truth) -> Sequence[str]:
    """Return right answers if no call is right, the solver's first."""
    if truth.answer is not None:
        return truth.answer.accepted
    if truth.ask is None:
        return NO_TOOL, "None of these functions can do that.", "Sorry, I cannot do this with the tools I have."
    name = truth.ask.param.name.replace("_", " ")
    more = f"I need one more thing. Which {name} shall I use?"
    return f"What is the {name}?", f"Happy to. Could you tell me the {name}?", more


def _flawed_call(truth: Truth, gold: GoldCall) -> ExpectedCall | None:
    """Return a call with the catalogue's names if the signature was changed, else without its last argument."""
    call = gold.expected
    if not truth.scene.functions:
        return None
    plain = {param.offered: param.name for param in truth.scene.function(gold.name).params}
    if any(name != plain[name] for name in call.arguments):
        return ExpectedCall(call.name, {plain[name]: value for name, value in call.arguments.items()})
    return ExpectedCall(call.name, dict(list(call.arguments.items())[:-1])) if call.arguments else None


def _required_values(schema: Mapping[str, JSON]) -> dict[str, JSON]:
    properties, required = schema.get("properties"), schema.get("required")
    inner = properties if isinstance(properties, dict) else {}
    return {str(name): _value(inner.get(str(name))) for name in (required if isinstance(required, list) else ())}


def _value(schema: JSON) -> JSON:
    given = schema if isinstance(schema, dict) else {}
    choices = given.get("enum")
    if isinstance(choices, list) and choices:
        return choices[0]
    if given.get("type") == "object":
        return _required_values(given)
    examples: dict[str, JSON] = {"integer": 1, "number": 1.0, "boolean": True, "array": []}
    return examples.get(str(given.get("type")), "something")
