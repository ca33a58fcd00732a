"""Sampling of one member of a group for exploration, with exact behavior log-probabilities.

Tokens that the policy did not sample (a prefix of a demonstration, the beginning of a forced call) are segments of the
kind `observation`: context, never in the loss. Tokens sampled from another distribution than the trained one have that
distribution's log-probabilities, and the names in `OFF_POLICY` are tags of their trajectory, so that
`algorithm.correction` weighs them.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

from ludus.engines.base import common_prefix, seed_for
from ludus.rollouts.episode import EngineChatSession
from ludus.rollouts.ledger import RolloutKey
from ludus.tools.base import Tool
from ludus.types import Action, Completion, Message, MessageToolCall, SamplingParams, Segment, StopReason, Trajectory

OFF_POLICY = ("temperature", "top_p", "diverse")
"""Tags of a trajectory that was sampled from another distribution than the trained one."""
OBJECTIVE, PREFIX = "objective", "prefix"
"""Tags of a trajectory: the objective of its group, and the number of turns of a demonstration that it begins with."""

Sampled = tuple[tuple[int, ...], tuple[float, ...]]
"""The compared tokens of a first turn, with their log-probabilities under the policy."""


@dataclass(frozen=True, slots=True)
class MemberSampling:
    """How a member of a group differs from the run's sampling; the default does not.

    `temperature` and `top_p` replace those of the run (None: the run's). `prompt` is appended to the system message.
    The messages of `prefix` are the first turns. `epsilon` is the probability of a forced call per turn. If
    `diverse_tokens` is not 0, the first turn is sampled up to `tries` times more while its first `diverse_tokens`
    tokens are those of a sibling with a lower number. `tags` are added to those of the trajectory.
    """

    temperature: float | None = None
    top_p: float | None = None
    prompt: str = ""
    prefix: tuple[Message, ...] = ()
    epsilon: float = 0.0
    diverse_tokens: int = 0
    tries: int = 0
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def changes_turns(self) -> bool:
        """Whether turns are not sampled by the policy alone."""
        return bool(self.prefix or self.epsilon or self.diverse_tokens)

    def apply(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling parameters of the member."""
        temperature = params.temperature if self.temperature is None else self.temperature
        return replace(params, temperature=temperature, top_p=params.top_p if self.top_p is None else self.top_p)


def is_off_policy(trajectory: Trajectory) -> bool:
    """Return whether the trajectory was sampled from another distribution than the trained one."""
    return any(name in trajectory.tags for name in OFF_POLICY)


def num_forced_calls(trajectory: Trajectory) -> int:
    """Return the number of turns that began with a forced call."""
    pairs = pairwise(trajectory.segments)
    return sum(a.kind == "observation" and b.kind == "action" and a.turn == b.turn for a, b in pairs)


def with_prompt(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """Return the messages with a text at the end of the first system message, which is added if there is none."""
    if not text:
        return tuple(messages)
    first = messages[0] if messages and messages[0]["role"] == "system" else None
    if first is None:
        return (Message(role="system", content=text), *messages)
    changed = first.copy()
    changed["content"] = f"{first['content']}\n{text}"
    return (changed, *messages[1:])


def rejection_logprobs(sampled: Sampled, siblings: Sequence[Sampled], tries: int) -> tuple[float, ...]:
    """Return the log-probabilities `[n]` of the compared tokens under sampling that rejects those of siblings.

    A beginning is sampled from the policy `pi`, and again while it is one of the distinct `siblings`, at most `tries`
    times more. With `q` the probability of `siblings` under `pi`, the result is distributed as
    `mu(x) = pi(x) (1 + q + ... + q^tries)` for others and `pi(x) q^tries` for siblings, and a token as
    `mu(x_<=t) / mu(x_<t)`, in which `mu(x_<=t)` sums over the beginnings that start so.
    """
    tokens, logprobs = sampled
    mass = {own: math.exp(math.fsum(values)) for own, values in siblings}
    q = min(1.0, math.fsum(mass.values()))
    again = q**tries
    others = math.fsum(q**number for number in range(tries + 1))
    found, before = [], 0.0
    for end in range(1, len(tokens) + 1):
        total = math.exp(math.fsum(logprobs[:end]))
        rejected = math.fsum(value for own, value in mass.items() if own[:end] == tokens[:end])
        accepted = 0.0 if tokens[:end] in mass and end == len(tokens) else max(0.0, total - rejected)
        now = math.log(max(others * accepted + again * min(rejected, total), 1e-300))
        found.append(now - before)
        before = now
    return tuple(found)


@dataclass
class FirstTurns:
    """First turns of the members of groups, by step and task.

    If `waits` is set, a member waits for its siblings with lower numbers that have begun; in lockstep, in which waiting
    would block the round, members of a round continue in the order of their numbers instead. Both are deterministic.
    """

    waits: bool
    _found: dict[tuple[int, str], dict[int, asyncio.Future[Sampled | None]]] = field(default_factory=dict)

    def begin(self, key: RolloutKey) -> None:
        """Announce a member; those of other steps are forgotten."""
        self._found = {group: members for group, members in self._found.items() if group[0] == key.step}
        group = self._found.setdefault((key.step, key.task_id), {})
        group.setdefault(key.sample, asyncio.get_running_loop().create_future())

    async def before(self, key: RolloutKey) -> list[Sampled]:
        """Return the distinct first turns of the siblings with lower numbers."""
        futures = [one for n, one in sorted(self._found[key.step, key.task_id].items()) if n < key.sample]
        found = [await one if self.waits else one.result() for one in futures if self.waits or one.done()]
        return list({one[0]: one for one in found if one is not None}.values())

    def add(self, key: RolloutKey, sampled: Sampled | None) -> None:
        """Set the first turn of a member, None if it has none; the first call counts."""
        future = self._found.get((key.step, key.task_id), {}).get(key.sample)
        if future is not None and not future.done():
            future.set_result(sampled)


@dataclass
class ExploringChatSession(EngineChatSession):
    """Dialogue of a member with a prefix, forced calls, or a first turn that differs from its siblings'."""

    sampling: MemberSampling = MemberSampling()
    key: RolloutKey | None = None
    first_turns: FirstTurns | None = None
    _history: list[Message] = field(init=False, default_factory=list)

    @classmethod
    def of(
        cls, session: EngineChatSession, sampling: MemberSampling, key: RolloutKey, first_turns: FirstTurns | None
    ) -> ExploringChatSession:
        """Return the session of a member with the settings of `session`."""
        settings = {one.name: session.__dict__[one.name] for one in fields(session) if one.init}
        return cls(**settings, sampling=sampling, key=key, first_turns=first_turns)

    def __post_init__(self) -> None:
        if self.first_turns is not None and self.key is not None:
            self.first_turns.begin(self.key)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        self._history += messages
        return super().open(messages, tools)

    def observe(self, messages: Sequence[Message], added: str = "") -> StopReason | None:
        self._history += messages
        return super().observe(messages, added)

    async def act(self) -> Action | StopReason:
        """Replay a turn of the prefix, or sample one, after a forced beginning with probability `epsilon`."""
        if self._turn < len(self.sampling.prefix):
            return self._replay_turn(self.sampling.prefix[self._turn])
        self._lead = self._forced_call()
        if self._lead and (stop := self._force(self._lead)) is not None:
            return stop
        action = await super().act()
        self._lead = ()
        if isinstance(action, Action):
            self._history.append(action.message)
        return action

    def close(self) -> None:
        if self.first_turns is not None and self.key is not None:
            self.first_turns.add(self.key, None)
        super().close()

    def _replay_turn(self, message: Message) -> Action | StopReason:
        tokens = self.renderer.action(self._history, message, self._tools)
        if (stop := self._force(tokens)) is not None:
            return stop
        turn, self._turn = self._turn, self._turn + 1
        action = self.renderer.parse(tokens, turn, "stop", self._tools)
        self._history.append(action.message)
        return action

    def _force(self, tokens: tuple[int, ...]) -> StopReason | None:
        """Append tokens of a turn that are not trained. Returns a stop reason if they do not fit."""
        if len(self._tokens) + len(tokens) >= self._budget:
            return StopReason.MAX_TOKENS
        self._append(Segment("observation", tokens, self._turn))
        return None

    def _forced_call(self) -> tuple[int, ...]:
        """Return the tokens of a random tool's call up to its arguments, or none."""
        rng = random.Random(seed_for(self.seed, "epsilon", self._turn))
        if not self._tools or rng.random() >= self.sampling.epsilon:
            return ()
        name = rng.choice(sorted(tool.name for tool in self._tools))
        first, second = (self._call_tokens(name, text) for text in ("{}", '{"a": 1}'))
        return first[: common_prefix(first, second)]

    def _call_tokens(self, name: str, arguments: str) -> tuple[int, ...]:
        call = MessageToolCall(id="forced", type="function", function={"name": name, "arguments": arguments})
        message = Message(role="assistant", content="", tool_calls=[call])
        return self.renderer.action(self._history, message, self._tools)

    async def _sample(self, params: SamplingParams) -> Completion:
        completion = await super()._sample(params)
        if self.first_turns is None or self.key is None or self._turn > len(self.sampling.prefix):
            return completion
        size, tries = self.sampling.diverse_tokens, self.sampling.tries
        siblings = await self.first_turns.before(self.key)
        taken = {tokens for tokens, _ in siblings}
        for number in range(tries):
            if completion.tokens[:size] not in taken:
                break
            seed = seed_for(params.seed, "diverse", number)
            completion = await super()._sample(replace(params, seed=seed))
        first = (completion.tokens[:size], completion.logprobs[:size])
        self.first_turns.add(self.key, first)
        if not siblings:
            return completion
        behavior = rejection_logprobs(first, siblings, tries)
        return replace(completion, logprobs=(*behavior, *completion.logprobs[size:]))
