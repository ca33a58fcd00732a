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
from ludus.gateway.completions import version_spans
from ludus.gateway.protocol.detokenize import GrowingText, Scored, TextRules, chat_logprobs
from ludus.gateway.protocol.requests import BadRequest, ChatRequest
from ludus.gateway.protocol.responses import (
    CalledFunction,
    CallPiece,
    CallReply,
    ChatAnswer,
    ChatChoice,
    ChatDelta,
    ChatPiece,
    ChatPieceChoice,
    ChatReply,
    Usage,
)
from ludus.gateway.service import CompletionService, choices
from ludus.tools.base import described_tool
from ludus.types import Action, Completion, FinishReason, MessageToolCall, SamplingParams


@dataclass(frozen=True)
class _Asked:
    """A rendered dialogue. `turn` counts the model's previous messages."""

    prompt: tuple[int, ...]
    params: SamplingParams
    ends: tuple[int, ...]
    turn: int


async def complete(service: CompletionService, name: str, request: ChatRequest) -> ChatAnswer:
    """Return the complete response. Raises BadRequest, EngineError."""
    asked, renderer = await _asked(service, request), _renderer(service)
    parts = [(asked.prompt, params) for params in choices(asked.params, request.n)]
    with service.under(request.model) as adapter:
        done = await service.sample(name, parts, adapter)

    def choices_made() -> list[ChatChoice]:
        made = [_choice(service, request, i, asked, completion) for i, completion in enumerate(done)]
        for choice, completion in zip(made, done, strict=True):
            action = renderer.parse(completion.tokens, asked.turn, completion.finish_reason)
            choice.message = _reply(action)
            choice.finish_reason = _finish(action, completion.finish_reason)
        return made

    made = await service.threads.do(choices_made)
    return ChatAnswer(
        id=name,
        model=request.model or service.model.name,
        choices=made,
        usage=Usage.of(len(asked.prompt), sum(len(completion.tokens) for completion in done)),
        prompt_token_ids=list(asked.prompt) if request.return_token_ids else None,
    )


async def stream(service: CompletionService, name: str, request: ChatRequest) -> AsyncIterator[ChatPiece]:
    """Stream the response. Raises BadRequest before the first chunk, EngineError."""
    asked, renderer = await _asked(service, request), _renderer(service)
    rules = TextRules(service.model.tokenizer, request.stops, keep_stop=True)
    texts = [GrowingText(rules, plain_only=True) for _ in range(request.n)]
    names = service.token_names(request)
    head = ChatDelta(role="assistant", content="")
    opening = [ChatPieceChoice(index=i, delta=head) for i in range(request.n)]
    ids = list(asked.prompt) if request.return_token_ids else None
    served = request.model or service.model.name
    with service.under(request.model) as adapter:
        yield ChatPiece(id=name, model=served, choices=opening, prompt_token_ids=ids)
        parts = [(asked.prompt, params) for params in choices(asked.params, request.n)]
        async for i, piece in service.stream(name, parts, adapter):
            new = texts[i].add(piece.tokens, piece.finish_reason)
            choice = ChatPieceChoice(index=i, delta=ChatDelta(content=new))
            if piece.finish_reason is not None:
                parse = partial(renderer.parse, texts[i].tokens, asked.turn, piece.finish_reason)
                action = await service.threads.do(parse)
                choice.delta = _rest(action, texts[i].shown, new)
                choice.finish_reason = _finish(action, piece.finish_reason)
            if request.logprobs:
                scored = Scored(piece.tokens, piece.logprobs, piece.top_logprobs)
                choice.logprobs = chat_logprobs(names, scored)
            if request.return_token_ids:
                choice.token_ids = list(piece.tokens)
            if _says_something(choice):
                yield ChatPiece(id=name, model=served, choices=[choice])
    if request.stream_options is not None and request.stream_options.include_usage:
        usage = Usage.of(len(asked.prompt), sum(len(text.tokens) for text in texts))
        yield ChatPiece(id=name, model=served, choices=[], usage=usage)


def _renderer(service: CompletionService) -> TemplateRenderer:
    renderer = service.model.renderer
    if renderer is None:
        raise BadRequest("This model has no chat template; use /v1/completions.")
    return renderer


async def _asked(service: CompletionService, request: ChatRequest) -> _Asked:
    renderer = _renderer(service)
    prompt = await service.encoded(await service.threads.do(partial(_text, renderer, request)), add_special=False)
    service.check_room(prompt, sample=True)
    room = service.engine.context_tokens - len(prompt)
    wanted = request.max_completion_tokens or request.max_tokens or room
    ends = tuple(dict.fromkeys([*renderer.stop_token_ids, *service.model.end_ids]))
    turn = sum(message.role == "assistant" for message in request.messages)
    params = request.params(min(wanted, room), ends, request.top_logprobs or 0)
    return _Asked(prompt, params, ends, turn)


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
    service: CompletionService, request: ChatRequest, index: int, asked: _Asked, done: Completion
) -> ChatChoice:
    rules = TextRules(service.model.tokenizer, request.stops)
    choice = ChatChoice(
        index=index,
        message=ChatReply(content=None),
        finish_reason=done.finish_reason,
        stop_reason=rules.stop_reason(done, asked.params, asked.ends),
    )
    if request.logprobs:
        scored = Scored(done.tokens, done.logprobs, done.top_logprobs)
        choice.logprobs = chat_logprobs(service.token_names(request), scored)
    if request.return_token_ids:
        choice.token_ids = list(done.tokens)
        choice.weight_versions = version_spans(done.versions)
    return choice


def _reply(action: Action) -> ChatReply:
    message = action.message
    calls = [CallReply(id=call["id"], function=_called(call)) for call in message.get("tool_calls", [])]
    return ChatReply(
        content=message["content"] or (None if calls else ""),
        reasoning_content=message.get("reasoning_content"),
        tool_calls=calls or None,
    )


def _called(call: MessageToolCall) -> CalledFunction:
    return CalledFunction(name=call["function"]["name"], arguments=call["function"]["arguments"])


def _rest(action: Action, shown: str, new: str) -> ChatDelta:
    """Build the last chunk: unsent content, thinking and tool calls."""
    before = shown[: len(shown) - len(new)] if new else shown
    content = action.message["content"]
    calls = [
        CallPiece(index=i, id=call["id"], function=_called(call))
        for i, call in enumerate(action.message.get("tool_calls", []))
    ]
    return ChatDelta(
        content=content.removeprefix(before) or None,
        reasoning_content=action.message.get("reasoning_content"),
        tool_calls=calls or None,
    )


def _says_something(choice: ChatPieceChoice) -> bool:
    """Return whether a chunk has anything to send; text of an unfinished call is held back."""
    ended = choice.finish_reason is not None
    return ended or bool(choice.delta.content) or choice.logprobs is not None or choice.token_ids is not None


def _finish(action: Action, finish: FinishReason) -> str:
    return "tool_calls" if action.calls and finish == "stop" else finish
