"""Anthropic's Messages: content blocks, a separate system prompt, and typed events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from ludus.gateway.dialects.base import (
    Dialect,
    Event,
    Histories,
    SessionRequest,
    function_call,
    function_tool,
    reply_calls,
    schema_guide,
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


class _Block(BaseModel):
    """Any content block; the fields depend on its type."""

    model_config = ConfigDict(extra="ignore")

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
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "user", "assistant"]
    content: Content


class _Tool(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None


class _Choice(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["auto", "none", "any", "tool"]
    name: str = ""


class _Format(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    type: Literal["json_schema"]
    schema_: dict[str, JsonValue] = Field(alias="schema")


class _OutputConfig(BaseModel):
    model_config = ConfigDict(extra="ignore")

    format: _Format | None = None


class MessagesRequest(BaseModel):
    """Body of `/v1/messages`; other fields are labels. `output_format` is an older name of `output_config.format`."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

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


def parse(raw: bytes, _: Histories) -> SessionRequest:
    """Return the request of a body, without tools that a server would run (no schema). Raises BadRequest."""
    body = read_body(MessagesRequest, raw)
    system = _text(body.system)
    messages = [Message(role="system", content=system)] if system else []
    for said in body.messages:
        messages += _messages(said)
    form = (body.output_config.format if body.output_config is not None else None) or body.output_format
    guide = schema_guide(form.schema_ if form is not None else None)
    choice = body.tool_choice or _Choice(type="auto")
    tools = [tool for tool in body.tools or [] if tool.input_schema is not None] if choice.type != "none" else []
    must_call = choice.type in ("any", "tool")
    limits = ReplyLimits(body.max_tokens, tuple(body.stop_sequences or ()), guide, must_call, choice.name)
    return SessionRequest(
        messages,
        [function_tool(tool.name, tool.description, tool.input_schema) for tool in tools],
        limits,
        1,
        bool(body.stream),
        body.model,
    )


def _messages(said: _Said) -> Iterator[Message]:
    """Yield the messages of a turn; results of tools come before the text beside them."""
    if isinstance(said.content, str):
        yield Message(role=said.role, content=said.content)
        return
    blocks = said.content
    if said.role == "assistant":
        message = Message(role="assistant", content=_text([one for one in blocks if one.type == "text"]))
        if thought := "".join(one.thinking for one in blocks if one.type == "thinking"):
            message["reasoning_content"] = thought
        calls = [function_call(one.id, one.name, json.dumps(one.input)) for one in blocks if one.type == "tool_use"]
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
    return _message(request, name, turn) | {"content": _blocks(turn)}


def events(request: SessionRequest, name: str, turns: Sequence[PendingTurn]) -> Iterator[Event]:
    """Yield the typed events of a message."""
    (turn,) = turns
    whole = _message(request, name, turn)
    begun = whole | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield "message_start", {"type": "message_start", "message": begun}
    for index, block in enumerate(_blocks(turn)):
        at: JsonBody = {"index": index}
        empty, delta = _delta(block)
        yield "content_block_start", {"type": "content_block_start", **at, "content_block": empty}
        yield "content_block_delta", {"type": "content_block_delta", **at, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", **at}
    delta = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    usage = {"output_tokens": turn.num_tokens}
    yield "message_delta", {"type": "message_delta", "delta": delta, "usage": usage}
    yield "message_stop", {"type": "message_stop"}


def _delta(block: JsonBody) -> tuple[JsonBody, JsonBody]:
    """Return a block without its content, and the delta that adds it."""
    if block["type"] == "tool_use":
        return block | {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    part = str(block["type"])
    return block | {part: ""}, {"type": f"{part}_delta", part: block[part]}


def _blocks(turn: PendingTurn) -> list[JsonBody]:
    said, calls = turn.action.message, reply_calls(turn)
    blocks: list[JsonBody] = []
    if thought := said.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if said["content"] or not calls:
        blocks.append({"type": "text", "text": said["content"]})
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return blocks


def _message(request: SessionRequest, name: str, turn: PendingTurn) -> JsonBody:
    reason = "stop_sequence" if turn.stopped_by else "tool_use" if turn.action.calls else "end_turn"
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "stop_reason": "max_tokens" if turn.action.finish_reason == "length" else reason,
        "stop_sequence": turn.stopped_by or None,
        "usage": {"input_tokens": turn.num_prompt_tokens, "output_tokens": turn.num_tokens},
    }


def _error(status: int, message: str, code: str | None) -> JsonBody:
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


MESSAGES = Dialect(parse, reply, events, _error)
"""Anthropic's Messages."""
