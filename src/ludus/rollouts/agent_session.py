"""Rollouts of agents that own their loop: each request is sampled as the exact continuation of recorded turns.

Requests are matched by their messages, and rows grow by their tokens: sampled text is never tokenized again. A request
that extends the history of a recorded turn continues its row, or forks from it if the row has gone on; any other one
(rewritten messages, other tools, a sub-agent with its own system message) starts a row. All rows belong to one rollout.
A prompt that no template renders, text or tokens, continues the row with which it shares the most segments.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from ludus.chat.render import Renderer, decode_exactly
from ludus.config.sections.rollout import RolloutConfig
from ludus.engines.base import TOKEN_WATCHERS, seed_for
from ludus.envs.tool_env import describe_error
from ludus.errors import EngineError, LudusError, RequestRejected, UserError
from ludus.rollouts.dialogues.history import (
    Place,
    Prompt,
    RecordedTexts,
    RecordedTurn,
    RecordedTurns,
    RewardedReplies,
    canonical,
    common_segments,
    json_value,
    tokens_of,
)
from ludus.rollouts.episode import EPISODE_TIMEOUT, ChatSession, EngineChatSession, is_being_cancelled
from ludus.rollouts.trees import join_rows
from ludus.sandbox.local.namespaces import PausableTimeout
from ludus.tools.notes import Notes
from ludus.types import POLICY, Action, Guide, Message, SamplingParams, Segment, StopReason

if TYPE_CHECKING:
    from ludus.envs.base import AgentClient
    from ludus.tools.base import Tool

log = logging.getLogger(__name__)

_STOP_S = 10.0  # time that a cancelled agent has to end
MAX_REQUESTS = 10
"""Maximum number of requests, failed and cancelled ones included, as a multiple of `max_turns`."""
_OWN_ID = re.compile(r"call_\d+_\d+")  # ids that parsers assign


# templates and tokenizers raise anything
_UNRENDERABLE = (UserError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)


class RolloutEnded(RuntimeError):
    """Raised for a request after the end of the rollout, for example at a limit of turns or tokens."""

    def __init__(self, reason: StopReason) -> None:
        cause = " (rollout.max_seq_len, or the context of the model)" if reason is StopReason.PROMPT_TOO_LONG else ""
        super().__init__(f"the rollout has ended: {reason}{cause}")
        self.reason = reason


class InvalidRequest(ValueError):
    """Raised if a request cannot be sampled as it is."""


@dataclass(eq=False)
class _Row:
    """A chain of turns. It shares its first `shared` segments with row `of`; `end` counts the committed segments."""

    chat: ChatSession
    agent: str
    of: int = 0
    shared: int = 0
    end: int = 0
    params: SamplingParams | None = None
    """Those of the trainer, without the limits of the request that is being sampled."""
    is_open: bool = True
    """Whether the next request may extend it: no request is being sampled, and the last one was committed."""

    def segments(self) -> list[Segment]:
        """Return the committed segments, with the name of the agent."""
        return [replace(one, agent=self.agent) for one in self.chat.segments[: self.end]]


@dataclass(frozen=True, slots=True)
class ReplyLimits:
    """Limits that a request may set: the maximum number of tokens, strings that end the reply, and a guide.

    With `must_call` the reply has a call, of the tools `call_of` if there are any; with `single_call` it has at most
    one, if the format marks the end of a call. With `prompt`, the reply follows that text or these tokens, in place of
    messages. `watch` is called with the number of tokens of the prompt and new tokens while the reply is sampled, if
    the engine reports them.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    guide: Guide | None = None
    must_call: bool = False
    call_of: tuple[str, ...] = ()
    single_call: bool = False
    prompt: Prompt | None = None
    watch: Callable[[int, Sequence[int]], None] | None = None


@dataclass(eq=False)
class PendingTurn:
    """A sampled reply that is not yet part of the rollout. `commit` adds it; without, it leaves nothing.

    `prompt` and `tokens` are empty if the policy exposes no tokens. `place` is the row and its number of segments.
    """

    action: Action
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    commit: Callable[[], None]
    place: Place = (0, 0)
    stopped_by: str = ""
    """The stop string of the request that ended the reply."""


@dataclass(eq=False)
class AgentSession(RewardedReplies):
    """The policy of one rollout. `make_chat` returns a dialogue with the engine, all of one seed and name.

    With `serial`, requests are sampled one at a time, for engines that batch the requests of all episodes. `address`
    is the base URL and the API key under which a server accepts requests for the session; empty without one.
    """

    make_chat: Callable[[], ChatSession]
    limits: RolloutConfig
    serial: bool = False
    address: tuple[str, str] = ("", "")
    stop: StopReason | None = field(init=False, default=None)
    error: LudusError | None = field(init=False, default=None)
    messages: list[Message] = field(init=False, default_factory=list)
    """The messages of the last committed request, and its reply."""
    reward: float | None = field(init=False, default=None)
    agent_rewards: dict[str, float] = field(init=False, default_factory=dict)
    opponent: AgentSession | None = None
    notes: Notes = field(default_factory=Notes)
    answer: str | None = field(init=False, default=None)
    client: AgentClient | None = field(init=False, default=None)
    ended: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    refused: str = field(init=False, default="")
    """Why the last refused request was refused."""
    timeout: PausableTimeout | None = field(init=False, default=None)
    started: tuple[float, float] = field(init=False, default_factory=lambda: (time.time(), time.perf_counter()))
    seconds: list[float] = field(init=False, default_factory=list)
    """Seconds of each committed reply."""
    _rows: list[_Row] = field(init=False, default_factory=list)
    _turns: RecordedTurns = field(init=False, default_factory=RecordedTurns)
    _texts: RecordedTexts = field(init=False, default_factory=RecordedTexts)
    _num_requests: int = field(init=False, default=0)
    _num_running: int = field(init=False, default=0)
    _acting: set[asyncio.Task[Action | StopReason]] = field(init=False, default_factory=set)
    _lock: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    @property
    def seed(self) -> int:
        """Seed of the rollout; 0 if its policy is an endpoint."""
        chat = self.make_chat()
        return chat.seed if isinstance(chat, EngineChatSession) else 0

    @property
    def renderer(self) -> Renderer | None:
        """The renderer of the policy; None if it exposes no tokens."""
        chat = self.make_chat()
        return chat.renderer if isinstance(chat, EngineChatSession) else None

    def num_tokens(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """Return the number of tokens of a dialogue as a prompt; 0 if the policy exposes no tokens."""
        return 0 if (renderer := self.renderer) is None else len(renderer.prompt(messages, tools))

    async def chat(self, messages: Sequence[Message], tools: Sequence[Tool] = (), agent: str = POLICY) -> Message:
        """Return an agent's next message. Raises RolloutEnded after the end of the rollout."""
        pending = await self.sample(messages, tools, agent=agent)
        pending.commit()
        self.add_message(pending.action.message, pending.place)
        return pending.action.message

    async def sample(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        limits: ReplyLimits = ReplyLimits(),
        agent: str = POLICY,
    ) -> PendingTurn:
        """Sample the reply to a whole dialogue of an agent, whose rows are separate from those of other agents.

        A reply that is cut off at the trainer's limit of tokens ends the rollout, unless the agent is one of several.
        Temperature and filters are the trainer's. Raises RolloutEnded at a limit, InvalidRequest and EngineError.
        """
        if self.client is not None:
            self.client.touch()
        if self.stop is not None:
            raise RolloutEnded(self.stop)
        _check_request(messages, limits, agent)
        too_many = self._num_requests >= MAX_REQUESTS * self.limits.max_turns
        if too_many or self.num_turns + self._num_running >= self.limits.max_turns:
            raise self.end(StopReason.MAX_TURNS)
        self._num_running += 1
        try:
            return await self._sample(messages, tools, limits, agent)
        finally:
            self._num_running -= 1

    async def _sample(
        self, messages: Sequence[Message], tools: Sequence[Tool], limits: ReplyLimits, agent: str
    ) -> PendingTurn:
        self._num_requests += 1
        request = self._num_requests
        async with self._lock if self.serial else nullcontext():
            if self.stop is not None:
                raise RolloutEnded(self.stop)
            try:
                if limits.prompt is None:
                    row, found = self._row_for(messages, tools, agent)
                else:
                    messages, row, found = self._row_of(limits.prompt)
            except _UNRENDERABLE as error:
                raise _not_renderable(error) from error
            self._rows[row].is_open = False
            number = len(self._rows[row].chat.segments)
            if found is not None:
                raise self.end(found)
            with self._limited(self._rows[row], limits, tools):
                begin = time.perf_counter()
                action = await self._act(self._rows[row].chat)
                seconds = time.perf_counter() - begin
        chat = self._rows[row].chat
        if isinstance(action, StopReason):
            if len(chat.segments) > number:
                self._rows[row].end = len(chat.segments)
            raise self.end(action)

        is_text = limits.prompt is not None or (action.calls and not tools)  # no calls were offered
        if is_text and isinstance(chat, EngineChatSession):
            text = decode_exactly(chat.renderer.tokenizer, chat.segments[-1].tokens, skip_special=True)
            action = Action(Message(role="assistant", content=text), finish_reason=action.finish_reason)
        action, stopped_by = cut_at_stop(action, limits.stop)
        action = _with_ids(action, f"{self._salt}{request}")
        before, tokens = tokens_of(chat.segments[:number]), tokens_of(chat.segments[number:])

        def commit() -> None:
            self._commit(row, messages, tools if limits.prompt is None else None, action)
            self.seconds.append(seconds)
            if agent == POLICY and action.finish_reason == "length" and len(tokens) != limits.max_tokens:
                self.end(StopReason.TRUNCATED)

        return PendingTurn(action, before, tokens, commit, (row, len(chat.segments)), stopped_by)

    def end(self, reason: StopReason) -> RolloutEnded:
        """End the rollout, unless it has ended, and return the error for its client."""
        self.stop = self.stop or reason
        self.ended.set()
        return RolloutEnded(self.stop)

    def close(self) -> None:
        """Release all rows in the engine; later requests raise RolloutEnded."""
        self.end(StopReason.ANSWERED)
        for one in self._acting:
            one.cancel()
        for row in self._rows:
            row.chat.close()

    @property
    def num_turns(self) -> int:
        """Number of committed replies."""
        return len(self.seconds)

    def segments(self) -> tuple[Segment, ...]:
        """Return the committed rows as a forest. Turns are numbered in the order of the segments."""
        return tuple(_numbered(self._forest()[0]))

    def turn_rewards(self) -> tuple[float, ...]:
        """Return the reported reward of each action of `segments`, 0 if missing; empty if none was reported."""
        segments, rows = self._forest()
        given = [*self.rewards_by_place.items()]  # the server adds to them on another thread
        values = {rows[row][end - 1]: value for (row, end), value in given if row in rows}
        return tuple(values.get(i, 0.0) for i, one in enumerate(segments) if one.kind == "action") if values else ()

    def _forest(self) -> tuple[list[Segment], dict[int, list[int]]]:
        """Return the segments of all committed rows, and the indices of each row's segments, by number of the row."""
        kept = [number for number, row in enumerate(self._rows) if row.end > row.shared]
        places = {number: place for place, number in enumerate(kept)}
        rows = [self._rows[number] for number in kept]
        chains = [(row.segments(), places.get(row.of, 0), row.shared) for row in rows]
        segments, indices = join_rows(chains)
        return segments, dict(zip(kept, indices, strict=True))

    @cached_property
    def _salt(self) -> str:
        """Text that makes the ids of tool calls unique over all rollouts, equal for all attempts (`NAME/ATTEMPT`)."""
        first = self._rows[0].chat
        name = first.episode if isinstance(first, EngineChatSession) else str(id(self))
        name = name.rpartition("/")[0] or name
        return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()

    async def _act(self, chat: ChatSession) -> Action | StopReason:
        token = EPISODE_TIMEOUT.set(self.timeout)
        try:
            acting = asyncio.create_task(chat.act())
            self._acting.add(acting)
            acting.add_done_callback(self._acting.discard)
            return await acting
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            if self.stop is not None:
                raise RolloutEnded(self.stop) from None
            self.error = EngineError("The policy's turn was cancelled from inside the engine.")
            self.end(StopReason.FAILED)
            raise self.error from error
        except RequestRejected as error:  # by the client's guide
            raise InvalidRequest(error.message) from error
        except LudusError as error:
            self.error = error
            self.end(StopReason.FAILED)
            raise
        finally:
            EPISODE_TIMEOUT.reset(token)

    @contextmanager
    def _limited(self, row: _Row, limits: ReplyLimits, tools: Sequence[Tool]) -> Iterator[None]:
        """Apply the limits of a request to the next action of a dialogue."""
        chat = row.chat
        if not isinstance(chat, EngineChatSession):
            yield
            return
        before, guide = chat.params, limits.guide
        row.params = before
        if limits.must_call:
            callable_tools = [tool for tool in tools if not limits.call_of or tool.name in limits.call_of]
            if not callable_tools:
                raise InvalidRequest("tool_choice requires a call, but the request has no such tool.")
            try:
                guide = chat.renderer.guide(callable_tools, required=True, single=limits.single_call)
            except UserError as error:
                raise InvalidRequest(error.message) from error
        most = min(limits.max_tokens or before.max_new_tokens, before.max_new_tokens)
        ends = (*limits.stop, chat.renderer.call_end if limits.single_call and tools else "")
        chat.params = replace(before, max_new_tokens=most, stop=tuple(filter(None, ends)), guide=guide or before.guide)
        if limits.watch is not None:
            TOKEN_WATCHERS[chat.episode] = partial(limits.watch, len(tokens_of(chat.segments)))
        try:
            yield
        finally:
            chat.params = before
            TOKEN_WATCHERS.pop(chat.episode, None)

    def _row_for(self, messages: Sequence[Message], tools: Sequence[Tool], agent: str) -> tuple[int, StopReason | None]:
        """Return the number of the row whose next action replies to the messages; also the limit that they exceed."""
        found = self._turns.find(messages, tools, agent)
        number = None if found is None else self._continuation(found.turn.row, found.turn.end)
        if found is not None and number is not None:
            chat = self._rows[number].chat
            if isinstance(chat, EngineChatSession):
                return number, chat.observe([*map(_renderable, found.tail)], found.added)
            return number, chat.observe(found.tail)
        chat = self._new_chat(agent)
        _log_new_row(len(self._rows), self.messages, messages)
        self._rows.append(_Row(chat, agent))
        return len(self._rows) - 1, chat.open([*map(_renderable, messages)], tools)

    def _row_of(self, prompt: Prompt) -> tuple[Sequence[Message], int, StopReason | None]:
        """Return a prompt as a message, and what `_row_for` returns for messages."""
        chat = self._new_chat()
        if not isinstance(chat, EngineChatSession):
            raise InvalidRequest("The policy exposes no tokens; use chat completions.")
        if isinstance(prompt, str) and chat.cannot_fit([prompt]):
            raise self.end(StopReason.PROMPT_TOO_LONG)
        text, tokens = self._texts.read(prompt, chat.renderer.tokenizer)
        if not tokens:
            raise InvalidRequest("The prompt has no tokens.")
        shared, number, end = _longest_start(self._rows, tokens)
        kept = self._continuation(number, end) if shared else None
        if kept is None:
            self._rows.append(_Row(chat, POLICY))
            kept = len(self._rows) - 1
        chat = self._rows[kept].chat
        assert isinstance(chat, EngineChatSession)
        return [Message(role="user", content=text)], kept, chat.extend(tokens[shared:])

    def _continuation(self, number: int, end: int) -> int | None:
        """Return a row if it has `end` segments, else a fork after them; None if its dialogue cannot fork."""
        row = self._rows[number]
        if row.is_open and row.end == end:
            return number
        if not isinstance(row.chat, EngineChatSession):
            return None
        name, seed = self._identity(row.chat)
        fork = row.chat.fork(name, seed, end)
        fork.params = row.params or fork.params  # not the limits of a request that the row is sampling
        self._rows.append(_Row(fork, row.agent, number, end, end))
        return len(self._rows) - 1

    def _new_chat(self, agent: str = POLICY) -> ChatSession:
        chat = self.make_chat()
        if not isinstance(chat, EngineChatSession):
            return chat
        name, seed = self._identity(chat) if self._rows else (chat.episode, chat.seed)
        return replace(chat, episode=name, seed=seed, agent=agent)

    def _identity(self, chat: EngineChatSession) -> tuple[str, int]:
        """Return name and seed of a new row."""
        number = len(self._rows)
        first = self._rows[0].chat
        assert isinstance(first, EngineChatSession)
        return first.episode if self.serial else f"{first.episode}~{number}", seed_for(first.seed, "row", number)

    def _commit(self, row: int, messages: Sequence[Message], tools: Sequence[Tool] | None, action: Action) -> None:
        """Add a reply to the rollout. Without `tools` (None), it is the text after the only message."""
        one = self._rows[row]
        one.end, one.is_open = len(one.chat.segments), True
        self.messages = [*messages, action.message]
        if tools is None:
            assert isinstance(one.chat, EngineChatSession)
            self._texts.add(messages[0]["content"], one.chat.segments, one.chat.renderer)
            return
        turn = RecordedTurn(row, one.end, action.message, _unended_text(one.chat))
        self._turns.add(messages, tools, one.agent, turn)


def _check_request(messages: Sequence[Message], limits: ReplyLimits, agent: str) -> None:
    if limits.prompt is None and not messages:
        raise InvalidRequest("The request has no messages.")
    if not agent:
        raise InvalidRequest("The name of an agent must not be empty.")


def _not_renderable(error: Exception) -> InvalidRequest:
    why = error.message if isinstance(error, UserError) else describe_error(error)
    return InvalidRequest(f"The messages cannot be rendered: {why}")


def _log_new_row(number: int, last: Sequence[Message], messages: Sequence[Message]) -> None:
    """Log, at the level DEBUG, the first message that differs from the last committed dialogue."""
    if not last or not log.isEnabledFor(logging.DEBUG):
        return
    for place, (before, after) in enumerate(zip(last, messages, strict=False)):
        if canonical(before) != canonical(after):
            texts = (json.dumps(message, ensure_ascii=False)[:500] for message in (before, after))
            log.debug("row %d: message %d differs: %s became %s", number, place, *texts)
            return
    why = "but the tools differ" if len(messages) > len(last) else "and the last reply is not among them"
    log.debug("row %d: the messages are the same as far as they go, %s", number, why)


def _longest_start(rows: Sequence[_Row], tokens: tuple[int, ...]) -> tuple[int, int, int]:
    """Return how many tokens are the first segments of a row, that row, and its number of these segments."""
    found = [(0, False, 0, 0)]
    for number, row in enumerate(rows):
        if row.end <= row.shared:  # nothing of it was committed
            continue
        segments = common_segments(row.chat.segments[: row.end], tokens)
        goes_on = row.is_open and row.end == len(segments)
        found.append((len(tokens_of(segments)), goes_on, number, len(segments)))
    shared, _, number, end = max(found)
    return shared, number, end


def cut_at_stop(action: Action, stop: tuple[str, ...]) -> tuple[Action, str]:
    """Return the action with its text up to the first stop string, as servers return it, and that string."""
    content = action.message["content"]
    ends = [(found, text) for text in stop if text and (found := content.find(text)) >= 0]
    if not ends:
        return action, ""
    message = action.message.copy()
    end, text = min(ends)
    message["content"] = content[:end]
    return replace(action, message=message), text


def _with_ids(action: Action, prefix: str) -> Action:
    """Return the action with the ids `call_PREFIX_0`, ... of its calls, except those that the policy sampled."""
    message = action.message
    old = [*(call.id for call in action.calls), *(error.id for error in action.errors)]
    ids = {name: f"call_{prefix}_{name.rpartition('_')[2]}" if _OWN_ID.fullmatch(name) else name for name in old}
    if calls := message.get("tool_calls"):
        message = message.copy()
        message["tool_calls"] = [{**call, "id": ids.get(call["id"], call["id"])} for call in calls]
    valid = tuple(replace(call, id=ids[call.id]) for call in action.calls)
    return replace(action, message=message, calls=valid, errors=tuple(replace(e, id=ids[e.id]) for e in action.errors))


def _unended_text(chat: ChatSession) -> str:
    """Return the text of the last reply if its end-of-turn token was not sampled, else an empty one."""
    if not isinstance(chat, EngineChatSession) or chat.segments[-1].tokens[-1] in chat.renderer.stop_token_ids:
        return ""
    return decode_exactly(chat.renderer.tokenizer, chat.segments[-1].tokens)


def _numbered(segments: Sequence[Segment]) -> Iterator[Segment]:
    turns: list[int] = []
    num = 0
    for place, segment in enumerate(segments):
        parent = place - 1 if segment.parent is None else segment.parent
        turns.append(num if segment.kind == "action" else turns[parent] if parent >= 0 else 0)
        num += segment.kind == "action"
        yield replace(segment, turn=turns[-1])


def _renderable(message: Message) -> Message:
    """Return the message with calls as text if their arguments are not a JSON object, which templates cannot render."""
    calls = message.get("tool_calls", [])
    odd = [call for call in calls if not isinstance(json_value(call["function"]["arguments"]), dict)]
    if not odd:
        return message
    rendered = message.copy()
    texts = [f"{call['function']['name']}({call['function']['arguments']})" for call in odd]
    rendered["content"] = "\n".join([message["content"], *texts]).strip()
    rendered["tool_calls"] = [call for call in calls if call not in odd]
    return rendered
