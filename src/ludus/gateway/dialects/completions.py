"""OpenAI's legacy completions: the reply is the text after a prompt, as text or token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ludus.gateway.dialects.base import Dialect, Event, Histories, Sent, SessionRequest, SessionSampling, unsent
from ludus.gateway.protocol.bodies import BadRequest, CompletionRequest, JsonBody, read_body, response_body, text_choice
from ludus.rollouts.agent_session import PendingTurn, ReplyLimits

_REFUSED = ("echo", "logprobs", "prompt_logprobs", "stop_token_ids", "ignore_eos", "include_stop_str_in_output")
_TEXT = ("skip_special_tokens", "add_special_tokens")


class SessionCompletionRequest(SessionSampling, CompletionRequest):
    """Body of `/v1/completions` of a session."""


def parse(raw: bytes, _: Histories) -> SessionRequest:
    """Return the request of a body. Raises BadRequest. Temperature and filters are the trainer's and are ignored."""
    body = read_body(SessionCompletionRequest, raw)
    body.refuse_set(*_REFUSED, *_TEXT)
    if len(body.prompts) != 1:
        raise BadRequest("prompt must be one text or one list of token ids; send a request for each prompt.")
    (prompt,) = body.prompts
    echo = {
        "include_usage": body.stream_options is not None and body.stream_options.include_usage,
        "return_token_ids": bool(body.return_token_ids),
    }
    return SessionRequest(
        (),
        (),
        ReplyLimits(
            body.max_tokens, body.stops, body.guide, prompt=prompt if isinstance(prompt, str) else tuple(prompt)
        ),
        body.n,
        bool(body.stream),
        body.model or "policy",
        echo,
    )


def reply(request: SessionRequest, name: str, turns: Sequence[PendingTurn]) -> JsonBody:
    """Return a completion."""
    choices = [_choice(request, i, turn) for i, turn in enumerate(turns)]
    return response_body("text_completion", f"cmpl-{name}", request.model, choices, _usage(turns))


def begin(request: SessionRequest, name: str, _: int) -> list[Event]:
    """Return nothing: all chunks have text."""
    return []


def delta(request: SessionRequest, name: str, text: str, _: int) -> Event:
    """Return a chunk of text."""
    return "", response_body("text_completion", f"cmpl-{name}", request.model, [text_choice(0, text, None)])


def events(request: SessionRequest, name: str, turns: Sequence[PendingTurn], sent: Sent) -> Iterator[Event]:
    """Yield the rest of each choice after the text that was sent, and the usage if it was requested."""
    for i, turn in enumerate(turns):
        choice = _choice(request, i, turn)
        if sent.text:
            choice["text"] = unsent(turn.action.message["content"], sent.text)
        yield "", response_body("text_completion", f"cmpl-{name}", request.model, [choice])
    if request.echo["include_usage"]:
        yield "", response_body("text_completion", f"cmpl-{name}", request.model, [], _usage(turns))


def _choice(request: SessionRequest, index: int, turn: PendingTurn) -> JsonBody:
    choice = text_choice(index, turn.action.message["content"], turn.action.finish_reason)
    choice["stop_reason"] = turn.stopped_by or None
    if request.echo["return_token_ids"]:
        choice |= {"token_ids": turn.tokens, "prompt_token_ids": turn.prompt}
    return choice


def _usage(turns: Sequence[PendingTurn]) -> tuple[int, int]:
    return len(turns[0].prompt), sum(len(turn.tokens) for turn in turns)


COMPLETIONS = Dialect(parse, reply, events, begin, delta, end=b"data: [DONE]\n\n")
"""Completions."""
