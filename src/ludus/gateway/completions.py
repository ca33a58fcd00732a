"""Handle `/v1/completions`: text or token ids as prompts, optional log-probabilities."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from ludus.chat.render import decode_exactly
from ludus.gateway.protocol.detokenize import Scored, StreamedText, TextRules, prompt_logprobs, text_logprobs
from ludus.gateway.protocol.requests import BadRequest, CompletionRequest
from ludus.gateway.protocol.responses import JsonBody, response_body, version_spans
from ludus.gateway.service import CompletionService, choices
from ludus.types import Completion, SamplingParams

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
        samples = [
            _Sample(ids, params, scores)
            for ids in prompts
            for scores in [await _scores(service, request, ids, adapter)]
            for params in choices(_params(service, request, ids), request.n)
        ]
        if request.max_tokens == 0:
            done = [Completion((), (), (), "length") for _ in samples]
        else:
            done = await service.sample(name, [(choice.prompt, choice.params) for choice in samples], adapter)
    pairs = [*zip(samples, done, strict=True)]
    built = await service.threads.do(lambda: [_choice(service, request, i, *pair) for i, pair in enumerate(pairs)])
    usage = sum(map(len, prompts)), sum(len(completion.tokens) for completion in done)
    return response_body("text_completion", name, request.model or service.model.name, built, usage)


async def stream(service: CompletionService, name: str, request: CompletionRequest) -> AsyncIterator[JsonBody]:
    """Stream the response. Raises BadRequest before the first chunk, EngineError."""
    prompts = await _prompts(service, request)
    samples = [(ids, p) for ids in prompts for p in choices(_params(service, request, ids), request.n)]
    rules = _text_rules(service, request)
    texts = [StreamedText(rules) for _ in samples]
    names = service.token_names(request)
    chunk = partial(response_body, "text_completion", name, request.model or service.model.name)
    with service.use_adapter(request.model) as adapter:
        async for i, piece in service.stream(name, samples, adapter):
            offset, first = len(texts[i].shown), not texts[i].tokens
            choice = _bare_choice(i, texts[i].add(piece.tokens, piece.finish_reason), piece.finish_reason)
            if request.logprobs is not None:
                choice["logprobs"] = text_logprobs(names, Scored.of(piece), offset)
            if request.return_token_ids:
                choice["token_ids"] = list(piece.tokens)
                choice["prompt_token_ids"] = list(samples[i][0]) if first else None
            yield chunk([choice])
    if request.stream_options is not None and request.stream_options.include_usage:
        yield chunk([], (sum(map(len, prompts)), sum(len(text.tokens) for text in texts)))


def _bare_choice(index: int, text: str, finish: str | None) -> JsonBody:
    head = {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    return head | dict.fromkeys(("token_ids", "prompt_logprobs", "prompt_token_ids", "weight_versions"))


def _text_rules(service: CompletionService, request: CompletionRequest) -> TextRules:
    keep_stop, skip_special = request.include_stop_str_in_output, request.skip_special_tokens
    return TextRules(service.model.tokenizer, request.stops, keep_stop=keep_stop, skip_special=skip_special)


async def _prompts(service: CompletionService, request: CompletionRequest) -> list[tuple[int, ...]]:
    if (num := len(request.prompts) * request.n) > _MAX_CHOICES:
        raise BadRequest(f"The request has {num} choices; the maximum is {_MAX_CHOICES}.")
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
    num = request.num_prompt_top
    if num is None:
        return None
    scores, top = await service.engine.score_top(ids, num, adapter=adapter)
    return Scored(ids, [None, *scores[1:]], top)


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
    choice = _bare_choice(index, text, done.finish_reason)
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
