"""The nouns. Read this file first: everything else moves these records around.

    Task -> messages -> Segment (prompt)
         -> [Segment (action) -> Action -> StepResult -> Segment (observation)] for each turn
         -> Trajectory -> Group -> advantages -> learner

Records are frozen: a step that changes something makes a new record. Token lists are tuples. Names with a
unit carry it as a suffix (`_s` seconds, `_tokens`); `num_` counts.

Tokens travel as ids from the engine into the trajectory and from there to the learner. Text is a view of
them and is never turned back into ids.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Final, Literal, Required, TypedDict

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]


class StopReason(StrEnum):
    """Why an episode ended. Rewards see it, and every ended episode is counted under one of these."""

    ANSWERED = "answered"
    """The environment said that the episode is done: the model gave its answer."""
    EMPTY_ANSWER = "empty_answer"
    """The model ended its turn with neither text nor a tool call."""
    MAX_TURNS = "max_turns"
    """The limit on assistant turns was reached."""
    MAX_TOKENS = "max_tokens"
    """No room is left in the token budget of the trajectory or the context of the model."""
    TRUNCATED = "truncated"
    """One action reached its token limit before the model ended its turn."""
    TOOL_ERRORS = "tool_errors"
    """Too many tool errors or malformed calls in a row."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt alone does not fit; nothing was sampled."""
    TIMEOUT = "timeout"
    """The episode's wall-clock limit. It ends the claim of bit-for-bit reproducibility, and says so."""
    FAILED = "failed"
    """The infrastructure failed (environment, engine), not the model; `Trajectory.failure` says how."""


class FunctionCall(TypedDict):
    """The `function` part of an OpenAI tool call: `arguments` is JSON text."""

    name: str
    arguments: str


class MessageToolCall(TypedDict):
    """A tool call inside an assistant message, in the OpenAI shape."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict, total=False):
    """One chat message in the OpenAI shape; `reasoning_content` holds the model's thinking.

    `train` stands in assistant messages of demonstrations: false keeps the message out of the loss.
    """

    role: Required[Literal["system", "user", "assistant", "tool"]]
    content: Required[str]
    reasoning_content: str
    tool_calls: list[MessageToolCall]
    tool_call_id: str
    name: str
    train: bool


DataClass = Literal["format", "reasoning", "tool_use", "negatives"]
"""What a demonstration teaches: the form of an answer, thinking, calls, or that no call is right."""

WORLD_TAG: Final = "world"
"""The tag of a task that names its world in a mixture."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem.

    `truth` is what the verifier needs. It is never rendered to the policy; only rewards read it.
    `tags` label the task (split, family, number of hops) for reports.
    """

    id: str
    prompt: tuple[Message, ...]
    truth: object
    tags: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed call: the tool's name and its arguments as parsed JSON."""

    id: str
    name: str
    arguments: dict[str, JSON]


@dataclass(frozen=True, slots=True)
class CallError:
    """Something that was meant as a tool call and is none: the text, and a reason the model can act on."""

    id: str
    text: str
    reason: str


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Action:
    """What the model did in one turn: its message, the calls in it, and the calls it got wrong."""

    message: Message
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[CallError, ...] = ()
    finish_reason: FinishReason = "stop"


class ToolStatus(StrEnum):
    """How a tool call ended. All but OK are errors that the model sees as an observation."""

    OK = "ok"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    MALFORMED = "malformed"
    RAISED = "raised"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """One tool call as it happened: for metrics, rewards and the record.

    `output` is what the model saw. `cost` is what the tool's traits ask for it, for both tries where the call
    was `retried`, and 0 where the tool was never begun. Two outcomes that differ in `seconds` (wall-clock)
    alone are equal. `call_id` is empty for what an environment leaves unasked (`ludus.rewards.extract`).
    """

    call_id: str
    tool: str
    status: ToolStatus
    output: str
    truncated: bool = False
    seconds: float = field(default=0.0, compare=False)
    cost: float = 0.0
    retried: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's answer to one action: observation messages, and whether the episode is over."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float | None = None
    outcomes: tuple[ToolOutcome, ...] = ()


@dataclass(frozen=True, slots=True)
class Guide:
    """What an action must look like: a JSON schema, a regular expression, or a grammar in Lark's notation."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


MAX_TOP_LOGPROBS = 20
"""The most alternatives to a token that a request may ask for."""

TopLogprobs = tuple[tuple[int, float], ...]
"""Token ids with their log-probabilities, the likeliest first, the lowest id first among equals."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one action is sampled.

    `temperature` 0 is greedy. The tempered distribution is cut by `top_k` (0: not), then `top_p`, then
    `min_p` (tokens below that share of the likeliest one's probability go; arXiv:2407.01082). `seed` fixes
    the randomness of this request alone: token `t` of the action uses the random number counted by (seed,
    t), whatever else is in the batch. `stop` strings end the action after the token that completes them; no
    token is removed. `guide` allows only tokens that keep to a schema, an expression or a grammar.
    `top_logprobs` asks for that many of the likeliest tokens at each place, at most `MAX_TOP_LOGPROBS`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    guide: Guide | None = None
    top_logprobs: int = 0

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that `PARAM_BOUNDS` bounds, by name."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "max_new_tokens": self.max_new_tokens,
            "top_logprobs": self.top_logprobs,
        }

    @property
    def cuts(self) -> bool:
        """Whether some tokens cannot be sampled although their probability is above 0."""
        cut = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return self.guide is not None or (self.temperature > 0 and cut)


@dataclass(frozen=True, slots=True)
class Bound:
    """The range of a number, ends included; `or_zero` adds 0."""

    low: float
    high: float
    or_zero: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value is in the range; NaN is not."""
        return self.low <= value <= self.high or (self.or_zero and value == 0)

    @property
    def words(self) -> str:
        """The range in words."""
        return f"it must be {'0 or ' * self.or_zero}{self.low:.10g} to {self.high:.10g}"


PARAM_BOUNDS: Mapping[str, Bound] = {
    "temperature": Bound(1e-10, 1e10, or_zero=True),
    "top_p": Bound(1e-10, 1),
    "top_k": Bound(0, 2**31 - 1),
    "min_p": Bound(0, 1),
    "max_new_tokens": Bound(1, 2**31 - 1),
    "top_logprobs": Bound(0, MAX_TOP_LOGPROBS),
}
"""The numbers of `SamplingParams` that every engine takes. Within them no logits overflow that are finite."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens with the natural log-probability and the weight version of each.

    `logprobs` are of the plain distribution: tempered (a greedy action's: at temperature 1), over the whole
    vocabulary. `cut_logprobs` are of what was sampled from, after `top_k`, `top_p`, `min_p` and `guide`, and
    empty for a request that cuts nothing, as the two are then the same. `top_logprobs` has, for each token,
    the likeliest tokens of the plain distribution at its place, as many as the request asked for (fewer where
    fewer have a probability); the sampled one may not be among them. It is empty where none were asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    cut_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()


SegmentKind = Literal["prompt", "action", "observation"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one origin.

    `action` tokens were sampled by the policy and train; `prompt` and `observation` tokens (tool output and
    whatever the chat template puts around it) never do. `parent` is the index of the segment that it
    continues; None means the one before (or, for the first, the root). `logprobs` and `versions` have one
    entry per action token and are empty otherwise.
    """

    kind: SegmentKind
    tokens: tuple[int, ...]
    turn: int = 0
    parent: int | None = None
    agent: str = "policy"
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An infrastructure failure: which part, what it said, and after how many attempts it was given up."""

    part: str
    error: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock seconds of one episode. A record of its own: no deterministic number depends on it."""

    total_s: float = 0.0
    model_s: float = 0.0
    tools_s: float = 0.0
    scoring_s: float = 0.0
    """After `total_s`, until it has its rewards, waiting for whoever computes them included."""
    grading_s: float = 0.0
    """Of that, computing them."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """How one path of a tree ended: its dialogue and tool calls from the root on, and its reward parts."""

    messages: tuple[Message, ...]
    stop_reason: StopReason
    outcomes: tuple[ToolOutcome, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trajectory:
    """One attempt at a task.

    `segments` form a tree by `parent`, in the ordinary case a chain. `rewards` holds the named parts as they
    were scored, `reward` their weighted sum. `turn_rewards` and `anchors` have one entry per turn, in a tree
    one per action: a hash of the environment's state before it. `leaf_rewards` are those of the `rows` of a
    tree, where they differ. Of a tree that was sampled as one, `leaves` has one entry per row; `messages`,
    `stop_reason` and `outcomes` are then those of the first, `rewards` and `reward` means over all.
    `turn_progress` is the share of the solution that each turn newly reached, if the world's turn verifier
    was asked. Everything else is derived from these.
    """

    task_id: str
    sample: int
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    stop_reason: StopReason
    outcomes: tuple[ToolOutcome, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    reward: float = 0.0
    turn_rewards: tuple[float, ...] = ()
    leaf_rewards: tuple[float, ...] = ()
    leaves: tuple[Leaf, ...] = ()
    failure: Failure | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    anchors: tuple[str, ...] = ()
    turn_progress: tuple[float, ...] = ()
    timings: Timings = field(default=Timings(), compare=False)

    @property
    def name(self) -> str:
        """What a sentence calls it."""
        return f"sample {self.sample} of task {self.task_id}"

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Paths from the root to each leaf, as segment indices; a chain has one row."""
        parents = [s.parent if s.parent is not None else i - 1 for i, s in enumerate(self.segments)]
        inner = set(parents)
        leaves = [i for i in range(len(self.segments)) if i not in inner]
        return tuple(_path_to(leaf, parents) for leaf in leaves)

    @cached_property
    def chain(self) -> tuple[Segment, ...]:
        """The segments of the only row. Raises ValueError where the trajectory branches."""
        if len(self.rows) > 1:
            raise ValueError(f"trajectory of task {self.task_id} has {len(self.rows)} rows; read `rows`")
        return self.segments

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of the chain, `[T]`."""
        return tuple(t for s in self.chain for t in s.tokens)

    @cached_property
    def action_mask(self) -> tuple[bool, ...]:
        """True on tokens that the policy sampled, `[T]`."""
        return tuple(s.kind == "action" for s in self.chain for _ in s.tokens)

    @cached_property
    def behavior_logprobs(self) -> tuple[float, ...]:
        """Log-probabilities recorded by the engine, `[T]`, 0 where the mask is False."""
        return tuple(lp for s in self.chain for lp in (s.logprobs or (0.0,) * len(s.tokens)))

    @cached_property
    def turn_index(self) -> tuple[int, ...]:
        """The turn of each token, `[T]`, counted from 0."""
        return tuple(s.turn for s in self.chain for _ in s.tokens)

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """The weight version that produced each action token, `[T]`, -1 where the mask is False."""
        return tuple(v for s in self.chain for v in (s.versions or (-1,) * len(s.tokens)))

    @property
    def num_action_tokens(self) -> int:
        """Tokens that train, each counted once whatever the number of rows through it."""
        return sum(len(s.tokens) for s in self.segments if s.kind == "action")

    @property
    def num_turns(self) -> int:
        """Assistant turns that were sampled."""
        return sum(s.kind == "action" for s in self.segments)

    @property
    def call_outcomes(self) -> tuple[ToolOutcome, ...]:
        """The outcomes of the model's calls: those with a `call_id`, so without what the environment left."""
        return tuple(outcome for outcome in self.outcomes if outcome.call_id)

    @property
    def tool_cost(self) -> float:
        """What the calls of the episode cost together, in the unit of the tools' traits."""
        return math.fsum(outcome.cost for outcome in self.outcomes)

    @property
    def answer(self) -> str:
        """The text of the last message if it is the model's and holds no tool call.

        Where a call ended the episode (`ludus.tools.submit`), the text that it was given as `answer`; empty
        otherwise.
        """
        if not self.messages or self.stop_reason is not StopReason.ANSWERED:
            return ""
        last = self.messages[-1]
        if last["role"] != "assistant":
            return ""
        return _handed_in(last.get("tool_calls") or []) if last.get("tool_calls") else last["content"]


def _handed_in(calls: Sequence[MessageToolCall]) -> str:
    """The text argument `answer` of the last call that has one, otherwise empty."""
    for call in reversed(calls):
        try:
            given = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            continue
        if isinstance(given, dict) and isinstance(given.get("answer"), str):
            return str(given["answer"])
    return ""


def _path_to(leaf: int, parents: Sequence[int]) -> tuple[int, ...]:
    path = [leaf]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return tuple(reversed(path))


@dataclass(frozen=True)
class Group:
    """One task and its trajectories, in the order of their `sample` numbers."""

    task: Task
    trajectories: tuple[Trajectory, ...]
