"""Forward passes of a Hugging Face causal language model over a ragged batch of tokens.

Supports models with standard attention (full or sliding-window) that use transformers' attention interface.
`RaggedForward` compares a paged pass with a plain pass on a few tokens at start, and rejects the model if
they disagree.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

from ludus.engines.base import DEFAULT
from ludus.engines.embedded import attention
from ludus.engines.embedded.attention import Kernel, QuerySpan, RaggedPass, TorchPass, make_kernel
from ludus.engines.embedded.kv_cache import PAGE, LayerShape, PagePool
from ludus.engines.embedded.onednn_linear import MIN_ROWS, restore_linear, use_onednn, uses_onednn
from ludus.engines.models.lora import AdapterBank, is_peft
from ludus.errors import EngineError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROW_BLOCK = 16
"""Passes are padded to a multiple of this many tokens, so that matrix products treat every row alike."""
_AGREEMENT = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE_AGREEMENT = 0.5
"""Maximum difference of log-probabilities in the comparison; 16-bit types round much more than the others."""
_TRIAL_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sequence: ids, position of the first, row of the page table, adapter."""

    ids: tuple[int, ...]
    start: int
    slot: int
    adapter: str = ""


class RaggedForward:
    """Logits of selected tokens of a pass over chunks of many sequences.

    `pool` is the page memory. `max_tokens` bounds a sequence. Raises `UserError` for an unsupported model.
    """

    def __init__(self, model: PreTrainedModel, num_pages: int, max_tokens: int, threads: int) -> None:
        self.model = model
        first = next(model.parameters())
        self.device: torch.device = first.device
        self.dtype: torch.dtype = first.dtype
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self._selects_logits = "logits_to_keep" in inspect.signature(_base_model(model).forward).parameters
        self._original_attention = model.config._attn_implementation
        _check_kind(model)
        self._onednn_layers = use_onednn(model)
        name = type(model).__name__
        try:
            plain, layers = self._run_plain_trial()
            self.adapters = AdapterBank(model)
            self._default = DEFAULT if DEFAULT in self.adapters.names else ""
            self._kernel = self._make_kernel(layers, max_tokens, threads)
            self.pool = self._make_pool(layers, num_pages)
            attention.register()
            model.set_attn_implementation(attention.NAME)
            difference = float((self._run_ragged_trial() - plain).abs().max())
            self.invariant = self._rows_are_alike()
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError, EngineError) as error:
            raise UserError(
                f"The local engine cannot run {name}: {error}.",
                "It needs a causal language model with standard attention and key-value cache.",
            ) from error
        if not difference < _AGREEMENT.get(self.dtype, _COARSE_AGREEMENT):
            raise UserError(
                f"The local engine cannot run {name}: batched and plain forward passes differ by "
                f"{difference:.2g} in log-probability.",
                "Its attention is not standard; serve it with an inference server.",
            )

    @property
    def compiled(self) -> bool:
        """Whether the compiled attention kernel is used."""
        return self._kernel is not None

    def logits(
        self, chunks: list[Chunk], table: NDArray[np.int32], keep: NDArray[np.int64], block: int = ROW_BLOCK
    ) -> Tensor:
        """Return logits `[len(keep), V]` at the tokens `keep` of the concatenated chunks.

        `table` `[slots, M]` holds the pages of each slot, which receive the chunks' keys and values. Tokens
        and logits are padded to multiples of `block`.
        """
        if not self.pool.is_allocated:
            self.pool.allocate()
        counts = np.array([len(chunk.ids) for chunk in chunks])
        total = int(counts.sum())
        padded = self._round_up(total, block)
        ids = np.zeros((1, padded), dtype=np.int64)
        ids[0, :total] = np.concatenate([np.asarray(chunk.ids) for chunk in chunks])
        slots = np.full(padded, -1, dtype=np.int32)
        slots[:total] = np.repeat(np.array([chunk.slot for chunk in chunks], dtype=np.int32), counts)
        ends = np.cumsum(counts)
        positions = np.zeros(padded, dtype=np.int32)
        starts = np.repeat(np.array([chunk.start for chunk in chunks]) - (ends - counts), counts)
        positions[:total] = np.arange(total) + starts
        how = self._kernel or self._torch_pass(chunks, ends.tolist(), table, (slots[:total], positions[:total]))
        ragged = RaggedPass(self.pool, slots, positions, table, how)
        rows = np.zeros(self._round_up(len(keep), block), dtype=np.int64)
        rows[: len(keep)] = keep
        index = torch.from_numpy(rows).to(self.device)
        names = [chunk.adapter for chunk in chunks]
        self.adapters.select([*names, *names[-1:]], [*counts.tolist(), padded - total], padded, self.device)
        output = self.model(
            input_ids=torch.from_numpy(ids).to(self.device),
            position_ids=torch.from_numpy(positions.astype(np.int64))[None].to(self.device),
            use_cache=False,
            ragged=ragged,
            **({"logits_to_keep": index} if self._selects_logits else {}),
        )
        logits: Tensor = output.logits[0]
        return (logits if self._selects_logits else logits[index])[: len(keep)]

    @torch.inference_mode()
    def block_for(self, pass_tokens: int) -> int:
        """Return the padding multiple that makes a token's logits bit-identical in any pass.

        That is `pass_tokens`, the maximum size of a pass, if `ROW_BLOCK` is not enough: all passes then have
        one shape.
        """
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

    def close(self) -> None:
        """Stop the kernel's threads and restore the model."""
        if self._kernel is not None:
            self._kernel.close()
        self.adapters.close()
        self.model.set_attn_implementation(self._original_attention)
        restore_linear(self._onednn_layers)

    def _make_kernel(self, layers: list[LayerShape], max_tokens: int, threads: int) -> Kernel | None:
        if self.device.type != "cpu" or self.dtype != torch.float32:
            return None
        return make_kernel(layers, layers[0].key_width, max_tokens, threads)

    def _make_pool(self, layers: list[LayerShape], num_pages: int) -> PagePool:
        """Create the page memory. On a CPU, sparse products need 16-bit types stored in 32 bits."""
        wide = self.device.type == "cpu" and self.dtype.itemsize < torch.float32.itemsize
        dtype = torch.float32 if wide else self.dtype
        return PagePool(layers, num_pages, dtype, self.device, transposed=self._kernel is not None)

    def _torch_pass(
        self,
        chunks: list[Chunk],
        ends: list[int],
        table: NDArray[np.int32],
        tokens: tuple[NDArray[np.int32], NDArray[np.int32]],
    ) -> TorchPass:
        """Create the pass for torch attention: `ends` of the chunks, slots and positions of the `tokens`."""
        spans = tuple(
            QuerySpan(end - len(chunk.ids), end, chunk.start + len(chunk.ids), table[chunk.slot])
            for chunk, end in zip(chunks, ends, strict=True)
        )
        slots, positions = tokens
        pages = table[slots, positions // PAGE].astype(np.int64)
        return TorchPass(self.pool, spans, pages, positions.astype(np.int64) % PAGE)

    @torch.inference_mode()
    def _run_plain_trial(self) -> tuple[Tensor, list[LayerShape]]:
        """Return log-probabilities of a few tokens by the model's own attention, and its layers' shapes."""
        recorder = _ShapeRecorder()
        ids = torch.tensor([self._trial_ids()], device=self.device)
        logits = self.model(input_ids=ids, past_key_values=recorder, use_cache=True).logits[0]
        if not recorder.layers_seen:
            raise ValueError("it ignores the key-value cache passed to it")
        return logits.double().log_softmax(-1), recorder.layers_seen

    def _trial_ids(self) -> tuple[int, ...]:
        return tuple(i * 7 % self.vocab_size for i in range(_TRIAL_TOKENS))

    @torch.inference_mode()
    def _run_ragged_trial(self) -> Tensor:
        """Return the same by ragged passes: in two chunks, each batched with another sequence."""
        ids, cut = self._trial_ids(), _TRIAL_TOKENS // 2 + 3
        table = self._trial_table()
        other = tuple(reversed(ids))
        mine = self._default
        first = [Chunk(other[:5], 0, 1), Chunk(ids[:cut], 0, 0, mine)]
        second = [Chunk(ids[cut:], cut, 0, mine), Chunk(other[5:9], 5, 1)]
        parts = [
            self.logits(first, table, np.arange(5, 5 + cut)),
            self.logits(second, table, np.arange(_TRIAL_TOKENS - cut)),
        ]
        return torch.cat(parts).double().log_softmax(-1)

    @torch.inference_mode()
    def _rows_are_alike(self) -> bool:
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


class _ShapeRecorder(Cache):  # type: ignore[misc]
    """Stores nothing; records the shape of each layer's keys and values."""

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


def _base_model(model: PreTrainedModel) -> Any:  # noqa: ANN401 (a model, or a PEFT model's inner one)
    """Return the model below the adapters."""
    return model.get_base_model() if is_peft(model) else model


def _check_kind(model: PreTrainedModel) -> None:
    """Raise UserError for unsupported layer kinds or position embeddings."""
    config = model.config.get_text_config().to_dict()
    kinds = set(config.get("layer_types") or ["full_attention"])
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(
            f"The local engine cannot run {type(model).__name__}: it has {', '.join(unknown)} layers.",
            "It runs models of full or sliding-window attention; serve others with an inference server.",
        )
    rope = config.get("rope_parameters") or {}
    if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
        raise UserError(
            f"The local engine cannot run {type(model).__name__}: its positions depend on the longest "
            f"sequence ({rope['rope_type']} rope).",
            "Serve it with an inference server.",
        )
