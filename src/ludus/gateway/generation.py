"""Handle `/v1/completions` (text or token ids as prompts), `/v1/chat/completions`, and dialects of sessions.

Rendering and parsing of chats use the model's chat template and tool-call parser, as training does. Plain text is
streamed as it is sampled. From the first character that may begin a tool call or thinking, the rest is sent as one
chunk at the end.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ludus.chat.render import TemplateRenderer, decode_exactly
from ludus.engines.base import TOKEN_WATCHERS
from ludus.errors import EngineError
from ludus.gateway.dialects.base import Dialect, Histories, SessionRequest, chat_finish
from ludus.gateway.protocol.bodies import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    JsonBody,
    check_calls,
    read_body,
    response_body,
    text_choice,
    version_spans,
)
from ludus.gateway.protocol.detokenize import (
    Scored,
    StreamedText,
    TextRules,
    chat_logprobs,
    prompt_logprobs,
    text_logprobs,
)
from ludus.gateway.service import Batch, CompletionService, choices
from ludus.rollouts.agent_session import PendingTurn, cut_at_stop
from ludus.tools.base import DescribedTool
from ludus.types import Action, Completion, Guide, SamplingParams

_MAX_CHOICES = 4096  # maximum number of choices of one request over all its prompts


@dataclass(frozen=True)
class _Sample:
    """One choice to sample: prompt, parameters, and the prompt's log-probabilities if requested."""

    prompt: tuple[int, ...]
    params: SamplingParams
    scores: Scored | None = None


async def complete(service: CompletionService, name: str, request: CompletionRequest) -> JsonBody:
    """Return the complete response. Raises BadRequest, EngineError."""
    prompts = await _prompts(service, request)
    with service.use_adapter(request.model) as adapter:
        samples: list[_Sample] = []
        for ids, params in prompts:
            scores = None
            if (num := request.num_prompt_top) is not None:
                values, top = await service.engine.score_top(ids, num, adapter=adapter)
                scores = Scored(ids, [None, *values[1:]], top)
            samples += [_Sample(ids, one, scores) for one in choices(params, request.n)]
        if request.max_tokens == 0:
            done = [Completion((), (), (), "length") for _ in samples]
        else:
            done = await service.sample(name, [(choice.prompt, choice.params) for choice in samples], adapter)
    pairs = [*zip(samples, done, strict=True)]
    built = await service.threads.do(lambda: [_choice(service, request, i, *pair) for i, pair in enumerate(pairs)])
    usage = sum(len(ids) for ids, _ in prompts), sum(len(completion.tokens) for completion in done)
    return response_body("text_completion", name, request.model or service.model.name, built, usage)


async def stream(service: CompletionService, name: str, request: CompletionRequest) -> AsyncIterator[JsonBody]:
    """Stream the response. Raises BadRequest before the first chunk, EngineError."""
    prompts = await _prompts(service, request)
    samples = [(ids, one) for ids, params in prompts for one in choices(params, request.n)]
    texts = [StreamedText(_text_rules(service, request)) for _ in samples]
    names = service.token_names(request)
    chunk = partial(response_body, "text_completion", name, request.model or service.model.name)
    with service.use_adapter(request.model) as adapter:
        async for i, piece in service.stream(name, samples, adapter):
            offset, first = len(texts[i].shown), not texts[i].tokens
            choice = text_choice(i, texts[i].add(piece.tokens, piece.finish_reason), piece.finish_reason)
            if request.logprobs is not None:
                choice["logprobs"] = text_logprobs(names, Scored.of(piece), offset)
            if request.return_token_ids:
                choice["token_ids"] = list(piece.tokens)
                choice["prompt_token_ids"] = list(samples[i][0]) if first else None
            yield chunk([choice])
    if request.stream_options is not None and request.stream_options.include_usage:
        yield chunk([], (sum(len(ids) for ids, _ in prompts), sum(len(text.tokens) for text in texts)))


def _text_rules(service: CompletionService, request: CompletionRequest) -> TextRules:
    keep_stop, skip_special = request.include_stop_str_in_output, request.skip_special_tokens
    return TextRules(service.model.tokenizer, request.stops, keep_stop=keep_stop, skip_special=skip_special)


async def _prompts(service: CompletionService, request: CompletionRequest) -> Batch:
    """Return each prompt with the parameters of its first choice."""
    if (num := len(request.prompts) * request.n) > _MAX_CHOICES:
        raise BadRequest(f"The request has {num} choices; the maximum is {_MAX_CHOICES}.")
    prompts = [await service.prompt_ids(p, add_special=request.add_special_tokens) for p in request.prompts]
    for ids in prompts:
        service.check_room(ids, sample=request.max_tokens != 0)
    rooms = [service.engine.context_tokens - len(ids) for ids in prompts]
    wanted = rooms if request.max_tokens is None else [min(request.max_tokens, room) for room in rooms]
    params = [request.params(num, service.model.end_ids, request.logprobs or 0) for num in wanted]
    return list(zip(prompts, params, strict=True))


def _choice(
    service: CompletionService, request: CompletionRequest, index: int, sample: _Sample, done: Completion
) -> JsonBody:
    rules, tokenizer = _text_rules(service, request), service.model.tokenizer
    echoed = sample.prompt if request.echo else ()
    if done.tokens:
        text = TextRules(tokenizer, skip_special=request.skip_special_tokens).text(echoed, "length")
        text += rules.text(done.tokens, done.finish_reason)
    else:
        text = "".join(decode_exactly(tokenizer, [token]) for token in echoed)
    choice = text_choice(index, text, done.finish_reason)
    choice["stop_reason"] = rules.stop_reason(done, sample.params, service.model.end_ids)
    names = service.token_names(request)
    if request.logprobs is not None:
        echo = sample.scores.cut(request.logprobs) if echoed and sample.scores is not None else Scored()
        choice["logprobs"] = text_logprobs(names, echo.then(Scored.of(done)), 0)
    if request.return_token_ids:
        choice |= {"token_ids": list(done.tokens), "prompt_token_ids": list(sample.prompt)}
        choice["weight_versions"] = version_spans(done.versions)
    if request.prompt_logprobs is not None and sample.scores is not None:
        choice["prompt_logprobs"] = prompt_logprobs(names, sample.scores.cut(request.prompt_logprobs))
    return choice


@dataclass(frozen=True)
class _ChatPrompt:
    """Rendered messages and sampling parameters. `turn` is the number of previous assistant messages."""

    renderer: TemplateRenderer
    ids: tuple[int, ...]
    params: SamplingParams
    ends: tuple[int, ...]
    turn: int


async def complete_chat(service: CompletionService, name: str, request: ChatRequest) -> JsonBody:
    """Return the complete response. Raises BadRequest, EngineError."""
    prompt = await _chat_prompt(service, request)
    parts = [(prompt.ids, params) for params in choices(prompt.params, request.n)]
    with service.use_adapter(request.model) as adapter:
        done = await service.sample(name, parts, adapter)
    built = await service.threads.do(lambda: [_chat_choice(service, request, i, prompt, c) for i, c in enumerate(done)])
    usage = len(prompt.ids), sum(len(completion.tokens) for completion in done)
    body = response_body("chat.completion", name, request.model or service.model.name, built, usage)
    return body | {"prompt_token_ids": list(prompt.ids) if request.return_token_ids else None}


async def stream_chat(service: CompletionService, name: str, request: ChatRequest) -> AsyncIterator[JsonBody]:
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
                choice |= {"delta": _last_delta(action, texts[i].shown, new), "finish_reason": chat_finish(action)}
            if request.logprobs:
                choice["logprobs"] = chat_logprobs(names, Scored.of(piece))
            if request.return_token_ids:
                choice["token_ids"] = list(piece.tokens)
            if new or finish is not None or request.logprobs or request.return_token_ids:
                yield chunk([choice]) | {"prompt_token_ids": None}
    if request.stream_options is not None and request.stream_options.include_usage:
        usage = len(prompt.ids), sum(len(text.tokens) for text in texts)
        yield chunk([], usage) | {"prompt_token_ids": None}


def read_dialect(dialect: Dialect, histories: Histories, raw: bytes) -> tuple[SessionRequest, ChatRequest]:
    """Return a body of another dialect, also as the request that samples its reply. Raises BadRequest."""
    parsed = dialect.parse(raw, histories)
    limits, given = parsed.limits, json.loads(raw)
    filters = {name: given.get(name) for name in ("temperature", "top_p", "top_k")}
    named = [{"type": "function", "function": {"name": name}} for name in limits.call_of]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    body: JsonBody = {
        **filters,
        "model": given.get("model"),
        "messages": list(parsed.messages),
        "tools": [tool.schema for tool in parsed.tools],
        "tool_choice": allowed if named else "required" if limits.must_call else None,
        "parallel_tool_calls": not limits.single_call,
        "max_tokens": limits.max_tokens,
        "stop": limits.stop,
        "structured_outputs": None if limits.guide is None else {"json": limits.guide.text},
    }
    request = read_body(ChatRequest, json.dumps(body).encode())
    set_filters = {name: value for name, value in filters.items() if value is not None}
    return replace(parsed, echo={**parsed.echo, **set_filters}), request


async def sample_dialect(
    service: CompletionService, request: ChatRequest, parsed: SessionRequest
) -> Sequence[PendingTurn]:
    """Return the reply to a request of another dialect, which its `watch` observes. Raises BadRequest, EngineError."""
    prompt, name = await _chat_prompt(service, request), secrets.token_hex(12)
    limits = parsed.limits
    with service.use_adapter(request.model) as adapter:
        if limits.watch is not None:
            TOKEN_WATCHERS[f"{name}-0"] = partial(limits.watch, len(prompt.ids))
        try:
            (done,) = await service.sample(name, [(prompt.ids, prompt.params)], adapter)
        finally:
            TOKEN_WATCHERS.pop(f"{name}-0", None)
    if done.finish_reason == "abort":
        raise EngineError("The request was aborted.")
    parse = partial(prompt.renderer.parse, done.tokens, prompt.turn, done.finish_reason, parsed.tools)
    action, stopped_by = cut_at_stop(await service.threads.do(parse), limits.stop)
    return [PendingTurn(action, prompt.ids, done.tokens, lambda: None, stopped_by=stopped_by)]


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
    if request.must_call:
        params = replace(params, guide=_call_guide(renderer, request))
    if request.single_call and renderer.call_end and _tools(request):
        params = replace(params, stop=(*params.stop, renderer.call_end))
    return _ChatPrompt(renderer, ids, params, ends, turn)


def _call_guide(renderer: TemplateRenderer, request: ChatRequest) -> Guide:
    """Return the guide of a forced call. Raises BadRequest without such a tool, UserError if the format has none."""
    tools = [tool for tool in _tools(request) if not request.call_of or tool.name in request.call_of]
    if not tools:
        raise BadRequest("tool_choice requires a call, but the request has no such tool.")
    return renderer.guide(tools, required=True, single=request.single_call)


def _text(renderer: TemplateRenderer, request: ChatRequest) -> str:
    """Render the messages and tools with the model's chat template. Raises BadRequest or UserError if that fails."""
    messages = [message.message for message in request.messages]
    check_calls(messages)
    try:
        return renderer.text(messages, _tools(request), generate=True)
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # templates can raise anything
        raise BadRequest(f"The messages cannot be rendered: {type(error).__name__}.") from error


def _tools(request: ChatRequest) -> list[DescribedTool]:
    tools = request.tools or [] if request.tool_choice != "none" else []
    return [tool.described for tool in tools]


def _chat_choice(
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
        "finish_reason": chat_finish(action),
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
