"""Recorded turns, found by the messages of a later request.

Messages are equal if their roles, texts without outer blanks, and calls as JSON values are. A client may also write on
behind a reply that did not end its turn, for example after a stop string.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from ludus.tools.base import Tool
from ludus.types import JSON, Message


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
        before, exact = _digests([*messages, turn.reply], tools, agent)
        self._exact.setdefault(exact, []).append(turn)
        if turn.unended.strip():
            self._before.setdefault(before, []).append(turn)

    def find(self, messages: Sequence[Message], tools: Sequence[Tool], agent: str) -> Continuation | None:
        """Return the recorded turn of the last assistant message, None if there is none."""
        length = max((i for i, one in enumerate(messages, start=1) if one["role"] == "assistant"), default=0)
        if not length:
            return None
        given, tail = messages[length - 1], messages[length:]
        before, exact = _digests(messages[:length], tools, agent)
        if turns := self._exact.get(exact):
            return Continuation(_best(turns, given), "", tail)
        text = "" if given.get("tool_calls") else given.get("content", "").strip()
        begun = [one for one in self._before.get(before, ()) if text.startswith(one.unended.strip())]
        if not begun:
            return None
        turn = max(begun, key=lambda one: len(one.unended.strip()))
        return Continuation(turn, text[len(turn.unended.strip()) :], tail)


def _digests(messages: Sequence[Message], tools: Sequence[Tool], agent: str) -> tuple[bytes, bytes]:
    """Return the digests of an agent's dialogue without its last message and with it."""
    schemas = [tool.schema for tool in tools]
    digest = hashlib.blake2b(json.dumps([agent, schemas], sort_keys=True).encode(), digest_size=16)
    for message in messages[:-1]:
        digest.update(canonical(message))
    before = digest.digest()
    digest.update(canonical(messages[-1]))
    return before, digest.digest()


def canonical(message: Message) -> bytes:
    """Return the parts of a message that agents send back unchanged: role, stripped text, and calls as JSON values."""
    calls = [
        (one["function"]["name"], json_value(one["function"]["arguments"])) for one in message.get("tool_calls", [])
    ]
    parts = (message["role"], message.get("content", "").strip(), calls)
    return json.dumps(parts, sort_keys=True).encode() + b"\n"


def json_value(text: str) -> object:
    """Return the value of a JSON text, with floats that are integers as integers; the stripped text if it is none."""
    try:
        return _whole_numbers(json.loads(text))
    except (ValueError, RecursionError):
        return text.strip()


def _whole_numbers(value: JSON) -> JSON:
    """Return the value with floats that are integers as integers, since clients write 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    return {name: _whole_numbers(item) for name, item in value.items()} if isinstance(value, dict) else value


def _best(turns: Sequence[RecordedTurn], given: Message) -> RecordedTurn:
    """Return the turn whose reply agrees best with a message of the history: ids of calls, then thinking, then age."""

    def agreement(turn: RecordedTurn) -> tuple[bool, bool]:
        ids = [[call["id"] for call in one.get("tool_calls", [])] for one in (turn.reply, given)]
        return ids[0] == ids[1], turn.reply.get("reasoning_content") == given.get("reasoning_content")

    return max(reversed(turns), key=agreement)
