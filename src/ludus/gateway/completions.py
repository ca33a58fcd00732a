"""`/v1/completions`: completions of text or token ids, with log-probabilities."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from ludus.gateway.protocol.detokenize import (
    GrowingText,
    Scored,
    TextRules,
    prompt_logprobs,
    text_logprobs,
    token_texts,
)
from ludus.gateway.protocol.requests import CompletionRequest
from ludus.gateway.protocol.responses import TextAnswer, TextChoice, Usage, VersionSpan
from ludus.gateway.service import CompletionService, choices
from ludus.types import Completion, SamplingParams


@dataclass(frozen=True)
class _Asked:
    """One choice to sample: prompt, parameters, and the prompt's log-probabilities if requested."""

    prompt: tuple[int, ...]
    params: SamplingParams
    scores: Scored | None = None


async def complete(service: CompletionService, name: str, request: CompletionRequest) -> TextAnswer:
    """Return the complete response. Raises BadRequest, EngineError."""
    prompts = await _prompts(service, request)
    with service.under(request.model) as adapter:
        asked = [
            _Asked(ids, params, scores)
            for ids in prompts
            for scores in [await _scores(service, request, ids, adapter)]
            for params in choices(_params(service, request, ids), request.n)
        ]
        if request.max_tokens == 0:
            done = [Completion((), (), (), "length") for _ in asked]
        else:
            done = await service.sample(name, [(one.prompt, one.params) for one in asked], adapter)

    def choices_made() -> list[TextChoice]:
        return [_choice(service, request, i, *both) for i, both in enumerate(zip(asked, done, strict=True))]

    made = await service.threads.do(choices_made)
    num_prompt, num_sampled = sum(map(len, prompts)), sum(len(completion.tokens) for completion in done)
    served = request.model or service.model.name
    return TextAnswer(id=name, model=served, choices=made, usage=Usage.of(num_prompt, num_sampled))


async def stream(service: CompletionService, name: str, request: CompletionRequest) -> AsyncIterator[TextAnswer]:
    """Stream the response. Raises BadRequest before the first chunk, EngineError."""
    prompts = await _prompts(service, request)
    asked = [(ids, p) for ids in prompts for p in choices(_params(service, request, ids), request.n)]
    rules = text_rules(service, request)
    texts = [GrowingText(rules) for _ in asked]
    names = service.token_names(request)
    served = request.model or service.model.name
    with service.under(request.model) as adapter:
        async for i, piece in service.stream(name, asked, adapter):
            offset, first = len(texts[i].shown), not texts[i].tokens
            choice = TextChoice(index=i, text=texts[i].add(piece.tokens, piece.finish_reason))
            if request.logprobs is not None:
                scored = Scored(piece.tokens, piece.logprobs, piece.top_logprobs)
                choice.logprobs = text_logprobs(names, scored, offset)
            if request.return_token_ids:
                choice.token_ids = list(piece.tokens)
                choice.prompt_token_ids = list(asked[i][0]) if first else None
            choice.finish_reason = piece.finish_reason
            yield TextAnswer(id=name, model=served, choices=[choice])
    if request.stream_options is not None and request.stream_options.include_usage:
        usage = Usage.of(sum(map(len, prompts)), sum(len(text.tokens) for text in texts))
        yield TextAnswer(id=name, model=served, choices=[], usage=usage)


def text_rules(service: CompletionService, request: CompletionRequest) -> TextRules:
    """Return the request's text options."""
    return TextRules(
        service.model.tokenizer,
        request.stops,
        keep_stop=request.include_stop_str_in_output,
        skip_special=request.skip_special_tokens,
    )


def version_spans(versions: Sequence[int]) -> list[VersionSpan]:
    """Group consecutive tokens by version."""
    lengths = [(version, len(list(run))) for version, run in groupby(versions)]
    ends = list(accumulate(num for _, num in lengths))
    return [
        VersionSpan(version=str(version), start=end - num, end=end)
        for (version, num), end in zip(lengths, ends, strict=True)
    ]


async def _prompts(service: CompletionService, request: CompletionRequest) -> list[tuple[int, ...]]:
    service.check_num(len(request.prompts) * request.n)
    prompts = [await service.prompt_ids(p, add_special=request.add_special_tokens) for p in request.prompts]
    for ids in prompts:
        service.check_room(ids, sample=request.max_tokens != 0)
    return prompts


def _params(service: CompletionService, request: CompletionRequest, ids: Sequence[int]) -> SamplingParams:
    room = service.engine.context_tokens - len(ids)
    wanted = room if request.max_tokens is None else min(request.max_tokens, room)
    return request.params(wanted, service.model.end_ids, request.logprobs or 0)


async def _scores(
    service: CompletionService, request: CompletionRequest, ids: tuple[int, ...], adapter: str | None
) -> Scored | None:
    """Score the prompt if the request asks for it."""
    num = request.num_prompt_top
    if num is None:
        return None
    scores, top = await service.engine.score_top(ids, num, adapter=adapter)
    return Scored(ids, [None, *scores[1:]], top)


def _choice(
    service: CompletionService, request: CompletionRequest, index: int, asked: _Asked, done: Completion
) -> TextChoice:
    rules, tokenizer = text_rules(service, request), service.model.tokenizer
    echoed = asked.prompt if request.echo else ()
    choice = TextChoice(
        index=index,
        text="".join(token_texts(tokenizer, echoed)) if echoed and not done.tokens else "",
        finish_reason=done.finish_reason,
        stop_reason=rules.stop_reason(done, asked.params, service.model.end_ids),
    )
    if done.tokens:
        before = TextRules(tokenizer, skip_special=request.skip_special_tokens).text(echoed, "length")
        choice.text = before + rules.text(done.tokens, done.finish_reason)
    names = service.token_names(request)
    if request.logprobs is not None:
        own = Scored(done.tokens, done.logprobs, done.top_logprobs)
        echo = asked.scores.cut(request.logprobs) if echoed and asked.scores is not None else Scored()
        choice.logprobs = text_logprobs(names, echo.then(own), 0)
    if request.return_token_ids:
        choice.token_ids, choice.prompt_token_ids = list(done.tokens), list(asked.prompt)
        choice.weight_versions = version_spans(done.versions)
    if request.prompt_logprobs is not None and asked.scores is not None:
        choice.prompt_logprobs = prompt_logprobs(names, asked.scores.cut(request.prompt_logprobs))
    return choice
