"""Chat completions, as the `openai` package and servers that are compatible with it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from ludus.gateway.dialects.base import (
    Dialect,
    Event,
    Histories,
    Sent,
    SessionRequest,
    SessionSampling,
    chat_finish,
    reply_calls,
    session_tool,
    unsent,
)
from ludus.gateway.protocol.bodies import ChatRequest, JsonBody, read_body
from ludus.rollouts.agent_session import PendingTurn, ReplyLimits


class SessionChatRequest(SessionSampling, ChatRequest):
    """Body of `/v1/chat/completions` of a session."""


def parse(raw: bytes, _: Histories) -> SessionRequest:
    """Return the request of a body. Raises BadRequest. Temperature and filters are the trainer's and are ignored."""
    body = read_body(SessionChatRequest, raw)
    body.refuse_set("logprobs", "stop_token_ids", "ignore_eos", "include_stop_str_in_output")
    tools = [tool.function for tool in body.tools or []] if body.tool_choice != "none" else []
    length = body.max_completion_tokens or body.max_tokens
    limits = ReplyLimits(length, body.stops, body.guide, body.must_call, body.call_of, body.single_call)
    usage = body.stream_options is not None and body.stream_options.include_usage
    return SessionRequest(
        [message.message for message in body.messages],
        [session_tool(t.name, t.description, t.parameters) for t in tools],
        limits,
        body.n,
        bool(body.stream),
        body.model or "policy",
        {"include_usage": usage},
    )


def reply(request: SessionRequest, name: str, turns: Sequence[PendingTurn]) -> JsonBody:
    """Return a chat completion."""
    choices: list[JsonBody] = [
        {"index": i, "message": _message(turn), "logprobs": None, "finish_reason": chat_finish(turn.action)}
        for i, turn in enumerate(turns)
    ]
    return _body("chat.completion", request, name, choices) | {"usage": _usage(turns)}


def begin(request: SessionRequest, name: str, _: int) -> list[Event]:
    """Return the first chunk."""
    return [_chunk(request, name, 0, {"role": "assistant", "content": ""})]


def delta(request: SessionRequest, name: str, text: str, _: int) -> Event:
    """Return a chunk of text."""
    return _chunk(request, name, 0, {"content": text})


def events(request: SessionRequest, name: str, turns: Sequence[PendingTurn], sent: Sent) -> Iterator[Event]:
    """Yield the chunks of chat completions after the text that was sent."""
    for i, turn in enumerate(turns):
        message = _message(turn)
        calls = message.pop("tool_calls", [])
        assert isinstance(calls, list)
        if sent.text:
            message["content"] = unsent(turn.action.message["content"], sent.text)
        else:
            yield _chunk(request, name, i, {"role": "assistant", "content": ""})
        for part in ("reasoning_content", "content"):
            if message.get(part):
                yield _chunk(request, name, i, {part: message[part]})
        for number, call in enumerate(calls):
            yield _chunk(request, name, i, {"tool_calls": [{"index": number, **call}]})
        yield _chunk(request, name, i, {}, chat_finish(turn.action))
    if request.echo["include_usage"]:
        yield "", _body("chat.completion.chunk", request, name, []) | {"usage": _usage(turns)}


def _message(turn: PendingTurn) -> JsonBody:
    said, calls = turn.action.message, reply_calls(turn)
    message: JsonBody = {"role": "assistant", "content": said["content"] or (None if calls else ""), "refusal": None}
    if said.get("reasoning_content"):
        message["reasoning_content"] = said["reasoning_content"]
    return message | {"tool_calls": calls} if calls else message


def _usage(turns: Sequence[PendingTurn]) -> JsonBody:
    prompt, sampled = len(turns[0].prompt), sum(len(turn.tokens) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _body(kind: str, request: SessionRequest, name: str, choices: Sequence[JsonBody]) -> JsonBody:
    head = {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": request.model}
    return head | {"choices": list(choices)}


def _chunk(request: SessionRequest, name: str, index: int, delta: JsonBody, reason: str | None = None) -> Event:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
    return "", _body("chat.completion.chunk", request, name, [choice])


CHAT = Dialect(parse, reply, events, begin, delta, end=b"data: [DONE]\n\n")
"""Chat completions."""
