"""OpenAI's Responses: items instead of messages, and typed events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from ludus.chat.parse_json import tool_call
from ludus.gateway.dialects.base import (
    Dialect,
    Event,
    Histories,
    Sent,
    SessionRequest,
    refuse_fields,
    reply_calls,
    schema_guide,
    session_tool,
    unsent,
)
from ludus.gateway.protocol.bodies import BadRequest, JsonBody, neutral_values, read_body
from ludus.rollouts.agent_session import PendingTurn, ReplyLimits
from ludus.types import Action, Message

_TEXTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"})


class _Part(BaseModel):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Item(BaseModel):
    """Any item of the input; the fields depend on its type."""

    type: str = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[_Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str | None = "{}"
    output: str | list[_Part] = ""
    summary: list[_Part] = []


class _Tool(BaseModel):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None


class _Format(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, JsonValue] | None = Field(None, alias="schema")


class _Text(BaseModel):
    format: _Format | None = None


class _Choice(BaseModel):
    type: Literal["function"]
    name: str


class _Allowed(BaseModel):
    type: Literal["allowed_tools"]
    mode: Literal["required"]
    tools: list[_Choice] = Field(min_length=1)


class ResponsesRequest(BaseModel):
    """Body of `/v1/responses`. Other fields than the refused ones are labels."""

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    input: str | Annotated[list[_Item], Field(fail_fast=True)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _Choice | _Allowed | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: _Text | None = None
    stream: bool | None = None


def parse(raw: bytes, histories: Histories) -> SessionRequest:
    """Return the request of a body. Raises BadRequest. Tools of other types than functions are left out."""
    body = read_body(ResponsesRequest, raw)
    refuse_fields(body, neutral_values("responses"))
    before = list(histories.get(body.previous_response_id or "", ()))
    if body.previous_response_id and not before:
        raise BadRequest(f"The response {body.previous_response_id[:80]!r} is unknown.", 404)
    if body.instructions is not None:
        system = Message(role="system", content=body.instructions)
        before = [system, *(before[1:] if before and before[0]["role"] == "system" else before)]
    items = [_Item(content=body.input)] if isinstance(body.input, str) else body.input
    form = body.text.format if body.text is not None else None
    schema = None if form is None or form.type == "text" else form.schema_ or {"type": "object"}
    choice = body.tool_choice or "auto"
    tools = [tool for tool in body.tools or [] if tool.type == "function"] if choice != "none" else []
    choices = [] if isinstance(choice, str) else choice.tools if isinstance(choice, _Allowed) else [choice]
    named = tuple(one.name for one in choices)
    echo = {
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in tools],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
    }
    must_call, single = bool(named) or choice == "required", body.parallel_tool_calls is False
    return SessionRequest(
        [*before, *_messages([_referred(item, histories) for item in items])],
        [session_tool(tool.name, tool.description, tool.parameters) for tool in tools],
        ReplyLimits(body.max_output_tokens, (), schema_guide(schema), must_call, named, single),
        1,
        bool(body.stream),
        body.model or "policy",
        echo,
    )


def _referred(item: _Item, histories: Histories) -> _Item:
    """Return the item of an earlier response that a reference names by the ids of `_output`, else the item."""
    if item.type != "item_reference" or item.id is None:
        return item
    kind, name, number = (*item.id.split("_"), "", "")[:3]
    reply = histories.get(f"resp_{name}", [Message(role="user", content="")])[-1]
    calls = reply.get("tool_calls", [])
    if kind == "msg" and reply["role"] == "assistant":
        return _Item(role="assistant", content=reply["content"])
    if kind == "rs" and "reasoning_content" in reply:
        return _Item(type="reasoning", content=reply["reasoning_content"])
    if kind == "fc" and number.isdecimal() and int(number) < len(calls):
        call = calls[int(number)]
        called = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        return _Item(type="function_call", call_id=call["id"], **called)
    raise BadRequest(f"The item {item.id[:80]!r} is unknown.", 404)


def _messages(items: Sequence[_Item]) -> Iterator[Message]:
    """Yield the messages of items; the reasoning, text and calls of one reply are one message."""
    said: Message | None = None
    for item in items:
        is_said = item.type in ("reasoning", "function_call") or (item.type == "message" and item.role == "assistant")
        if not is_said:
            if said is not None:
                yield said
                said = None
            yield _message(item)
            continue
        said = said or Message(role="assistant", content="")
        if item.type == "function_call":
            said.setdefault("tool_calls", []).append(tool_call(item.call_id, item.name, item.arguments or "{}"))
        elif item.type == "message":
            said["content"] += _text(item.content)
        elif thought := _text(item.content) or _text(item.summary):
            said["reasoning_content"] = thought
    if said is not None:
        yield said


def _message(item: _Item) -> Message:
    if item.type == "function_call_output":
        return Message(role="tool", content=_text(item.output), tool_call_id=item.call_id)
    if item.type != "message":
        raise BadRequest(f"Input items of the type {item.type[:80]!r} are not supported.")
    role: Literal["system", "user"] = "user" if item.role == "user" else "system"
    return Message(role=role, content=_text(item.content))


def _text(content: str | Sequence[_Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if other := [part.type for part in content if part.type not in _TEXTS]:
        raise BadRequest(f"Content of the type {other[0][:80]!r} is not supported.")
    return "".join(part.text or part.refusal or "" for part in content)


def reply(request: SessionRequest, name: str, turns: Sequence[PendingTurn]) -> JsonBody:
    """Return a completed response."""
    (turn,) = turns
    return _response(request, name, turn, _output(name, turn))


def begin(request: SessionRequest, name: str, _: int) -> list[Event]:
    """Return the events before the text of a response."""
    nothing = PendingTurn(Action(Message(role="assistant", content="")), (), (), lambda: None)
    (item,) = _output(name, nothing)
    found = [*_created(request, name, nothing), _added(item, 0), *islice(_item_events(item, _place(item, 0), ""), 1)]
    return list(_numbered(found, 0))


def delta(request: SessionRequest, name: str, text: str, number: int) -> Event:
    """Return an event with text."""
    place = {"item_id": f"msg_{name}", "output_index": 0, "content_index": 0}
    (event,) = _numbered([("response.output_text.delta", place | {"delta": text, "logprobs": []})], number)
    return event


def events(request: SessionRequest, name: str, turns: Sequence[PendingTurn], sent: Sent) -> Iterator[Event]:
    """Yield the typed events of a response after what was sent."""
    yield from _numbered(_events(request, name, turns[0], sent), sent.num)


def _numbered(found: Iterable[Event], start: int) -> Iterator[Event]:
    for number, (kind, data) in enumerate(found, start):
        yield kind, {"type": kind, "sequence_number": number, **data}


def _created(request: SessionRequest, name: str, turn: PendingTurn) -> list[Event]:
    begun = _response(request, name, turn, []) | {"status": "in_progress", "usage": None}
    return [("response.created", {"response": begun}), ("response.in_progress", {"response": begun})]


def _added(item: JsonBody, index: int) -> Event:
    empty: JsonBody = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    added = {"output_index": index, "item": item | empty | {"status": "in_progress"}}
    return "response.output_item.added", added


def _place(item: JsonBody, index: int) -> JsonBody:
    return {"item_id": item["id"], "output_index": index}


def _events(request: SessionRequest, name: str, turn: PendingTurn, sent: Sent) -> Iterator[Event]:
    output = _output(name, turn, has_text=bool(sent.text))
    if sent.text:  # the message is the first item
        output.sort(key=lambda item: item["type"] != "message")
    else:
        yield from _created(request, name, turn)
    for index, item in enumerate(output):
        begun = sent.text if index == 0 else ""
        if not begun:
            yield _added(item, index)
        yield from islice(_item_events(item, _place(item, index), begun), 1 if begun else 0, None)
        yield "response.output_item.done", {"output_index": index, "item": item}
    whole = _response(request, name, turn, output)
    yield f"response.{whole['status']}", {"response": whole}


def _item_events(item: Mapping[str, object], at: JsonBody, sent: str) -> Iterator[Event]:
    if item["type"] == "function_call":
        kind = "response.function_call_arguments"
        yield f"{kind}.delta", at | {"delta": item["arguments"]}
        yield f"{kind}.done", at | {"arguments": item["arguments"], "name": item["name"]}
        return
    content = item["content"]
    assert isinstance(content, list)
    at = at | {"content_index": 0}
    (part,) = content
    if item["type"] == "reasoning":
        yield "response.content_part.added", at | {"part": part | {"text": ""}}
        yield "response.reasoning_text.delta", at | {"delta": part["text"]}
        yield "response.reasoning_text.done", at | {"text": part["text"]}
        yield "response.content_part.done", at | {"part": part}
        return
    yield "response.content_part.added", at | {"part": part | {"text": ""}}
    if (rest := unsent(part["text"], sent)) or not sent:
        yield "response.output_text.delta", at | {"delta": rest, "logprobs": []}
    yield "response.output_text.done", at | {"text": part["text"], "logprobs": []}
    yield "response.content_part.done", at | {"part": part}


def _output(name: str, turn: PendingTurn, *, has_text: bool = False) -> list[JsonBody]:
    said, calls = turn.action.message, reply_calls(turn)
    items: list[JsonBody] = []
    if thought := said.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content})
    if said["content"] or has_text or not calls:
        part = {"type": "output_text", "text": said["content"], "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [part]})
    for i, call in enumerate(calls):
        called = {"call_id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        items.append({"type": "function_call", "id": f"fc_{name}_{i}", **called})
    status = "incomplete" if turn.action.finish_reason == "length" else "completed"
    return [item | {"status": status} for item in items]


def _response(request: SessionRequest, name: str, turn: PendingTurn, output: list[JsonBody]) -> JsonBody:
    cut = turn.action.finish_reason == "length"
    prompt, sampled = len(turn.prompt), len(turn.tokens)
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": request.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "metadata": {},
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        **request.echo,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


RESPONSES = Dialect(parse, reply, events, begin, delta)
"""OpenAI's Responses."""
