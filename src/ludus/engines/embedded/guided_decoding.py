"""Guided decoding: mask tokens that would violate a JSON schema, regular expression or grammar.

The automata are llguidance's (extra `guided`). `Completion.cut_logprobs` come from the masked
distribution, `logprobs` from the unmasked one.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ludus.chat.parse_json import JSON_STYLE
from ludus.engines.base import Request, first_line
from ludus.errors import EngineError, RequestRejected, UserError
from ludus.types import Guide

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_CACHE_SIZE = 128


class GuideState:
    """Matcher state of one action."""

    def __init__(self, matcher: Any, stop_token_ids: tuple[int, ...]) -> None:  # noqa: ANN401 (untyped)
        self._matcher = matcher
        self._stops = stop_token_ids

    @property
    def ended(self) -> bool:
        """Whether the guide allows no further token."""
        return bool(self._matcher.is_stopped())

    def advance(self, token: int) -> None:
        """Advance by a sampled token. Raises EngineError if the guide does not allow it."""
        if token not in self._stops and not self._matcher.consume_token(token):
            raise EngineError(f"The guide failed: {first_line(self._matcher.get_error() or 'unknown error')}.")

    def allowed(self, vocab_size: int) -> np.ndarray:
        """Return the mask of allowed next tokens, `[vocab_size]` bool; with stop ids if the action may end."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(packed, count=min(vocab_size, 8 * len(packed)), bitorder="little").astype(bool)
        allowed = np.zeros(vocab_size, dtype=bool)
        allowed[: len(bits)] = bits
        if self._matcher.is_accepting():
            allowed[[token for token in self._stops if token < vocab_size]] = True
        if not allowed.any():
            raise EngineError("The guide allows no next token, and the request has no stop token.")
        return allowed


class GuideCompiler:
    """Compiler of guides for one tokenizer. Raises UserError if the extra `guided` is not installed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise UserError("A guide needs llguidance.", "Install it: pip install 'ludus[guided]'.")
        import llguidance
        import llguidance.hf

        self._library = llguidance
        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer)
        self._lock = threading.Lock()
        self._matcher = lru_cache(_CACHE_SIZE)(self._compile)

    def start(self, guide: Guide, stop_token_ids: tuple[int, ...]) -> GuideState:
        """Return the initial state of an action. Raises RequestRejected for an invalid guide."""
        return GuideState(self._matcher(guide).deep_copy(), stop_token_ids)

    def start_all(self, requests: Sequence[Request]) -> list[GuideState | None]:
        """Return the state of each action, including resumed ones; None without a guide. Thread-safe."""
        states: list[GuideState | None] = []
        with self._lock:
            for request in requests:
                guide, state = request.params.guide, None
                if guide is not None:
                    state = self.start(guide, request.params.stop_token_ids)
                    for token in request.token_ids[len(request.token_ids) - request.begun :]:
                        state.advance(token)
                states.append(state)
        return states

    def _compile(self, guide: Guide) -> Any:  # noqa: ANN401 (the library has no types)
        matcher_class = self._library.LLMatcher
        try:
            if guide.kind == "json_schema":
                grammar = matcher_class.grammar_from_json_schema(guide.text, defaults=JSON_STYLE["x-guidance"])
            elif guide.kind == "regex":
                grammar = matcher_class.grammar_from_regex(guide.text)
            else:
                grammar = matcher_class.grammar_from_lark(guide.text)
            matcher = matcher_class(self._tokenizer, grammar)
            problem = matcher.get_error()
        except ValueError as error:
            problem = str(error)
        if problem:
            raise RequestRejected(f"The {guide.kind.replace('_', ' ')} of the guide is invalid: {first_line(problem)}.")
        return matcher
