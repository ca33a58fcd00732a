"""Anthropic's Messages: content blocks, a separate system prompt, and typed events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from ludus.chat.parse_json import tool_call
from ludus.gateway.dialects.base import (
    Dialect,
    Event,
    Histories,
    Sent,
    SessionRequest,
    reply_calls,
    schema_guide,
    session_tool,
    unsent,
)
from ludus.gateway.protocol.bodies import BadRequest, JsonBody, read_body
from ludus.rollouts.agent_session import PendingTurn, ReplyLimits
from ludus.types import Message

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_NO_THREADS = "thread_unsupported_request"


class _Block(BaseModel):
    """Any content block; the fields depend on its type."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, JsonValue] = {}
    tool_use_id: str = ""
    content: str | list[_Block] | None = None


Content = str | Annotated[list[_Block], Field(fail_fast=True)]


class _Said(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: Content


class _Tool(BaseModel):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None


class _Choice(BaseModel):
    type: Literal["auto", "none", "any", "tool"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class _Format(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    type: Literal["json_schema"]
    schema_: dict[str, JsonValue] = Field(alias="schema")


class _OutputConfig(BaseModel):
    format: _Format | None = None


class MessagesRequest(BaseModel):
    """Body of `/v1/messages`; other fields are labels. `output_format` is an older name of `output_config.format`."""

    model_config = ConfigDict(hide_input_in_errors=True)

    messages: Annotated[list[_Said], Field(fail_fast=True, min_length=1)]
    model: str = "policy"
    max_tokens: int | None = Field(None, ge=1)
    system: Content = ""
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None
    thread: JsonValue = None


def parse(raw: bytes, _: Histories) -> SessionRequest:
    """Return the request of a body. Raises BadRequest, also for a last message of the assistant, which is prefill."""
    request = read(raw)
    if request.messages and request.messages[-1]["role"] == "assistant":
        raise BadRequest("messages: the beginning of the reply (a last message of the assistant) is not supported.")
    return request


def read(raw: bytes) -> SessionRequest:
    """Return the request of a body, without tools that a server would run (no schema). Raises BadRequest."""
    body = read_body(MessagesRequest, raw)
    if body.thread is not None:  # the messages are not the whole dialogue; SDKs send it again without a thread
        raise BadRequest("thread is not supported; send all messages.", code=_NO_THREADS)
    system = _text(body.system)
    messages = [Message(role="system", content=system)] if system else []
    for said in body.messages:
        messages += _messages(said)
    form = (body.output_config.format if body.output_config is not None else None) or body.output_format
    guide = schema_guide(form.schema_ if form is not None else None)
    choice = body.tool_choice or _Choice(type="auto")
    tools = [tool for tool in body.tools or [] if tool.input_schema is not None] if choice.type != "none" else []
    must_call, single = choice.type in ("any", "tool"), choice.disable_parallel_tool_use
    stop = tuple(body.stop_sequences or ())
    limits = ReplyLimits(body.max_tokens, stop, guide, must_call, (choice.name,) if choice.name else (), single)
    return SessionRequest(
        messages,
        [session_tool(tool.name, tool.description, tool.input_schema) for tool in tools],
        limits,
        1,
        bool(body.stream),
        body.model,
    )


def _messages(said: _Said) -> Iterator[Message]:
    """Yield the messages of a turn; results of tools precede the text of the same turn."""
    if isinstance(said.content, str):
        yield Message(role=said.role, content=said.content)
        return
    blocks = said.content
    if said.role == "assistant":
        message = Message(role="assistant", content=_text([one for one in blocks if one.type == "text"]))
        if thought := "".join(one.thinking for one in blocks if one.type == "thinking"):
            message["reasoning_content"] = thought
        calls = [tool_call(one.id, one.name, json.dumps(one.input)) for one in blocks if one.type == "tool_use"]
        if calls:
            message["tool_calls"] = calls
        yield message
        return
    for one in blocks:
        if one.type == "tool_result":
            yield Message(role="tool", content=_text(one.content or ""), tool_call_id=one.tool_use_id)
    texts = [one for one in blocks if one.type != "tool_result"]
    if texts:
        yield Message(role=said.role, content=_text(texts))


def _text(content: str | Sequence[_Block]) -> str:
    if isinstance(content, str):
        return content
    if other := [one.type for one in content if one.type != "text"]:
        raise BadRequest(f"Content of the type {other[0][:80]!r} is not supported.")
    return "".join(one.text for one in content)


def reply(request: SessionRequest, name: str, turns: Sequence[PendingTurn]) -> JsonBody:
    """Return a message."""
    (turn,) = turns
    usage = len(turn.prompt), len(turn.tokens)
    return _message(request, name, _stop(turn), usage) | {"content": _blocks(turn)}


def begin(request: SessionRequest, name: str, num_prompt: int) -> list[Event]:
    """Return the events before the text of a message."""
    return [_start(request, name, num_prompt), _block_event("start", 0, content_block={"type": "text", "text": ""})]


def delta(request: SessionRequest, name: str, text: str, _: int) -> Event:
    """Return an event with text."""
    return _block_event("delta", 0, delta={"type": "text_delta", "text": text})


def events(request: SessionRequest, name: str, turns: Sequence[PendingTurn], sent: Sent) -> Iterator[Event]:
    """Yield the typed events of a message after the text that was sent."""
    (turn,) = turns
    blocks = _blocks(turn, has_text=bool(sent.text))
    if sent.text:  # the text is the first block
        blocks.sort(key=lambda block: block["type"] != "text")
        if rest := unsent(turn.action.message["content"], sent.text):
            yield delta(request, name, rest, sent.num)
        yield _block_event("stop", 0)
    else:
        yield _start(request, name, len(turn.prompt))
    for index, block in list(enumerate(blocks))[1 if sent.text else 0 :]:
        empty, part = _delta(block)
        yield _block_event("start", index, content_block=empty)
        yield _block_event("delta", index, delta=part)
        yield _block_event("stop", index)
    reason, stop = _stop(turn)
    end: JsonBody = {"delta": {"stop_reason": reason, "stop_sequence": stop}}
    usage = {"input_tokens": len(turn.prompt), "output_tokens": len(turn.tokens)}
    yield "message_delta", {"type": "message_delta", **end, "usage": usage}
    yield "message_stop", {"type": "message_stop"}


def _start(request: SessionRequest, name: str, num_prompt: int) -> Event:
    begun = _message(request, name, (None, None), (num_prompt, 0)) | {"content": []}
    return "message_start", {"type": "message_start", "message": begun}


def _block_event(kind: str, index: int, **fields: JsonBody) -> Event:
    return f"content_block_{kind}", {"type": f"content_block_{kind}", "index": index, **fields}


def _delta(block: JsonBody) -> tuple[JsonBody, JsonBody]:
    """Return a block without its content, and the delta that adds it."""
    if block["type"] == "tool_use":
        return block | {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    part = str(block["type"])
    return block | {part: ""}, {"type": f"{part}_delta", part: block[part]}


def _blocks(turn: PendingTurn, *, has_text: bool = False) -> list[JsonBody]:
    said, calls = turn.action.message, reply_calls(turn)
    blocks: list[JsonBody] = []
    if thought := said.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if said["content"] or has_text or not calls:
        blocks.append({"type": "text", "text": said["content"]})
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return blocks


def _stop(turn: PendingTurn) -> tuple[str, str | None]:
    reason = "stop_sequence" if turn.stopped_by else "tool_use" if turn.action.calls else "end_turn"
    return "max_tokens" if turn.action.finish_reason == "length" else reason, turn.stopped_by or None


def _message(
    request: SessionRequest, name: str, stop: tuple[str | None, str | None], usage: tuple[int, int]
) -> JsonBody:
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "stop_reason": stop[0],
        "stop_sequence": stop[1],
        "usage": {"input_tokens": usage[0], "output_tokens": usage[1]},
    }


def _error(status: int, message: str, code: str | None) -> JsonBody:
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"details": {"error_code": code, "unsupported": ["thread"]}} if code == _NO_THREADS else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


MESSAGES = Dialect(parse, reply, events, begin, delta, _error)
"""Anthropic's Messages."""
