"""Handle `/v1/chat/completions`.

Rendering and parsing use the model's chat template and tool-call parser, as training does. Plain text is
streamed as it is sampled. From the first character that may begin a tool call or thinking, the rest is sent
as one chunk at the end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from ludus.chat.render import TemplateRenderer
from ludus.errors import UserError
from ludus.gateway.protocol.detokenize import Scored, StreamedText, TextRules, chat_logprobs
from ludus.gateway.protocol.requests import BadRequest, ChatRequest
from ludus.gateway.protocol.responses import JsonBody, response_body, version_spans
from ludus.gateway.service import CompletionService, choices
from ludus.tools.base import DescribedTool, described_tool
from ludus.types import Action, Completion, FinishReason, SamplingParams


@dataclass(frozen=True)
class _ChatPrompt:
    """Rendered messages and sampling parameters. `turn` is the number of previous assistant messages."""

    renderer: TemplateRenderer
    ids: tuple[int, ...]
    params: SamplingParams
    ends: tuple[int, ...]
    turn: int


async def complete(service: CompletionService, name: str, request: ChatRequest) -> JsonBody:
    """Return the complete response. Raises BadRequest, EngineError."""
    prompt = await _chat_prompt(service, request)
    parts = [(prompt.ids, params) for params in choices(prompt.params, request.n)]
    with service.use_adapter(request.model) as adapter:
        done = await service.sample(name, parts, adapter)
    built = await service.threads.do(lambda: [_choice(service, request, i, prompt, c) for i, c in enumerate(done)])
    usage = len(prompt.ids), sum(len(completion.tokens) for completion in done)
    body = response_body("chat.completion", name, request.model or service.model.name, built, usage)
    return body | {"prompt_token_ids": list(prompt.ids) if request.return_token_ids else None}


async def stream(service: CompletionService, name: str, request: ChatRequest) -> AsyncIterator[JsonBody]:
    """Stream the response. Raises BadRequest before the first chunk, EngineError."""
    prompt = await _chat_prompt(service, request)
    rules = TextRules(service.model.tokenizer, request.stops, keep_stop=True)
    texts = [StreamedText(rules, plain_only=True) for _ in range(request.n)]
    names = service.token_names(request)
    chunk = partial(response_body, "chat.completion.chunk", name, request.model or service.model.name)
    with service.use_adapter(request.model) as adapter:
        opening = [_delta_choice(i, {"role": "assistant", "content": ""}) for i in range(request.n)]
        yield chunk(opening) | {"prompt_token_ids": list(prompt.ids) if request.return_token_ids else None}
        parts = [(prompt.ids, params) for params in choices(prompt.params, request.n)]
        async for i, piece in service.stream(name, parts, adapter):
            new, finish = texts[i].add(piece.tokens, piece.finish_reason), piece.finish_reason
            choice = _delta_choice(i, {"content": new})
            if finish is not None:
                parse = partial(prompt.renderer.parse, texts[i].tokens, prompt.turn, finish)
                action = await service.threads.do(parse)
                choice |= {"delta": _last_delta(action, texts[i].shown, new), "finish_reason": _reason(action, finish)}
            if request.logprobs:
                choice["logprobs"] = chat_logprobs(names, Scored.of(piece))
            if request.return_token_ids:
                choice["token_ids"] = list(piece.tokens)
            if new or finish is not None or request.logprobs or request.return_token_ids:
                yield chunk([choice]) | {"prompt_token_ids": None}
    if request.stream_options is not None and request.stream_options.include_usage:
        usage = len(prompt.ids), sum(len(text.tokens) for text in texts)
        yield chunk([], usage) | {"prompt_token_ids": None}


def _delta_choice(index: int, delta: JsonBody) -> JsonBody:
    rest = dict.fromkeys(("logprobs", "finish_reason", "stop_reason", "token_ids"))
    return {"index": index, "delta": delta, **rest}


async def _chat_prompt(service: CompletionService, request: ChatRequest) -> _ChatPrompt:
    renderer = service.model.renderer
    if renderer is None:
        raise BadRequest("This model has no chat template; use /v1/completions.")
    ids = await service.encoded(await service.threads.do(partial(_text, renderer, request)), add_special=False)
    service.check_room(ids, sample=True)
    room = service.engine.context_tokens - len(ids)
    wanted = request.max_completion_tokens or request.max_tokens or room
    ends = tuple(dict.fromkeys([*renderer.stop_token_ids, *service.model.end_ids]))
    turn = sum(message.role == "assistant" for message in request.messages)
    params = request.params(min(wanted, room), ends, request.top_logprobs or 0)
    return _ChatPrompt(renderer, ids, params, ends, turn)


def _text(renderer: TemplateRenderer, request: ChatRequest) -> str:
    """Render the messages and tools with the model's chat template. Raises BadRequest if rendering fails."""
    messages = [message.message for message in request.messages]
    try:
        return renderer.text(messages, _tools(request), generate=True)
    except UserError as error:
        raise BadRequest(str(error)) from error
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # templates can raise anything
        raise BadRequest(f"The messages cannot be rendered: {type(error).__name__}.") from error


def _tools(request: ChatRequest) -> list[DescribedTool]:
    tools = request.tools or [] if request.tool_choice != "none" else []
    return [described_tool(tool.schema_) for tool in tools]


def _choice(
    service: CompletionService, request: ChatRequest, index: int, prompt: _ChatPrompt, done: Completion
) -> JsonBody:
    rules = TextRules(service.model.tokenizer, request.stops)
    action = prompt.renderer.parse(done.tokens, prompt.turn, done.finish_reason, _tools(request))
    message, with_ids = action.message, request.return_token_ids
    calls = message.get("tool_calls") or None
    said = {"role": "assistant", "content": message["content"] or (None if calls else "")}
    return {
        "index": index,
        "message": said | {"reasoning_content": message.get("reasoning_content"), "tool_calls": calls},
        "logprobs": chat_logprobs(service.token_names(request), Scored.of(done)) if request.logprobs else None,
        "finish_reason": _reason(action, done.finish_reason),
        "stop_reason": rules.stop_reason(done, prompt.params, prompt.ends),
        "token_ids": list(done.tokens) if with_ids else None,
        "weight_versions": version_spans(done.versions) if with_ids else None,
    }


def _last_delta(action: Action, shown: str, new: str) -> JsonBody:
    """Return the delta of the last chunk: unsent content, thinking and tool calls."""
    message = action.message
    delta = {
        "content": message["content"].removeprefix(shown.removesuffix(new)) or None,
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": [{**call, "index": i} for i, call in enumerate(message.get("tool_calls", []))] or None,
    }
    return {name: value for name, value in delta.items() if value is not None}


def _reason(action: Action, finish: FinishReason) -> str:
    return "tool_calls" if action.calls and finish == "stop" else finish
