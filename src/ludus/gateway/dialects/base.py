"""Base of all dialects: the request of a session, the functions of a dialect, and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, Field, JsonValue

from ludus.engines.base import common_prefix
from ludus.gateway.protocol.bodies import (
    NO_PARAMETERS,
    BadRequest,
    JsonBody,
    Sampling,
    error_body,
    function_tool,
    json_bytes,
    neutral_values,
)
from ludus.rollouts.agent_session import PendingTurn, ReplyLimits
from ludus.tools.base import DescribedTool
from ludus.types import Action, Guide, Message, MessageToolCall

Event = tuple[str, JsonBody]
"""Name (empty: none) and data of a server-sent event."""
Histories = Mapping[str, Sequence[Message]]
"""The dialogues of a session by the id of their last response."""


@dataclass(frozen=True)
class SessionRequest:
    """A request in any dialect. `echo` holds the fields that the reply repeats."""

    messages: Sequence[Message]
    tools: Sequence[DescribedTool] = ()
    limits: ReplyLimits = field(default_factory=ReplyLimits)
    num: int = 1
    stream: bool = False
    model: str = "policy"
    echo: Mapping[str, object] = field(default_factory=dict)


class SessionSampling(Sampling):
    """Fields of OpenAI's requests of a session: other fields than the refused ones are labels."""

    temperature: float | None = None
    top_p: float | None = None
    n: int = Field(1, ge=1, le=16)

    def check_extra_fields(self) -> None:
        refuse_fields(self, neutral_values("sessions"))

    def refuse_set(self, *names: str) -> None:
        """Raise BadRequest for a field that is neither null nor its default."""
        for name, value in self.model_dump(include={*names}).items():
            if value is not None and value != type(self).model_fields[name].default:
                raise BadRequest(f"{name} is not supported.")


@dataclass(frozen=True)
class Sent:
    """The part of a reply that a stream has sent: the text, and the number of events."""

    text: str = ""
    num: int = 0


@dataclass(frozen=True)
class Dialect:
    """An endpoint: `parse` reads a body, `reply` and `events` are the whole and the streamed reply.

    A text that grows is streamed by `begin`, with the number of tokens of the prompt, a `delta` for each part, with its
    number, and the `events` after what was sent. `end` is the last line of a stream. `error` is the body of an error
    with a status, a message and a code.
    """

    parse: Callable[[bytes, Histories], SessionRequest]
    reply: Callable[[SessionRequest, str, Sequence[PendingTurn]], JsonBody]
    events: Callable[[SessionRequest, str, Sequence[PendingTurn], Sent], Iterator[Event]]
    begin: Callable[[SessionRequest, str, int], list[Event]]
    delta: Callable[[SessionRequest, str, str, int], Event]
    error: Callable[[int, str, str | None], JsonBody] = error_body
    end: bytes = b""

    def content(self, parsed: SessionRequest, name: str, turns: Sequence[PendingTurn]) -> tuple[bytes, str]:
        """Return the reply, or all events of a stream, and the media type."""
        if not parsed.stream:
            return json_bytes(self.reply(parsed, name, turns)), "application/json"
        events = b"".join(event_bytes(*event) for event in self.events(parsed, name, turns, Sent()))
        return events + self.end, "text/event-stream"


def event_bytes(name: str, data: JsonBody) -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def session_tool(name: str, description: str | None, parameters: Mapping[str, JsonValue] | None) -> DescribedTool:
    """Return a tool of a session's request; missing keys of its parameters are those of a tool without parameters."""
    return function_tool(name, description, {**NO_PARAMETERS, **(parameters or {})})


def schema_guide(schema: object) -> Guide | None:
    """Return the guide of a JSON schema; None without one."""
    return None if schema is None else Guide("json_schema", json.dumps(schema))


def refuse_fields(body: BaseModel, unsupported: Mapping[str, Sequence[object]]) -> None:
    """Raise BadRequest for a field that changes the reply and cannot be served, unless it has a neutral value."""
    for name, value in (body.model_extra or {}).items():
        if name in unsupported and value is not None and value not in unsupported[name]:
            raise BadRequest(f"{name} = {json.dumps(value)[:80]} is not supported.")


def unsent(content: str, sent: str) -> str:
    """Return the content after the part that was sent."""
    parts = (text[common_prefix(text, sent) :] for text in (content, content.lstrip()))
    return min(parts, key=len)


def chat_finish(action: Action) -> str:
    """Return the finish reason of a reply in chat completions."""
    return "tool_calls" if action.calls and action.finish_reason == "stop" else action.finish_reason


def reply_calls(turn: PendingTurn) -> list[MessageToolCall]:
    """Return the calls of a reply."""
    return list(turn.action.message.get("tool_calls", []))
