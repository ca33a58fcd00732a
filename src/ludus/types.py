"""The core records. Read this file first.

    Task                         one problem: prompt (messages), truth for the verifier, tags
      -> Segment (prompt)        its tokens
      -> for each turn
           SamplingParams        how to sample
           Completion            the sampled tokens, with log-probabilities and weight versions
           Segment (action)      the same tokens, in the trajectory
           Action                the parsed message: text and tool calls
           StepResult            the environment's response: messages and tool outcomes
           Segment (observation) its tokens
      -> Trajectory              one attempt: segments, messages, stop reason, rewards
      -> Group                   all attempts at a task, from which advantages are computed

Records are frozen and token lists are tuples. A name ends in its unit (`_s` seconds, `_tokens`); `num_` counts.
Shapes: `[T]` is one entry per token of a trajectory.

Token ids pass unchanged from the engine through the trajectory to the learner; text is never tokenized again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Final, Literal, NamedTuple, Required, TypedDict, TypeVar

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]
_T = TypeVar("_T", str, float)
_K = TypeVar("_K", bound=Hashable)
_Item = TypeVar("_Item")


class StopReason(StrEnum):
    """Reason why an episode ended; passed to rewards and counted in metrics."""

    ANSWERED = "answered"
    """The environment ended the episode: the model gave its answer."""
    EMPTY_ANSWER = "empty_answer"
    """The model ended its turn without text or a tool call."""
    MAX_TURNS = "max_turns"
    """The episode reached the limit on assistant turns."""
    MAX_TOKENS = "max_tokens"
    """The trajectory's token budget or the model's context is exhausted."""
    TRUNCATED = "truncated"
    """An action reached its token limit before the model ended its turn."""
    TOOL_ERRORS = "tool_errors"
    """Too many consecutive tool errors or malformed calls."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt alone does not fit; no token was sampled."""
    TIMEOUT = "timeout"
    """The episode reached its wall-clock limit; the run is flagged as non-reproducible."""
    FAILED = "failed"
    """The infrastructure failed (environment, engine), not the model; see `Trajectory.failure`."""
    AGENT_FAILED = "agent_failed"
    """The agent raised an exception after the policy's first reply, for example because it could not parse it."""


class FunctionCall(TypedDict):
    """The `function` part of an OpenAI tool call; `arguments` is JSON text."""

    name: str
    arguments: str


class MessageToolCall(TypedDict):
    """A tool call inside an assistant message, in OpenAI's format."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict, total=False):
    """A chat message in OpenAI's format; `reasoning_content` holds the model's thinking.

    `train` applies to assistant messages of demonstrations: false excludes the message from the loss. `images` are data
    URLs; `<image>` in the content marks the place of each (`ludus.images`).
    """

    role: Required[Literal["system", "user", "assistant", "tool"]]
    content: Required[str]
    reasoning_content: str
    tool_calls: list[MessageToolCall]
    tool_call_id: str
    name: str
    train: bool
    images: list[str]


DataClass = Literal["format", "reasoning", "tool_use", "negatives"]
"""Skill that a demonstration teaches: answer format, thinking, tool calls, or abstaining from calls."""

WORLD_TAG: Final = "world"
"""Tag that names a task's world in a mixture."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem.

    `truth` is the verifier's reference: only rewards read it, and it is never rendered to the policy. `tags`
    label the task for reports (split, family, number of hops).
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
    """A malformed tool call: its text and a reason that the model can act on."""

    id: str
    text: str
    reason: str


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Action:
    """One model turn: the message, its valid calls and its malformed calls."""

    message: Message
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[CallError, ...] = ()
    finish_reason: FinishReason = "stop"


class ToolStatus(StrEnum):
    """Status of a tool call. Every status except OK is an error, shown to the model as an observation."""

    OK = "ok"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    MALFORMED = "malformed"
    RAISED = "raised"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """Result of one tool call, for metrics, rewards and rollout records.

    `output` is the text shown to the model. `cost` comes from the tool's traits: it covers both attempts if
    the call was `retried`, and is 0 if the tool did not start. Equality ignores `seconds` (wall-clock).
    `call_id` is empty for outcomes that the environment adds itself (`ludus.rewards.extract`).
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
    """The environment's response to an action: observation messages, and whether the episode is over."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float | None = None
    outcomes: tuple[ToolOutcome, ...] = ()


@dataclass(frozen=True, slots=True)
class Guide:
    """Constraint on an action: a JSON schema, a regular expression, or a Lark grammar."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


MAX_TOP_LOGPROBS = 20
"""Maximum `top_logprobs` of a request."""

TopLogprobs = tuple[tuple[int, float], ...]
"""Token ids with log-probabilities, in descending order; ties are sorted by token id."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one action.

    `temperature` 0 is greedy. Filters apply to the tempered distribution in the order `top_k` (0: off),
    `top_p`, `min_p` (drop tokens below that fraction of the highest probability; arXiv:2407.01082). `seed`
    fixes the randomness of this request independently of the batch: token `t` uses the random number with
    counter (seed, t). A `stop` string ends the action after the token that completes it; no token is removed.
    `guide` allows only tokens that match a schema, expression or grammar. `top_logprobs` is the number of
    most likely tokens to return per position, at most `MAX_TOP_LOGPROBS`.
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
        """Values of the parameters in `PARAM_BOUNDS`, by name."""
        return {name: value for name, value in asdict(self).items() if name in PARAM_BOUNDS}

    @property
    def cuts(self) -> bool:
        """Whether `top_k`, `top_p`, `min_p` or `guide` can exclude tokens."""
        cut = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return self.guide is not None or (self.temperature > 0 and cut)


@dataclass(frozen=True, slots=True)
class Bound:
    """A closed range; `or_zero` also allows 0."""

    low: float
    high: float
    or_zero: bool = False

    def contains(self, value: float) -> bool:
        """Return whether the value is in the range; NaN is not."""
        return self.low <= value <= self.high or (self.or_zero and value == 0)

    @property
    def words(self) -> str:
        """Text of the range for error messages."""
        return f"it must be {'0 or ' * self.or_zero}{self.low:.10g} to {self.high:.10g}"


PARAM_BOUNDS: Mapping[str, Bound] = {
    "temperature": Bound(1e-10, 1e10, or_zero=True),
    "top_p": Bound(1e-10, 1),
    "top_k": Bound(0, 2**31 - 1),
    "min_p": Bound(0, 1),
    "max_new_tokens": Bound(1, 2**31 - 1),
    "top_logprobs": Bound(0, MAX_TOP_LOGPROBS),
}
"""Bounds of `SamplingParams` that every engine supports; within them finite logits do not overflow."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens with the log-probability (natural log) and weight version of each.

    `logprobs` are of the tempered distribution over the whole vocabulary (temperature 1 for greedy actions).
    `cut_logprobs` are of the distribution sampled from, after `top_k`, `top_p`, `min_p` and `guide`; they are
    empty if the request sets none of these. `top_logprobs` holds the most likely tokens of the tempered
    distribution at each position: as many as requested, fewer if fewer have a nonzero probability, empty if
    not requested. They may not include the sampled token.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    cut_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()


POLICY: Final = "policy"
"""Name of the agent in an episode of one agent."""

SegmentKind = Literal["prompt", "action", "observation"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one origin.

    `action` tokens were sampled by the policy and are trained on; `prompt` and `observation` tokens (tool output and
    chat template) are not. `parent` is the index of the preceding segment; None means the previous one in the list, or
    the root for the first. `logprobs` and `versions` have one entry per action token and are empty for other kinds.
    `policy` is the adapter (`model.lora.roles`) or model (`model.roles`) of the agent's role, which samples and is
    trained; empty: the policy that all other roles share.
    """

    kind: SegmentKind
    tokens: tuple[int, ...]
    turn: int = 0
    parent: int | None = None
    agent: str = POLICY
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    policy: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """An infrastructure failure: the failed part, the error, and the number of attempts."""

    part: str
    error: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock seconds of one episode, separate because no deterministic value may depend on them."""

    total_s: float = 0.0
    model_s: float = 0.0
    tools_s: float = 0.0
    scoring_s: float = 0.0
    """Time from the end of the episode (`total_s`) to its rewards, including waiting for a grader."""
    grading_s: float = 0.0
    """The part of `scoring_s` spent on computing rewards."""
    begin: float = 0.0
    """Start of the episode, in seconds since the epoch."""
    turns: tuple[tuple[float, float], ...] = ()
    """Seconds of the model and of the environment in each turn, in order; empty for a tree."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """End of one path of a tree: its messages and tool outcomes from the root on, and its reward parts."""

    messages: tuple[Message, ...]
    stop_reason: StopReason
    outcomes: tuple[ToolOutcome, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trajectory:
    """One attempt at a task.

    `segments` form a tree by `parent`, usually a chain. `rewards` holds the named reward parts, `reward`
    their weighted sum. `turn_rewards` and `anchors` have one entry per turn, or one per action in a tree; an
    anchor is a hash of the environment state before the action. `leaf_rewards` holds the rewards of a tree's
    `rows` if they differ. In a tree sampled as one, `leaves` has one entry per row; `messages`, `stop_reason`
    and `outcomes` belong to the first row, `rewards` and `reward` are means over the rows. `turn_progress` is the
    fraction of the solution that each turn newly completed, if the world has a turn verifier.

    With `shared_reward` all rows belong to one attempt, as recorded from an agent that rewrites its context or has
    sub-agents: the rollout is one member of its group whatever its number of rows. Otherwise each row of a tree is an
    attempt. In a rollout of several agents, `agent_rewards` holds the reward of each by its name
    (`Segment.agent`), and the rows of an agent are one attempt. `notes` are the texts that its tools wrote, by title
    (`ludus.tools.notes`).
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
    shared_reward: bool = False
    agent_rewards: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    timings: Timings = field(default=Timings(), compare=False)

    def __repr__(self) -> str:
        """Return the main facts in one line: the fields are pages long."""
        tokens = sum(len(segment.tokens) for segment in self.segments)
        size = f"turns={self.num_turns}, tokens={tokens}"
        end = f"stop_reason={self.stop_reason.value!r}"
        return f"Trajectory({self.task_id!r}, sample={self.sample}, reward={self.reward:g}, {size}, {end})"

    @property
    def name(self) -> str:
        """Name in log and error messages."""
        return f"sample {self.sample} of task {self.task_id}"

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Paths from the root to each leaf, as segment indices; a chain has one row."""
        parents = [s.parent if s.parent is not None else i - 1 for i, s in enumerate(self.segments)]
        rows = []
        for leaf in sorted({*range(len(parents))} - {*parents}):
            path = [leaf]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            rows.append(tuple(reversed(path)))
        return tuple(rows)

    @property
    def row_actions(self) -> list[list[int]]:
        """Actions of each row, as indices among all actions of the tree in segment order."""
        actions = [i for i, segment in enumerate(self.segments) if segment.kind == "action"]
        numbers = {i: number for number, i in enumerate(actions)}
        return [[numbers[i] for i in row if i in numbers] for row in self.rows]

    @property
    def row_rewards(self) -> tuple[float, ...]:
        """Reward of each row: the reward of its leaf if recorded, otherwise of the trajectory."""
        return self.leaf_rewards or (self.reward,) * len(self.rows)

    def paths(self) -> list[Path]:
        """Return one chain per row, with the messages, outcomes and rewards of its leaf if recorded.

        `turn_rewards`, `anchors` and `turn_progress`, one per action, are split accordingly. A chain is its own
        only path and stays unchanged; with `shared_reward` the only path is a chain of all segments in row order, and
        with `agent_rewards` there is such a path for each agent, with the agent's reward.
        """
        numbers = range(len(self.rows))
        if not self.agent_rewards and (len(numbers) < 2 or self.shared_reward):
            whole = self if len(numbers) < 2 else self._joined(numbers, self.row_actions)
            return [Path(whole, tuple(range(self.num_action_tokens)), len(numbers) - 1)]
        actions, places = self.row_actions, dict[int, range]()
        start = 0
        for i in dict.fromkeys(i for row in self.rows for i in row):
            if self.segments[i].kind == "action":
                places[i] = range(start, start + len(self.segments[i].tokens))
                start = places[i].stop
        if self.agent_rewards:
            by_agent: dict[str, list[int]] = {}
            for number, row in enumerate(self.rows):
                by_agent.setdefault(self.segments[row[-1]].agent, []).append(number)
            split = [*by_agent.values()]
            chains = [self._chain_of_agent(agent, own, actions) for agent, own in by_agent.items()]
        else:
            split = [[number] for number in numbers]
            chains = [self._chain_of(number, actions) for number in numbers]
        rows = [dict.fromkeys(i for number in one for i in self.rows[number]) for one in split]
        found = [tuple(place for i in row if i in places for place in places[i]) for row in rows]
        return [Path(chain, own, one[-1]) for chain, own, one in zip(chains, found, split, strict=True)]

    def attempts(self) -> list[Trajectory]:
        """Return the paths of a tree if its leaves are recorded, otherwise the trajectory itself."""
        return [path.trajectory for path in self.paths()] if self.leaves else [self]

    def _joined(self, numbers: Sequence[int], row_actions: Sequence[Sequence[int]]) -> Trajectory:
        """Return these rows as one chain."""
        segments = [self.segments[i] for i in dict.fromkeys(i for n in numbers for i in self.rows[n])]
        actions = list(dict.fromkeys(i for n in numbers for i in row_actions[n]))
        return replace(
            self,
            segments=tuple(replace(segment, parent=None) for segment in segments),
            turn_rewards=_select(self.turn_rewards, actions),
            anchors=_select(self.anchors, actions),
            turn_progress=_select(self.turn_progress, actions),
        )

    def _chain_of_agent(self, agent: str, numbers: Sequence[int], row_actions: Sequence[Sequence[int]]) -> Trajectory:
        reward = self.agent_rewards[agent]
        return replace(self._joined(numbers, row_actions), reward=reward, agent_rewards={agent: reward})

    def _chain_of(self, number: int, row_actions: Sequence[Sequence[int]]) -> Trajectory:
        row = self._joined([number], row_actions)
        chain = replace(row, reward=self.row_rewards[number], leaf_rewards=(), leaves=())
        if not self.leaves:
            return chain
        leaf = self.leaves[number]
        return replace(
            chain, messages=leaf.messages, stop_reason=leaf.stop_reason, outcomes=leaf.outcomes, rewards=leaf.rewards
        )

    @cached_property
    def chain(self) -> tuple[Segment, ...]:
        """Segments of the only row. Raises ValueError if the trajectory branches."""
        if len(self.rows) > 1:
            raise ValueError(f"trajectory of task {self.task_id} has {len(self.rows)} rows; read `rows`")
        return self.segments

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of the chain, `[T]`."""
        return tuple(t for s in self.chain for t in s.tokens)

    @cached_property
    def action_mask(self) -> tuple[bool, ...]:
        """True for tokens sampled by the policy, `[T]`."""
        return tuple(s.kind == "action" for s in self.chain for _ in s.tokens)

    @cached_property
    def behavior_logprobs(self) -> tuple[float, ...]:
        """Log-probabilities recorded by the engine, `[T]`, 0 where the mask is False."""
        return tuple(lp for s in self.chain for lp in (s.logprobs or (0.0,) * len(s.tokens)))

    @cached_property
    def turn_index(self) -> tuple[int, ...]:
        """Turn of each token, `[T]`, counted from 0."""
        return tuple(s.turn for s in self.chain for _ in s.tokens)

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """Weight version that produced each action token, `[T]`, -1 where the mask is False."""
        return tuple(v for s in self.chain for v in (s.versions or (-1,) * len(s.tokens)))

    @property
    def num_action_tokens(self) -> int:
        """Number of trained tokens; tokens shared by several rows count once."""
        return sum(len(s.tokens) for s in self.segments if s.kind == "action")

    @property
    def num_turns(self) -> int:
        """Number of sampled assistant turns."""
        return sum(s.kind == "action" for s in self.segments)

    @property
    def call_outcomes(self) -> tuple[ToolOutcome, ...]:
        """Outcomes of the model's calls (those with a `call_id`)."""
        return tuple(outcome for outcome in self.outcomes if outcome.call_id)

    @property
    def tool_cost(self) -> float:
        """Total cost of the episode's tool calls, in the unit of the tools' traits."""
        return math.fsum(outcome.cost for outcome in self.outcomes)

    @property
    def answer(self) -> str:
        """Text of the last message if it is an assistant message without a tool call.

        If a call ended the episode (`ludus.tools.base`), the last `answer` argument that is text; otherwise empty.
        """
        if not self.messages or self.stop_reason is not StopReason.ANSWERED:
            return ""
        last = self.messages[-1]
        if last["role"] != "assistant" or not (calls := last.get("tool_calls")):
            return last["content"] if last["role"] == "assistant" else ""
        for call in reversed(calls):
            try:
                arguments = json.loads(call["function"]["arguments"])
            except (ValueError, RecursionError):
                continue
            if isinstance(arguments, dict) and isinstance(arguments.get("answer"), str):
                return str(arguments["answer"])
        return ""


class Path(NamedTuple):
    """Path from the root of a tree to a leaf, as a chain with the leaf's reward.

    `places` are the indices of its action tokens among those of the whole trajectory, counted once in row order;
    `row` is the index of its (last) row.
    """

    trajectory: Trajectory
    places: tuple[int, ...]
    row: int = 0

    @property
    def agent(self) -> str:
        """Name of the agent whose path this is, in a rollout of several agents."""
        return next(iter(self.trajectory.agent_rewards))

    @property
    def role(self) -> str:
        """Role of that agent."""
        return role_of_agent(self.agent)


def role_of_agent(name: str) -> str:
    """Return the role of an agent: its name up to a slash."""
    return name.partition("/")[0]


def grouped(items: Iterable[_Item], key: Callable[[_Item], _K]) -> dict[_K, list[_Item]]:
    """Return the items by key, in the order of first occurrence."""
    groups: dict[_K, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _select(values: tuple[_T, ...], indices: Sequence[int]) -> tuple[_T, ...]:
    return tuple(values[i] for i in indices if i < len(values))


@dataclass(frozen=True)
class Group:
    """One task and its trajectories, ordered by `sample`."""

    task: Task
    trajectories: tuple[Trajectory, ...]
