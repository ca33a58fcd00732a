"""`/v1/chat/completions`: chat messages and tools in, a message with tool calls out.

Rendering and parsing are the same as in training: the model's chat template and tool-call parser. Plain text
is streamed as it is sampled; from the first character that may begin a tool call or thinking, the rest is
sent as one chunk at the end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from ludus.chat.render import TemplateRenderer
from ludus.errors import UserError
from ludus.gateway.protocol.detokenize import GrowingText, Scored, TextRules, chat_logprobs
from ludus.gateway.protocol.requests import BadRequest, ChatRequest
from ludus.gateway.protocol.responses import JsonBody, response_body, version_spans
from ludus.gateway.service import CompletionService, choices
from ludus.tools.base import described_tool
from ludus.types import Action, Completion, FinishReason, SamplingParams


@dataclass(frozen=True)
class _Dialogue:
    """A rendered dialogue. `turn` counts the model's previous messages."""

    renderer: TemplateRenderer
    prompt: tuple[int, ...]
    params: SamplingParams
    ends: tuple[int, ...]
    turn: int


async def complete(service: CompletionService, name: str, request: ChatRequest) -> JsonBody:
    """Return the complete response. Raises BadRequest, EngineError."""
    asked = await _dialogue(service, request)
    parts = [(asked.prompt, params) for params in choices(asked.params, request.n)]
    with service.under(request.model) as adapter:
        done = await service.sample(name, parts, adapter)

    def choices_made() -> list[JsonBody]:
        return [_choice(service, request, i, asked, completion) for i, completion in enumerate(done)]

    made = await service.threads.do(choices_made)
    usage = len(asked.prompt), sum(len(completion.tokens) for completion in done)
    body = response_body("chat.completion", name, request.model or service.model.name, made, usage)
    return body | {"prompt_token_ids": list(asked.prompt) if request.return_token_ids else None}


async def stream(service: CompletionService, name: str, request: ChatRequest) -> AsyncIterator[JsonBody]:
    """Stream the response. Raises BadRequest before the first chunk, EngineError."""
    asked = await _dialogue(service, request)
    rules = TextRules(service.model.tokenizer, request.stops, keep_stop=True)
    texts = [GrowingText(rules, plain_only=True) for _ in range(request.n)]
    names = service.token_names(request)
    chunk = partial(response_body, "chat.completion.chunk", name, request.model or service.model.name)
    with service.under(request.model) as adapter:
        opening = [_delta_choice(i, {"role": "assistant", "content": ""}) for i in range(request.n)]
        yield chunk(opening) | {"prompt_token_ids": list(asked.prompt) if request.return_token_ids else None}
        parts = [(asked.prompt, params) for params in choices(asked.params, request.n)]
        async for i, piece in service.stream(name, parts, adapter):
            new, finish = texts[i].add(piece.tokens, piece.finish_reason), piece.finish_reason
            choice = _delta_choice(i, {"content": new})
            if finish is not None:
                parse = partial(asked.renderer.parse, texts[i].tokens, asked.turn, finish)
                action = await service.threads.do(parse)
                choice |= {"delta": _rest(action, texts[i].shown, new), "finish_reason": _finish(action, finish)}
            if request.logprobs:
                choice["logprobs"] = chat_logprobs(names, Scored.of(piece))
            if request.return_token_ids:
                choice["token_ids"] = list(piece.tokens)
            if new or finish is not None or request.logprobs or request.return_token_ids:
                yield chunk([choice]) | {"prompt_token_ids": None}
    if request.stream_options is not None and request.stream_options.include_usage:
        usage = len(asked.prompt), sum(len(text.tokens) for text in texts)
        yield chunk([], usage) | {"prompt_token_ids": None}


def _delta_choice(index: int, delta: JsonBody) -> JsonBody:
    rest = dict.fromkeys(("logprobs", "finish_reason", "stop_reason", "token_ids"))
    return {"index": index, "delta": delta, **rest}


async def _dialogue(service: CompletionService, request: ChatRequest) -> _Dialogue:
    renderer = service.model.renderer
    if renderer is None:
        raise BadRequest("This model has no chat template; use /v1/completions.")
    prompt = await service.encoded(await service.threads.do(partial(_text, renderer, request)), add_special=False)
    service.check_room(prompt, sample=True)
    room = service.engine.context_tokens - len(prompt)
    wanted = request.max_completion_tokens or request.max_tokens or room
    ends = tuple(dict.fromkeys([*renderer.stop_token_ids, *service.model.end_ids]))
    turn = sum(message.role == "assistant" for message in request.messages)
    params = request.params(min(wanted, room), ends, request.top_logprobs or 0)
    return _Dialogue(renderer, prompt, params, ends, turn)


def _text(renderer: TemplateRenderer, request: ChatRequest) -> str:
    """Render the dialogue with the model's template. Raises BadRequest if that fails."""
    messages = [message.message for message in request.messages]
    given = request.tools or [] if request.tool_choice != "none" else []
    try:
        return renderer.text(messages, [described_tool(tool.schema_) for tool in given], generate=True)
    except UserError as error:
        raise BadRequest(str(error)) from error
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # templates can raise anything
        raise BadRequest(f"The dialogue cannot be rendered: {type(error).__name__}.") from error


def _choice(
    service: CompletionService, request: ChatRequest, index: int, asked: _Dialogue, done: Completion
) -> JsonBody:
    rules = TextRules(service.model.tokenizer, request.stops)
    action = asked.renderer.parse(done.tokens, asked.turn, done.finish_reason)
    message, with_ids = action.message, request.return_token_ids
    calls = message.get("tool_calls") or None
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": message["content"] or (None if calls else ""),
            "reasoning_content": message.get("reasoning_content"),
            "tool_calls": calls,
        },
        "logprobs": chat_logprobs(service.token_names(request), Scored.of(done)) if request.logprobs else None,
        "finish_reason": _finish(action, done.finish_reason),
        "stop_reason": rules.stop_reason(done, asked.params, asked.ends),
        "token_ids": list(done.tokens) if with_ids else None,
        "weight_versions": version_spans(done.versions) if with_ids else None,
    }


def _rest(action: Action, shown: str, new: str) -> JsonBody:
    """Build the last chunk: unsent content, thinking and tool calls."""
    message = action.message
    delta = {
        "content": message["content"].removeprefix(shown.removesuffix(new)) or None,
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": [{**call, "index": i} for i, call in enumerate(message.get("tool_calls", []))] or None,
    }
    return {name: value for name, value in delta.items() if value is not None}


def _finish(action: Action, finish: FinishReason) -> str:
    return "tool_calls" if action.calls and finish == "stop" else finish
