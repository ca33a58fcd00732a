"""Forward passes of a Hugging Face causal language model over a ragged batch of tokens.

Linear layers use oneDNN if it is faster: in float32 torch uses Intel MKL, which uses no 512-bit registers on other
vendors' processors. oneDNN caches a kernel for each number of rows, so rows are processed in blocks of few sizes.
From `MIN_ROWS` rows on, the result of a row does not depend on the other rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx, once_differentiable
from transformers import Cache

from ludus.engines.base import DEFAULT
from ludus.engines.embedded import attention, paged_pass
from ludus.engines.embedded.attention import KernelPass, QuerySpan, RaggedPass, TorchPass, make_kernel
from ludus.engines.embedded.kv_cache import PAGE, LayerShape, PagePool
from ludus.engines.embedded.packed_linear import pack_linear
from ludus.engines.embedded.paged_pass import PassRunner
from ludus.engines.models.lora import AdapterBank, is_peft
from ludus.engines.models.vision import image_tokens, text_part
from ludus.errors import EngineError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROW_BLOCK = 16
"""Passes are padded to a multiple of this many tokens, so that a row's result does not depend on other rows."""
_AGREEMENT = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE_AGREEMENT = 0.5
"""Maximum difference of log-probabilities in the comparison; 16-bit types round much more than the others."""
_TRIAL_TOKENS = 40
MIN_ROWS = 16
"""Rows of oneDNN products are padded to a multiple of this; fewer rows use torch."""
_BLOCK_ROWS = 256  # a multiple of `MIN_ROWS`


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sequence: ids, position of the first, row of the page table, adapter, and how many of the ids
    are a draft, at the end."""

    ids: tuple[int, ...]
    start: int
    slot: int
    adapter: str = ""
    num_draft: int = 0


class ModelRunner:
    """Forward passes of one model, whose linear layers use oneDNN until `close`. Subclasses complete `__init__` within
    `with self._undo`, so that an error restores the model."""

    adapters: AdapterBank

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        first = next(model.parameters())
        self.device: torch.device = first.device
        self.dtype: torch.dtype = first.dtype
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        inner = model.get_base_model() if is_peft(model) else model
        self._parameters = inspect.signature(inner.forward).parameters
        self._selects_logits = "logits_to_keep" in self._parameters
        self._undo = ExitStack()
        self._undo.callback(restore_linear, [*pack_linear(model), *use_onednn(model)])

    def close(self) -> None:
        """Restore the model."""
        self._undo.close()


class RaggedForward(ModelRunner):
    """Forward passes over chunks of many sequences, for standard attention (full or sliding-window).

    Raises UserError for another model, or if a trial at start disagrees with a plain pass, and restores the model.
    """

    def __init__(self, model: PreTrainedModel, num_pages: int, max_tokens: int, threads: int) -> None:
        super().__init__(model)
        self._kernel: attention.Kernel | None = None
        self._paged: PassRunner | None = None
        name = type(model).__name__
        kinds = set(model.config.get_text_config().to_dict().get("layer_types") or ["full_attention"])
        with self._undo as undo:
            if unknown := sorted(kinds - {"full_attention", "sliding_attention"}):
                raise UserError(
                    f"The local engine cannot run {name}: it has {', '.join(unknown)} layers.",
                    "It runs models of full or sliding-window attention; serve others with an inference server.",
                )
            if image_tokens(model) is not None and paged_pass.runs_on(self.device):
                raise UserError(
                    f"The paged engine runs {name} on a CPU only: its passes on a GPU have no image tokens."
                )
            check_positions(model, max_tokens)
            try:
                recorder, ids = _ShapeRecorder(), torch.tensor([self._trial_ids()], device=self.device)
                with torch.inference_mode():
                    logits = model(input_ids=ids, past_key_values=recorder, use_cache=True).logits[0]
                    expected = logits.double().log_softmax(-1)
                if not (layers := recorder.layers_seen):
                    raise ValueError("it ignores the key-value cache passed to it")
                self.adapters = AdapterBank(model)
                undo.callback(self.adapters.close)
                self._default = DEFAULT if DEFAULT in self.adapters.names else ""
                if self.dtype != torch.float64 and not paged_pass.runs_on(self.device):
                    self._kernel = make_kernel(layers, max_tokens, threads)
                if self._kernel is not None:
                    undo.callback(self._kernel.close)
                # On a CPU, the kernel and sparse products need 16-bit types stored in 32 bits.
                wide = self.device.type == "cpu" and self.dtype.itemsize < torch.float32.itemsize
                dtype, transposed = torch.float32 if wide else self.dtype, self._kernel is not None
                paged = paged_pass.runs_on(self.device)
                self.pool = PagePool(layers, num_pages, dtype, self.device, transposed, padding=paged)
                if paged:
                    graphs = paged_pass.make_recorder(self.device)
                    self._paged = PassRunner(self._forward, self.pool, self.device, graphs)
                attention.register()
                part = text_part(model)
                undo.callback(part.set_attn_implementation, part.config._attn_implementation)
                part.set_attn_implementation(attention.NAME)
                difference = largest_difference(self._run_ragged_trial(), expected, self.dtype)
                self.invariant = self._is_batch_invariant()
            except (TypeError, ValueError, AttributeError, LookupError, RuntimeError, EngineError) as error:
                raise UserError(
                    f"The local engine cannot run {name}: {str(error).rstrip('.')}.",
                    "It needs a causal language model with standard attention and key-value cache.",
                ) from error
            if not difference < agreement(expected, self.dtype):
                raise UserError(
                    f"The local engine cannot run {name}: batched and plain forward passes differ by "
                    f"{difference:.2g} in log-probability.",
                    "Its attention is not standard; serve it with an inference server.",
                )
            self._undo = undo.pop_all()

    @property
    def compiled(self) -> bool:
        return self._kernel is not None

    def logits(
        self, chunks: list[Chunk], table: NDArray[np.int32], keep: NDArray[np.int64], block: int = ROW_BLOCK
    ) -> Tensor:
        """Return logits `[len(keep), V]` at the tokens `keep` of the concatenated chunks.

        `table` `[slots, M]` holds the pages of each slot, which receive the chunks' keys and values. Tokens
        and logits are padded to multiples of `block`.
        """
        if not self.pool.keys:
            self.pool.allocate()
        counts = np.array([len(chunk.ids) for chunk in chunks])
        total = int(counts.sum())
        padded = total if self._paged else self._round_up(total, block)
        ids = np.zeros(padded, dtype=np.int64)
        ids[:total] = np.concatenate([np.asarray(chunk.ids) for chunk in chunks])
        slots = np.full(padded, -1, dtype=np.int32)
        slots[:total] = np.repeat(np.array([chunk.slot for chunk in chunks], dtype=np.int32), counts)
        ends = np.cumsum(counts)
        positions = np.zeros(padded, dtype=np.int32)
        starts = np.repeat(np.array([chunk.start for chunk in chunks]) - (ends - counts), counts)
        positions[:total] = np.arange(total) + starts
        names = [chunk.adapter for chunk in chunks]
        self.adapters.select([*names, *names[-1:]], [*counts.tolist(), padded - total], padded, self.device)
        if self._paged:
            adapter = names[0] if len(set(names)) == 1 else None
            memory = (self.pool.generation, self.adapters.generation)
            return self._paged.logits((ids, slots, positions), table, keep, (adapter, memory))
        ragged: RaggedPass
        if self._kernel:
            ragged = KernelPass(self.pool, slots, positions, table, self._kernel)
        else:
            spans = tuple(
                QuerySpan(end - len(chunk.ids), end, chunk.start + len(chunk.ids), table[chunk.slot])
                for chunk, end in zip(chunks, ends.tolist(), strict=True)
            )
            pages = table[slots[:total], positions[:total] // PAGE].astype(np.int64)
            ragged = TorchPass(self.pool, spans, pages, positions[:total].astype(np.int64) % PAGE)
        rows = np.zeros(self._round_up(len(keep), block), dtype=np.int64)
        rows[: len(keep)] = keep
        where = torch.from_numpy(positions.astype(np.int64))[None]
        return self._forward(torch.from_numpy(ids)[None], where, ragged, torch.from_numpy(rows))[: len(keep)]

    def _forward(self, ids: Tensor, positions: Tensor, ragged: RaggedPass, keep: Tensor) -> Tensor:
        """Return logits `[K, V]` at the tokens `keep` `[K]` of `ids` and `positions` `[1, T]`."""
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            ragged=ragged,
            **({"logits_to_keep": keep} if self._selects_logits else {}),
        )
        logits: Tensor = output.logits[0]
        return logits if self._selects_logits else logits[keep]

    @torch.inference_mode()
    def block_for(self, pass_tokens: int) -> int:
        """Return the padding multiple that makes a token's logits bit-identical in any pass: `ROW_BLOCK`, or if that is
        not enough `pass_tokens`, the maximum size of a pass, so that all passes have one shape."""
        if not self.invariant:
            return pass_tokens
        chunks, table = [Chunk(self._trial_ids()[:1], 0, 0)], self._trial_table()
        alone, among = (self.logits(chunks, table, np.arange(1), b) for b in (ROW_BLOCK, pass_tokens))
        return ROW_BLOCK if torch.equal(alone, among) else pass_tokens

    def _round_up(self, rows: int, block: int) -> int:
        """Return the next multiple of `block`; oneDNN needs its own block size from `MIN_ROWS` rows on."""
        if rows > MIN_ROWS and uses_onednn(self.model.get_input_embeddings().weight):
            block = max(block, MIN_ROWS)
        return -(-rows // block) * block

    def _trial_ids(self) -> tuple[int, ...]:
        return tuple(i * 7 % self.vocab_size for i in range(_TRIAL_TOKENS))

    @torch.inference_mode()
    def _run_ragged_trial(self) -> Tensor:
        """Return the log-probabilities from ragged passes: two chunks, each batched with another sequence."""
        ids, cut = self._trial_ids(), _TRIAL_TOKENS // 2 + 3
        table = self._trial_table()
        other = tuple(reversed(ids))
        adapter = self._default
        first = [Chunk(other[:5], 0, 1), Chunk(ids[:cut], 0, 0, adapter)]
        second = [Chunk(ids[cut:], cut, 0, adapter), Chunk(other[5:9], 5, 1)]
        begin = self.logits(first, table, np.arange(5, 5 + cut))
        end = self.logits(second, table, np.arange(_TRIAL_TOKENS - cut))
        return torch.cat([begin, end]).double().log_softmax(-1)

    @torch.inference_mode()
    def _is_batch_invariant(self) -> bool:
        """Return whether a token's logits are bit-identical alone and at several positions in a batch."""
        if self.device.type != "cpu":
            return False
        ids, table = self._trial_ids(), self._trial_table()
        alone = self.logits([Chunk(ids[:1], 0, 0)], table, np.arange(1))
        for before in (1, 17, 38):
            chunks = [Chunk((ids * 4)[1 : before + 1], 0, 1), Chunk(ids[:1], 0, 0), Chunk(ids[2:39], 0, 2)]
            among = self.logits(chunks, table, np.array([0, before]))
            if not torch.equal(among[1], alone[0]):
                return False
        return True

    def _trial_table(self) -> NDArray[np.int32]:
        each = -(-_TRIAL_TOKENS // PAGE)
        pages = np.arange(3 * each, dtype=np.int32).reshape(3, each)
        return np.minimum(pages, self.pool.keys[0].shape[0] - 1)


class _ShapeRecorder(Cache):
    """Cache without storage that records the shape of each layer's keys and values."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layers_seen: list[LayerShape] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        if layer_idx != len(self.layers_seen):
            raise ValueError("its layers do not fill the key-value cache in order")
        self.layers_seen.append(LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3]))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def agreement(expected: Tensor, dtype: torch.dtype) -> float:
    """Return how much two passes may differ in log-probability; less if all log-probabilities `expected` are close."""
    return _AGREEMENT.get(dtype, _COARSE_AGREEMENT) * min(1.0, float(expected.std()))


def largest_difference(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Return the largest difference of log-probabilities `[..., V]`. With 16-bit weights it is the largest root mean
    square over the vocabulary, since improbable tokens among many differ by more than 0.5 nats from rounding alone."""
    difference = (actual - expected).abs()
    if dtype.itemsize < torch.float32.itemsize:
        difference = difference.square().mean(-1).sqrt()
    return float(difference.max())


def check_positions(model: PreTrainedModel, max_tokens: int) -> None:
    """Raise UserError if within `max_tokens` the positions depend on the longest sequence of a pass (`dynamic` and
    `longrope`): the log-probabilities of a token would then change as its sequence grows."""
    config = model.config.get_text_config().to_dict()
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    limit = config.get("max_position_embeddings") if kind == "dynamic" else None
    if kind == "longrope":
        limit = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if limit is not None and max_tokens > limit:
        raise UserError(
            f"The local engine cannot run {type(model).__name__} with a context of {max_tokens} tokens: beyond "
            f"{limit}, its positions depend on the longest sequence ({kind} rope).",
            f"Set rollout.max_seq_len to at most {limit}.",
        )


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply `rows` `[..., in]` by `weight` `[out, in]` and add `bias` `[out]`, as torch up to rounding."""
    if rows.numel() < MIN_ROWS * weight.shape[1] or rows.dtype != weight.dtype or not uses_onednn(weight):
        return nn.functional.linear(rows, weight, bias)
    flat = rows.reshape(-1, rows.shape[-1])
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (rows, weight, bias)):
        (out,) = apply(_Linear, flat, weight, bias)
    else:
        out = _multiply_blocks(flat, weight, bias)
    return out.view(*rows.shape[:-1], -1)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply `left` `[m, k]` by `right` `[k, n]` without gradient; either may be transposed."""
    return _multiply_blocks(left, right.t(), None) if uses_onednn(right) else left @ right


def outer_sum(left: Tensor, right: Tensor) -> Tensor:
    """Sum the outer products of rows: `left` `[r, m]` transposed, times `right` `[r, n]`; `[m, n]`."""
    if not uses_onednn(right) or len(left) < _BLOCK_ROWS:
        return left.t() @ right
    whole = len(left) // _BLOCK_ROWS * _BLOCK_ROWS
    total = torch.mm(left[whole:].t(), right[whole:])
    for a, b in zip(torch.split(left[:whole], _BLOCK_ROWS), torch.split(right[:whole], _BLOCK_ROWS), strict=True):
        total += _multiply(a.t(), b.t(), None)
    return total


def uses_onednn(weight: Tensor) -> bool:
    """Return whether products with `weight` use oneDNN."""
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and bool(torch.backends.mkldnn.enabled)
        and is_faster()
    )


@functools.cache
def is_faster() -> bool:
    """Return whether the CPU has AVX-512 but is not from Intel. Not benchmarked, so that runs are reproducible."""
    try:
        operator = torch.ops.mkldnn._linear_pointwise
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except (AttributeError, OSError):
        return False
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return callable(operator) and torch._C.has_mkl and wide and "GenuineIntel" not in processor


class OneDnnLinear(nn.Linear):
    """A linear layer computed by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> list[nn.Linear]:
    """Switch a model's plain linear layers to `linear` and return them, for `restore_linear`."""
    plain = [m for m in model.modules() if type(m) is nn.Linear] if is_faster() else []
    for layer in plain:
        layer.__class__ = OneDnnLinear
    return plain


def restore_linear(layers: Iterable[nn.Linear]) -> None:
    """Restore layers changed by `use_onednn` or `pack_linear`."""
    for layer in layers:
        layer.__class__ = nn.Linear
        layer.__dict__.pop("packed", None)


def apply(function: type[Function], *inputs: object) -> tuple[Tensor, ...]:
    """Apply a custom autograd function."""
    out: Tensor | tuple[Tensor, ...] = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return out if isinstance(out, tuple) else (out,)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _Linear(Function):
    """Linear layer with gradients for rows `[r, in]`, weight `[out, in]` and bias."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _multiply_blocks(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad
        upstream = upstream.contiguous()
        to_rows = product(upstream, weight) if needs_grad[0] else None
        to_weight = outer_sum(upstream, rows) if needs_grad[1] else None
        return to_rows, to_weight, upstream.sum(0) if needs_grad[2] else None


def _multiply_blocks(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply in blocks of `_BLOCK_ROWS` rows, the last one padded to a multiple of `MIN_ROWS`; `[r, out]`."""
    count = len(rows)
    if count <= _BLOCK_ROWS and count % MIN_ROWS == 0:
        return _multiply(rows, weight, bias)
    out = rows.new_empty(count, weight.shape[0])
    for start in range(0, count, _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        missing = -len(block) % MIN_ROWS
        if missing:
            block = nn.functional.pad(block, (0, 0, 0, missing))
        out[start : start + _BLOCK_ROWS] = _multiply(block, weight, bias)[: len(block) - missing]
    return out


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return out
