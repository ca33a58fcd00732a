"""The recorded replies of a session: turns, found by the messages of a later request; text prompts; rewards.

Messages are equal if their roles, texts without outer blanks, and calls as JSON values are; texts of the assistant that
are JSON objects or arrays are compared as values too. A client may also leave out the text before calls, send the
arguments of a call as text, and write on behind a reply that did not end its turn, for example after a stop string.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

from ludus.chat.render import Renderer, Tokenizer, decode_exactly
from ludus.tools.base import Tool
from ludus.types import JSON, Message, Segment

Prompt = str | tuple[int, ...]
Place = tuple[int, int]
"""A row of a rollout, and the number of its segments up to a reply."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A committed reply: its row, and the number of the row's segments up to it.

    `unended` is the sampled text if the policy did not end its turn, else empty.
    """

    row: int
    end: int
    reply: Message
    unended: str = ""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The turn that is the last reply of a dialogue, the text that the client added to it, the messages after it."""

    turn: RecordedTurn
    added: str
    tail: Sequence[Message]


@dataclass
class RecordedTurns:
    """Turns by digests of their dialogues, with the reply and up to it."""

    _exact: dict[bytes, list[RecordedTurn]] = field(default_factory=dict)
    _before: dict[bytes, list[RecordedTurn]] = field(default_factory=dict)

    def add(self, messages: Sequence[Message], tools: Sequence[Tool], agent: str, turn: RecordedTurn) -> None:
        """Record the reply to a dialogue."""
        _, before, exact = _replies([*messages, turn.reply], tools, agent)[-1]
        self._exact.setdefault(exact, []).append(turn)
        calls = turn.reply.get("tool_calls", [])
        others: list[Message] = []
        if len(calls) == 1:
            others.append(Message(role="assistant", content=calls[0]["function"]["arguments"]))
        if calls and turn.reply["content"].strip():
            others.append(Message(role="assistant", content="", tool_calls=calls))
        for other in others:  # as some SDKs write the reply
            *_, digest = _replies([*messages, other], tools, agent)[-1]
            self._exact.setdefault(digest, []).append(turn)
        if turn.unended.strip():
            self._before.setdefault(before, []).append(turn)

    def find(self, messages: Sequence[Message], tools: Sequence[Tool], agent: str) -> Continuation | None:
        """Return the last recorded turn of a dialogue, None if there is none.

        Assistant messages after it, which clients write in place of the policy, are messages like others.
        """
        for place, before, exact in reversed(_replies(messages, tools, agent)):
            given, tail = messages[place], messages[place + 1 :]
            if turns := self._exact.get(exact):
                return Continuation(_best(turns, given), "", tail)
            text = "" if given.get("tool_calls") else given.get("content", "").strip()
            begun = [one for one in self._before.get(before, ()) if text.startswith(one.unended.strip())]
            if begun:
                turn = max(begun, key=lambda one: len(one.unended.strip()))
                return Continuation(turn, text[len(turn.unended.strip()) :], tail)
        return None


def _replies(messages: Sequence[Message], tools: Sequence[Tool], agent: str) -> list[tuple[int, bytes, bytes]]:
    """Return the place of each assistant message, and the digests of the agent's dialogue without it and with it."""
    schemas = [tool.schema for tool in tools]
    digest = hashlib.blake2b(json.dumps([agent, schemas], sort_keys=True).encode(), digest_size=16)
    found: list[tuple[int, bytes, bytes]] = []
    for place, message in enumerate(messages):
        before = digest.digest()
        digest.update(canonical(message))
        if message["role"] == "assistant":
            found.append((place, before, digest.digest()))
    return found


def canonical(message: Message) -> bytes:
    """Return what agents send back unchanged: role, stripped text, JSON as values, and images."""
    text = message.get("content", "").strip()
    is_json = message["role"] == "assistant" and text[:1] in ("{", "[")
    calls = [
        (one["function"]["name"], json_value(one["function"]["arguments"])) for one in message.get("tool_calls", [])
    ]
    parts = (message["role"], json_value(text) if is_json else text, calls, *message.get("images", ()))
    return json.dumps(parts, sort_keys=True).encode() + b"\n"


def json_value(text: str) -> object:
    """Return the value of a JSON text, with floats that are integers as integers; the stripped text if it is none."""
    try:
        return _whole_numbers(json.loads(text))
    except (ValueError, RecursionError):
        return text.strip()


def _whole_numbers(value: JSON) -> JSON:
    """Return the value with floats that are integers as integers, since clients write 1.0 as 1.

    Integers are rounded to floats, as clients in JavaScript do.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**1023:
        value = float(value)
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    return {name: _whole_numbers(item) for name, item in value.items()} if isinstance(value, dict) else value


def _best(turns: Sequence[RecordedTurn], given: Message) -> RecordedTurn:
    """Return the turn whose reply agrees best with a message of the history: ids of calls, then thinking, then age."""

    def agreement(turn: RecordedTurn) -> tuple[bool, bool]:
        ids = [[call["id"] for call in one.get("tool_calls", [])] for one in (turn.reply, given)]
        return ids[0] == ids[1], turn.reply.get("reasoning_content") == given.get("reasoning_content")

    return max(reversed(turns), key=agreement)


@dataclass
class RecordedTexts:
    """The recorded tokens of each prompt that no template renders, with its reply."""

    _tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def read(self, prompt: Prompt, tokenizer: Tokenizer) -> tuple[str, tuple[int, ...]]:
        """Return a prompt as text and tokens; those of the longest recorded text that it begins with are recorded."""
        if not isinstance(prompt, str):
            return decode_exactly(tokenizer, prompt), prompt
        known = max((text for text in self._tokens if prompt.startswith(text)), key=len, default="")
        rest = tokenizer.encode(prompt[len(known) :], add_special_tokens=not known)
        return prompt, (*self._tokens.get(known, ()), *rest)

    def add(self, prompt: str, segments: Sequence[Segment], renderer: Renderer) -> None:
        """Record a prompt and its reply, the last segment, with and without the end-of-turn token."""
        tokens, sampled = tokens_of(segments), segments[-1].tokens
        for num in {0, int(not {*sampled[-1:]}.isdisjoint(renderer.stop_token_ids))}:
            reply = decode_exactly(renderer.tokenizer, sampled[: len(sampled) - num])
            self._tokens[prompt + reply] = tokens[: len(tokens) - num]


def tokens_of(segments: Sequence[Segment]) -> tuple[int, ...]:
    """Return the tokens of segments."""
    return tuple(token for segment in segments for token in segment.tokens)


def common_segments(segments: Sequence[Segment], tokens: tuple[int, ...]) -> Sequence[Segment]:
    """Return the first segments, as many as the tokens begin with."""
    start = 0
    for number, segment in enumerate(segments):
        end = start + len(segment.tokens)
        if tokens[start:end] != segment.tokens:
            return segments[:number]
        start = end
    return segments


@dataclass(eq=False)
class RewardedReplies:
    """The replies of a rollout, which an agent may reward."""

    rewards_by_place: dict[Place, float] = field(init=False, default_factory=dict)
    _places: dict[str, Sequence[Place]] = field(init=False, default_factory=dict)
    _messages: list[tuple[Message, Place]] = field(init=False, default_factory=list)

    def add_response(self, name: str, places: Sequence[Place]) -> None:
        """Record the choices of a response, whose id ends with `name`."""
        self._places[name] = places

    def add_message(self, message: Message, place: Place) -> None:
        """Record a message, which the agent passes to `reward_reply` as it is."""
        self._messages.append((message, place))

    def reward_reply(self, reply: Message | str, reward: float, index: int | None = None) -> None:
        """Set the reward of a message of `chat`, or of a response by its id: its choice `index`, if it has several.

        The last call for a reply counts. Raises LookupError if the rollout has no such reply, and ValueError.
        """
        if isinstance(reply, str):
            places = self._places.get(reply.replace("_", "-").rpartition("-")[2])
        else:
            places = next(([place] for message, place in self._messages if message is reply), None)
        if places is None:
            raise LookupError(f"The rollout has no reply {str(reply)[:80]!r}.")
        if index is None and len(places) > 1:
            raise ValueError(f"The reply has {len(places)} choices; set index.")
        if not 0 <= (index or 0) < len(places):
            raise LookupError(f"The reply {str(reply)[:80]!r} has no choice {index}.")
        if not isfinite(reward):
            raise ValueError(f"The reward {reward} is not a finite number.")
        self.rewards_by_place[places[index or 0]] = float(reward)
