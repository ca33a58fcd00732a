"""Sample tokens from logits, vectorized over a batch, with per-request randomness.

Token `t` of an action uses only the uniform number with counter (request seed, t). Two log-probabilities are
recorded: of the tempered distribution over the whole vocabulary, and of the distribution sampled from, after guide,
top-k, top-p and min-p. Greedy rows (temperature 0) record both at temperature 1, with only the guide applied.
"""

from __future__ import annotations

import importlib.util
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.chat.parse_json import JSON_STYLE
from ludus.engines.base import Request, first_line
from ludus.errors import EngineError, RequestRejected, UserError
from ludus.types import Guide, SamplingParams, TopLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CACHE_SIZE = 128


class GuideState:
    """State of one action's guide, a JSON schema, regular expression or grammar that masks tokens.

    The automata are llguidance's (extra `guided`). `Completion.cut_logprobs` come from the masked
    distribution, `logprobs` from the unmasked one.
    """

    def __init__(self, matcher: Any, stop_token_ids: tuple[int, ...]) -> None:  # noqa: ANN401 (untyped)
        self._matcher = matcher
        self._stops = stop_token_ids

    @property
    def ended(self) -> bool:
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


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_WORD = (1 << 64) - 1
_BLOCK = 64
"""Tokens per block in the search for the sampled token."""
_CPU_LOGITS = 524_288
"""Logits processed at once on a CPU: they stay in its cache, and their memory is used again."""


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the splitmix64 finalizer (Steele, Lea and Flood 2014) elementwise."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def seed_words(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """Hash seeds of any size and sign to 64-bit words, `[B]`."""
    words = np.array([seed & _WORD for seed in seeds], dtype=np.uint64)
    return _mix(words + _GOLDEN)


def uniforms(words: NDArray[np.uint64], steps: int | NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) per row, `[B]`, with counter (seed word, step): 53 bits of splitmix64."""
    counters = np.atleast_1d(np.asarray(steps, dtype=np.uint64)) + np.uint64(1)
    offset = _GOLDEN * counters
    draws: NDArray[np.float64] = (_mix(words + offset) >> np.uint64(11)).astype(np.float64)
    return draws * 2.0**-53


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """Sampling parameters of a batch as arrays.

    `words` `[B]` uint64; `temperature` `[B, 1]` (1 on greedy rows), `top_k` `[B, 1]` (vocabulary size if
    off), `top_p` and `min_p` `[B, 1]` float64; `greedy` and `cut` (top-k, top-p or min-p set) `[B]` bool;
    `num_top` the number of top log-probabilities per row.
    """

    words: NDArray[np.uint64]
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: Tensor
    cut: Tensor
    all_greedy: bool
    any_greedy: bool
    any_cut: bool
    any_tempered: bool
    num_top: tuple[int, ...]
    any_top: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingRules:
        greedy = [p.temperature == 0 for p in params]
        cut = [p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params]

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        return cls(
            words=seed_words([p.seed for p in params]),
            temperature=column([p.temperature or 1.0 for p in params], torch.float64),
            top_k=column([min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float64),
            min_p=column([p.min_p for p in params], torch.float64),
            greedy=torch.tensor(greedy, device=device),
            cut=torch.tensor(cut, device=device),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            any_cut=any(cut),
            any_tempered=any(p.temperature not in (0, 1) for p in params),
            num_top=tuple(p.top_logprobs for p in params),
            any_top=any(p.top_logprobs for p in params),
        )

    def rows(self, part: slice) -> SamplingRules:
        """Return the rules of some rows."""
        return replace(
            self,
            words=self.words[part],
            temperature=self.temperature[part],
            top_k=self.top_k[part],
            top_p=self.top_p[part],
            min_p=self.min_p[part],
            greedy=self.greedy[part],
            cut=self.cut[part],
            num_top=self.num_top[part],
            any_top=any(self.num_top[part]),
        )


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """Token ids `[B]` int64, their log-probabilities `[B]` in the plain and the cut distribution, and `top_tokens` of
    the plain one (empty if no row requests it)."""

    tokens: Tensor
    logprobs: Tensor
    cut_logprobs: Tensor
    top: Sequence[TopLogprobs] = ()


def sample(
    logits: Tensor, rules: SamplingRules, steps: int | NDArray[np.uint64], allowed: Tensor | None = None
) -> TokenDraw:
    """Sample token number `steps` (one for all, or `[B]`) of each action from `logits` `[B, V]`.

    `allowed` `[B, V]` bool is the guide's mask. Log-probabilities are float32 (float64 for float64 logits). A
    greedy row takes the largest logit; ties go to the lowest id.
    """
    size = max(1, _CPU_LOGITS // logits.shape[1])
    if logits.device.type != "cpu" or len(logits) <= size:
        return _sample_rows(logits, rules, steps, allowed)
    counters = np.broadcast_to(np.asarray(steps, dtype=np.uint64), len(logits))
    draws = []
    for first in range(0, len(logits), size):
        part = slice(first, first + size)
        mask = None if allowed is None else allowed[part]
        draws.append(_sample_rows(logits[part], rules.rows(part), counters[part], mask))
    return TokenDraw(
        torch.cat([draw.tokens for draw in draws]),
        torch.cat([draw.logprobs for draw in draws]),
        torch.cat([draw.cut_logprobs for draw in draws]),
        [top for draw in draws for top in (draw.top or [()] * len(draw.tokens))] if rules.any_top else (),
    )


def _sample_rows(
    logits: Tensor, rules: SamplingRules, steps: int | NDArray[np.uint64], allowed: Tensor | None
) -> TokenDraw:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    tempered = logits / rules.temperature.to(logits.dtype) if rules.any_tempered else logits
    logprobs = torch.log_softmax(tempered, dim=-1)
    top = top_tokens(logprobs, rules.num_top) if rules.any_top else ()
    best = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
    if rules.all_greedy and allowed is None:
        tokens = best.argmax(dim=-1)
        plain = _gather(logprobs, tokens)
        return TokenDraw(tokens, plain, plain, top)
    probs = logprobs.exp()
    if allowed is not None:
        probs = probs.masked_fill(~allowed, 0.0)
    if rules.any_cut:
        probs = torch.where(rules.cut[:, None], _cut(probs, rules), probs.double())
    tokens, total = _draw(probs, rules, steps)
    if rules.any_greedy:
        tokens = torch.where(rules.greedy, best.argmax(dim=-1), tokens)
    plain = _gather(logprobs, tokens)
    if allowed is None and not rules.any_cut:
        return TokenDraw(tokens, plain, plain, top)
    cut_probs = _gather(probs, tokens).double() / total
    changed = rules.cut if allowed is None else rules.cut | ~allowed.all(dim=-1)
    return TokenDraw(tokens, plain, torch.where(changed, cut_probs.log().to(plain.dtype), plain), top)


def top_tokens(logprobs: Tensor, nums: Sequence[int]) -> list[TopLogprobs]:
    """Return the `nums[b]` most likely tokens of each row of `logprobs` `[B, V]`, without those of zero probability.
    Some `nums` must be positive. The result of a row depends on that row only."""
    requested = [row for row, num in enumerate(nums) if num > 0]
    rows = logprobs if len(requested) == len(nums) else logprobs[requested]
    num_top = min(max(nums), rows.shape[1])
    values, tokens = rows.topk(num_top, dim=-1)
    # `topk` breaks ties at the end arbitrarily: take all tied tokens, then keep the lowest ids.
    num_tied = int((rows >= values[:, -1:]).sum(-1).max())
    if num_tied > num_top:
        values, tokens = rows.topk(num_tied, dim=-1)
    tokens, order = tokens.sort(dim=-1)
    values, by_value = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(1, by_value)[:, :num_top]
    found: list[TopLogprobs] = [()] * len(nums)
    for row, ids, row_values in zip(requested, tokens.tolist(), values[:, :num_top].tolist(), strict=True):
        pairs = zip(ids[: nums[row]], row_values[: nums[row]], strict=True)
        found[row] = tuple((token, logprob) for token, logprob in pairs if logprob > -math.inf)
    return found


def _gather(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(1, tokens[:, None])[:, 0]


def _draw(probs: Tensor, rules: SamplingRules, steps: int | NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution of `probs` `[B, V]` at one uniform number per row.

    Returns tokens `[B]` and row sums `[B]`, float64. It searches the sums of blocks first, then one block per
    row, since a cumulative sum over the vocabulary is the most expensive part of sampling. The terms of a block are
    summed in the type of `probs`, blocks in float64.
    """
    rows, vocabulary = probs.shape
    blocks = torch.nn.functional.pad(probs, (0, -vocabulary % _BLOCK)).view(rows, -1, _BLOCK)
    sums = blocks.sum(-1).double().cumsum(-1)
    points = torch.from_numpy(uniforms(rules.words, steps)).to(probs.device)[:, None] * sums[:, -1:]
    chosen = _search(sums, points)
    before = torch.where(chosen > 0, sums.gather(1, (chosen - 1).clamp(min=0)), 0.0)
    index = chosen[:, :, None].expand(-1, -1, _BLOCK)
    inside = blocks.gather(1, index)[:, 0].double().cumsum(-1)
    token = chosen * _BLOCK + _search(inside, (points - before).clamp(min=0.0))
    return token[:, 0].clamp(max=vocabulary - 1), sums[:, -1]


def _search(cumulative: Tensor, points: Tensor) -> Tensor:
    """Return the first index `[B, 1]` with a cumulative sum above the point and positive probability."""
    first = torch.searchsorted(cumulative, points, right=True)
    # Rounding may put a point on the total itself; use the last index of positive probability then.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous(), right=False)
    # With non-finite logits the index is arbitrary; the scheduler rejects their log-probability.
    return torch.minimum(first, last).clamp(max=cumulative.shape[1] - 1)


def _cut(probs: Tensor, rules: SamplingRules) -> Tensor:
    """Keep the `top_k` most likely tokens, then the fewest with total share `top_p`, then those with at least
    `min_p` times the highest probability; `[B, V]` float64."""
    ranked, order = probs.double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    ranked = ranked.masked_fill(rank >= rules.top_k, 0.0)
    ranked = ranked / ranked.sum(dim=-1, keepdim=True)
    before = ranked.cumsum(dim=-1) - ranked
    too_unlikely = (before >= rules.top_p) | (ranked < rules.min_p * ranked[:, :1])
    ranked = ranked.masked_fill(too_unlikely & (rank > 0), 0.0)
    return torch.zeros_like(ranked).scatter_(1, order, ranked)


class StopStrings:
    """Matcher of stop strings against growing token lists: decodes their tail if the last token can end a stop
    string. SentencePiece tokenizers omit a leading space of an action's text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        # Each byte of a stop string may be a separate token; 4 extra tokens complete the first character.
        self._window_tokens = max((len(text.encode()) for text in self._stop), default=0) + 4
        self._last_characters = frozenset(text[-1] for text in self._stop)
        self._check_all = not all(character.isascii() for character in self._last_characters)
        self._may_end: dict[int, bool] = {}

    def completed(self, tokens: Sequence[int]) -> bool:
        """Return True if the last of `tokens` (the action so far) completes a stop string."""
        last = tokens[-1]
        may_end = self._may_end.get(last)
        if may_end is None:
            text = self._decode([last, last])  # decoded alone, a token may lose its leading space
            may_end = self._check_all or not self._last_characters.isdisjoint(text)
            self._may_end[last] = may_end
        if not may_end:
            return False
        tail = self._decode(list(tokens[-self._window_tokens :]))
        return any(text in tail for text in self._stop)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
