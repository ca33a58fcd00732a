"""Log-probabilities of tokens under a Hugging Face causal language model, with gradient.

Rows are packed as a forest (no padding, shared prefixes computed once) and only scored positions pass through the
output layer, in chunks, if that reproduces the model's logits in a trial; otherwise rows are padded.
Activation checkpointing needs transformers' training mode, which would also enable dropout, so only the layers' own
flags are switched during a forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.kl import FULL_KL_NAMES
from ludus.algorithms.token_statistics import LOGIT_STATISTICS
from ludus.engines.base import DEFAULT
from ludus.engines.embedded.model_runner import OneDnnLinear, agreement, use_onednn
from ludus.engines.models.lora import adapters_in_use, is_peft, role_adapters, use_adapter
from ludus.engines.models.vision import text_part
from ludus.errors import LearnerError, UserError
from ludus.images import IMAGE_IDS
from ludus.training.batches import prefix_packing
from ludus.training.batches.chunked_lm_head import (
    CHUNK_LOGITS,
    Divergence,
    DivergenceTarget,
    Entropy,
    HiddenStates,
    LmHead,
    TokenScores,
    divergence,
    logits_to_scores,
)
from ludus.training.batches.rows import BREAK, Microbatch, TeacherView, split_paths
from ludus.training.distributed.collectives import is_sharded, run_as_forward
from ludus.training.learner.moe_routing_replay import RoutingReplay

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Float64(TorchFunctionMode):
    """Function mode that replaces float32 by float64, to which transformers casts norms, rotary angles and routers."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        del types
        if func is Tensor.float:
            func = Tensor.double
        return func(
            *(_widen(value) for value in args), **{name: _widen(value) for name, value in (kwargs or {}).items()}
        )


def in_float64(module: nn.Module) -> AbstractContextManager[object]:
    """Return `Float64()` if the weights of `module` are float64, otherwise a null context."""
    return Float64() if next(module.parameters()).dtype == torch.float64 else nullcontext()


def _widen(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


class Checkpointable(Protocol):
    """Interface of transformers' `GradientCheckpointingLayer`."""

    training: bool
    gradient_checkpointing: bool
    _gradient_checkpointing_func: Callable[..., object]


def checkpointable_layers(model: PreTrainedModel) -> list[Checkpointable]:
    """Return the layers that support checkpointing. Raises UserError if there are none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no layers that support activation checkpointing.",
            "Unset model.activation_checkpointing.",
        )
    return layers


@contextmanager
def checkpointed(layers: Sequence[Checkpointable]) -> Iterator[None]:
    """Checkpoint `layers` in forward passes within the block; passes without gradient are unchanged."""
    if not layers or not torch.is_grad_enabled():
        yield
        return
    modes = [layer.training for layer in layers]
    for layer in layers:
        contexts = functools.partial(_contexts, layer)
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
        layer.gradient_checkpointing = True
        layer.training = True
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.gradient_checkpointing = False
            layer.training = mode


def _contexts(layer: Checkpointable) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return the contexts of a layer's forward pass and of its recomputation."""
    assert isinstance(layer, nn.Module)
    return nullcontext(), _recomputation(layer, adapters_in_use(layer))


@contextmanager
def _recomputation(layer: nn.Module, adapters: Sequence[str]) -> Iterator[None]:
    """Compute again with these adapters and in the precision of the pass, whose function mode has ended."""
    with in_float64(layer), use_adapter(layer, *adapters):
        yield


_TRIAL_TOKENS = 24
_Comparison = tuple[TokenScores, dict[str, Tensor]]


def _add_scores(left: _Comparison, right: _Comparison) -> _Comparison:
    (a, others), (b, more) = left, right
    entropy = None if a.entropy is None or b.entropy is None else a.entropy + b.entropy
    return TokenScores(a.logprobs + b.logprobs, entropy), {name: one + more[name] for name, one in others.items()}


@dataclass
class LogprobScorer:
    """Score tokens under `model` at `temperature`; used by the learner, the reference and the teacher.

    `recompute` enables activation checkpointing. `routing` receives the position of rows in each pass.
    """

    model: PreTrainedModel
    temperature: float = 1.0
    recompute: bool = False
    routing: RoutingReplay | None = None
    shares_prefixes: bool = field(default=False, init=False)
    """Whether rows are packed as a forest; otherwise they are padded."""
    _policies: Mapping[str, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._has_roles = bool(role_adapters(self.model))
        self._layers = checkpointable_layers(self.model) if self.recompute else []
        prefix_packing.register()
        use_onednn(self.model)
        if is_peft(self.model):
            from ludus.training.learner.fused_lora import fuse_lora

            fuse_lora(self.model)
        self._body = _body(self.model)
        head = self.model.get_output_embeddings()
        self._head: nn.Linear | None = head if type(head) in (nn.Linear, OneDnnLinear) else None
        self.shares_prefixes = self._body is not None and self._head is not None and self._trial()

    @contextmanager
    def using(self, policies: Mapping[str, Tensor]) -> Iterator[None]:
        """Score the tokens of a microbatch, with their context, under the adapters of their `Microbatch.policies`."""
        self._policies = policies if self._has_roles else {}
        try:
            yield
        finally:
            self._policies = {}

    def score(self, tokens: Tensor, scored: Tensor, entropy: Entropy = "none") -> TokenScores:
        """Return log-probabilities (natural, float32 or better) of the tokens `[B, L]` marked in `scored`.

        The first token of a row has no context and scores 0, as do image tokens. Tokens after a row's last marked one
        are ignored. `entropy` adds the entropy of the full distribution, in nats.
        """
        return self.compare(tokens, scored, entropy, {})[0]

    def compare(
        self, tokens: Tensor, scored: Tensor, entropy: Entropy, against: Mapping[str, DivergenceTarget]
    ) -> tuple[TokenScores, dict[str, Tensor]]:
        """Return the scores, and by name the divergences `[B, L]` from other models. Raises as `distributions`."""

        def compare_own(own: Tensor) -> _Comparison:
            targets = against if own is scored else {name: one.of(own, scored) for name, one in against.items()}
            return self._compare(tokens, own, entropy, targets)

        return self._sum_over_policies(scored, compare_own)

    def _sum_over_policies(self, scored: Tensor, score: Callable[[Tensor], _Comparison]) -> _Comparison:
        """Return the sum of the scores of each policy's tokens, which are 0 elsewhere."""
        if not self._policies:
            return score(scored)
        found = []
        for name, mask in self._policies.items():
            with use_adapter(self.model, name or DEFAULT):
                found.append(score(scored & mask))
        return functools.reduce(_add_scores, found)

    def _compare(
        self, tokens: Tensor, scored: Tensor, entropy: Entropy, against: Mapping[str, DivergenceTarget]
    ) -> _Comparison:
        rows, columns = torch.nonzero((scored & (tokens < IMAGE_IDS))[:, 1:], as_tuple=True)
        if self.routing is not None and bool((tokens == BREAK).any()):
            raise LearnerError(
                "Routing replay does not support branching trajectories.",
                "Set training.learner.replay_routing = false.",
            )
        if rows.numel() == 0:
            if self.routing is not None:
                self.routing.set_positions([rows] * tokens.shape[0], 0)
            zeros = torch.zeros(tokens.shape, dtype=score_dtype(self.model), device=tokens.device)
            if is_sharded(self.model):
                zeros = zeros + self._idle(tokens.device)
            return TokenScores(zeros, None if entropy == "none" else zeros), dict.fromkeys(against, zeros)
        at, per_token = (rows, columns + 1), dict[str, Tensor]()
        if against:
            head, hidden = self._whole_head(), self.states(tokens, (rows, columns))
            per_token = {name: divergence(HiddenStates(hidden, head), other) for name, other in against.items()}
            scores = head.score(hidden, tokens[at], entropy)
        else:
            score = self._packed_scores if self.shares_prefixes else self._padded_scores
            scores = score(tokens, (rows, columns), entropy)
        entropies = None if scores.entropy is None else _scatter(scores.entropy, at, tokens)
        divergences = {name: _scatter(values, at, tokens) for name, values in per_token.items()}
        return TokenScores(_scatter(scores.logprobs, at, tokens), entropies), divergences

    @torch.no_grad()
    def distributions(self, tokens: Tensor, scored: Tensor) -> HiddenStates:
        """Return the states that predict the tokens in `scored`, row by row. Raises LearnerError if unavailable."""
        head = self._whole_head()
        rows, columns = torch.nonzero(scored[:, 1:], as_tuple=True)
        if rows.numel() == 0:
            return HiddenStates(head.weight.new_zeros(0, head.weight.shape[1]), head)
        return HiddenStates(self.states(tokens, (rows, columns)), head)

    @torch.no_grad()
    def logit_statistic(self, name: str, tokens: Tensor, scored: Tensor, entropy: Entropy = "none") -> TokenScores:
        """Return a statistic of `LOGIT_STATISTICS` at each scored token, instead of log-probabilities."""
        statistic = LOGIT_STATISTICS[name]
        return self._sum_over_policies(scored, lambda own: (self._statistic(statistic, tokens, own), {}))[0]

    def _statistic(self, statistic: Callable[[Tensor], Tensor], tokens: Tensor, scored: Tensor) -> TokenScores:
        states = self.distributions(tokens, scored)
        rows, columns = torch.nonzero(scored[:, 1:], as_tuple=True)
        parts = torch.split(states.hidden, max(1, CHUNK_LOGITS // states.head.weight.shape[0]))
        values = [statistic(states.head.logits(part)) for part in parts]
        return TokenScores(_scatter(torch.cat(values), (rows, columns + 1), tokens), None)

    def _whole_head(self) -> LmHead:
        """Return the output layer. Raises LearnerError if full distributions are unavailable."""
        if not self.shares_prefixes or self._head is None or is_sharded(self.model):
            raise LearnerError(
                f"Full distributions of {type(self.model).__name__} are unavailable: its hidden states "
                "cannot be read, or its weights are sharded.",
                "Set algorithm.kl to k3, algorithm.loss to distill, or training.learner.shard to false.",
            )
        return self._lm_head

    @property
    def _lm_head(self) -> LmHead:
        assert self._head is not None
        return LmHead(self._head.weight, self._head.bias, self.temperature)

    def _idle(self, device: torch.device) -> Tensor:
        """Return 0 after a pass of one token: sharded forward passes are collective."""
        first = torch.zeros(1, dtype=torch.int64, device=device)
        score = self._packed_scores if self.shares_prefixes else self._padded_scores
        scores = score(torch.zeros(1, 2, dtype=torch.int64, device=device), (first, first))
        return 0.0 * scores.logprobs.sum()

    def _packed_scores(self, tokens: Tensor, at: tuple[Tensor, Tensor], entropy: Entropy = "none") -> TokenScores:
        """Return scores `[A]` of the tokens after the positions `at` (rows, columns), using a forest."""
        rows, columns = at
        index, forest = self._pack_prefixes(tokens, at)
        states, targets = index, tokens[rows, columns + 1]
        inverse: Tensor | None = None
        if forest.branches:
            pairs = torch.stack([states, targets])
            (states, targets), inverse = torch.unique(pairs, dim=1, return_inverse=True)

        def score_hidden() -> TokenScores:
            distinct = self._lm_head.score(self._hidden(forest)[states], targets, entropy)
            return TokenScores(distinct.logprobs.clone(), distinct.entropy)  # hooks may not return a view

        scores = run_as_forward(self.model, score_hidden)
        if inverse is None:
            return scores
        return TokenScores(scores.logprobs[inverse], None if scores.entropy is None else scores.entropy[inverse])

    def states(self, tokens: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
        """Return the hidden states `[A, H]` at positions `at` of `tokens` `[B, L]`, for models that share prefixes."""
        index, forest = self._pack_prefixes(tokens, at)
        return self._hidden(forest)[index]

    @property
    def body(self) -> nn.Module:
        assert self._body is not None
        return self._body

    def _pack_prefixes(self, tokens: Tensor, at: tuple[Tensor, Tensor]) -> tuple[Tensor, prefix_packing.PrefixForest]:
        """Return the forest of the rows up to the last scored position, and the positions in it."""
        tokens, (rows, columns) = split_paths(tokens, at)
        lengths = torch.zeros(tokens.shape[0], dtype=torch.int64, device=tokens.device)
        lengths.scatter_reduce_(0, rows, columns + 1, "amax")
        sequences = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
        forest = prefix_packing.pack_sequences(sequences, tokens.device)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return torch.cat(forest.places)[offsets[rows] + columns], forest

    def _hidden(self, forest: prefix_packing.PrefixForest) -> Tensor:
        assert self._body is not None
        if self.routing is not None:
            self.routing.set_positions(forest.places, forest.num_tokens)
        dummy_mask = torch.zeros(1, 1, 1, 1, device=forest.tokens.device)  # a 4-D mask is passed through unchanged
        with checkpointed(self._layers):
            states: Tensor = self._body(
                input_ids=forest.tokens,
                position_ids=forest.positions,
                attention_mask=dummy_mask,
                use_cache=False,
                forest=forest,
            ).last_hidden_state[0]
        return states

    def _padded_scores(self, tokens: Tensor, at: tuple[Tensor, Tensor], entropy: Entropy = "none") -> TokenScores:
        targets = tokens[at[0], at[1] + 1]
        tokens, (rows, columns) = split_paths(tokens, at)
        width = int(columns.max()) + 1
        if self.routing is not None:
            indices = torch.arange(tokens.shape[0] * width, device=tokens.device)
            self.routing.set_positions(torch.split(indices, width), len(indices))
        with checkpointed(self._layers):
            logits = self.model(input_ids=tokens[:, :width], use_cache=False).logits[rows, columns]
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / self.temperature
        return logits_to_scores(logits, targets, entropy)

    @torch.no_grad()
    def _trial(self) -> bool:
        """Return whether a forest reproduces the model's log-probabilities, and set its attention."""
        part = text_part(self.model)
        before = part.config._attn_implementation
        if before not in ("sdpa", prefix_packing.NAME):
            return False
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        device = next(self.model.parameters()).device
        line = torch.arange(_TRIAL_TOKENS, device=device) * 7 % vocabulary
        tokens = torch.stack([line, line, line.flip(0)])
        tokens[1, prefix_packing.MIN_SHARED_TOKENS + 4 :] = line[: _TRIAL_TOKENS - prefix_packing.MIN_SHARED_TOKENS - 4]
        rows, columns = torch.nonzero(torch.ones_like(tokens[:, 1:]), as_tuple=True)
        at = (rows, columns)
        training = self.model.training
        self.model.eval()
        try:
            padded = self._padded_scores(tokens, at).logprobs
            part.set_attn_implementation(prefix_packing.NAME)
            packed = self._packed_scores(tokens, at).logprobs
        except (AttributeError, TypeError, ValueError, RuntimeError):
            packed = padded = torch.full((2,), torch.nan)
        finally:
            self.model.train(training)
        tolerance = agreement(padded, next(self.model.parameters()).dtype)
        matches = bool(((packed - padded).abs() <= tolerance).all())
        if not matches:
            part.set_attn_implementation(before)
        return matches


@contextmanager
def model_precision(model: nn.Module) -> Iterator[None]:
    """Run passes in the model's own types, also under a caller's autocast.

    Mixing passes with and without autocast would give an unchanged policy a ratio other than 1. A float64
    model computes in float64 throughout.
    """
    device = next(model.parameters()).device.type
    with torch.autocast(device, enabled=False), in_float64(model):
        yield


def score_dtype(model: nn.Module) -> torch.dtype:
    """Return the type of scores: float64 if the weights are float64, otherwise float32."""
    return torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32


def _scatter(values: Tensor, at: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
    empty = torch.zeros(like.shape, dtype=values.dtype, device=values.device)
    return empty.index_put(at, values)


def _body(model: PreTrainedModel) -> nn.Module | None:
    """Return the model below its output layer, including active adapters, or None."""
    inner: PreTrainedModel = model.get_base_model() if is_peft(model) else model
    body: nn.Module = inner.base_model
    return None if body is inner else body


ScoreFunction = Callable[[Tensor, Tensor, Entropy], TokenScores]
"""Score tokens as `LogprobScorer.score`."""


class TokenScorer(Protocol):
    """Model that scores tokens `[B, L]`, such as a reference or a teacher; see `LogprobScorer`."""

    temperature: float

    def score(self, tokens: Tensor, scored: Tensor, entropy: Entropy = "none") -> TokenScores: ...

    def distributions(self, tokens: Tensor, scored: Tensor) -> HiddenStates: ...


@dataclass(frozen=True, slots=True)
class AuxScorers:
    """Scorers of an algorithm besides its policy."""

    algorithm: Algorithm
    scorers: Mapping[str, TokenScorer]

    @property
    def full_divergences(self) -> dict[str, Divergence]:
        """Return the scorers that are compared over full distributions, with their divergence."""
        divergences: dict[str, Divergence] = {}
        if self.algorithm.loss_spec.has(Need.TEACHER_DISTRIBUTION) and "teacher" in self.scorers:
            divergences["teacher"] = "full_reverse"
        if self.algorithm.loss_spec.has(Need.SELF_TEACHER):
            divergences["teacher"] = "jensen_shannon"
        for which in FULL_KL_NAMES:
            if self.algorithm.kl == which and "reference" in self.scorers:
                divergences["reference"] = which
        return divergences

    @property
    def per_token(self) -> list[str]:
        """Return the names of scorers that are used per token."""
        return [name for name in ("reference", "teacher") if name in self.scorers and name not in self.full_divergences]

    def against(
        self, tokens: Tensor, scored: Tensor, teacher: TeacherView | None = None
    ) -> dict[str, DivergenceTarget]:
        """Return the divergence targets at the scored tokens; without a `teacher` view, none of a self-teacher."""
        targets = {}
        for name, which in self.full_divergences.items():
            if which != "jensen_shannon":
                targets[name] = DivergenceTarget(self.scorers[name].distributions(tokens, scored), which)
            elif teacher is not None:
                states = self.scorers[name].distributions(teacher.tokens, teacher.scored(scored))
                targets[name] = DivergenceTarget(states, which, round(self.algorithm.number("loss", "top_k")))
        return targets

    def score(self, part: Microbatch, known: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        """Return log-probabilities `[B, L]` by scorer; `known` holds cached ones, `[T]` a row."""
        logprobs: dict[str, Tensor] = {}
        for name in self.per_token:
            if name in known:
                logprobs[name] = pad_rows(known[name], part, part.advantages)
            else:
                with torch.no_grad():
                    logprobs[name] = self.scorers[name].score(part.tokens, part.trains).logprobs
        return logprobs


def full_kl(
    policy: LogprobScorer, aux: AuxScorers, tokens: Tensor, scored: Tensor, entropy: Entropy = "none"
) -> TokenScores:
    """Return the full KL to the reference at each scored token, instead of log-probabilities."""
    scores, divergences = policy.compare(tokens, scored, entropy, aux.against(tokens, scored))
    return TokenScores(divergences["reference"], scores.entropy)


def pad_rows(values: Sequence[Tensor], part: Microbatch, like: Tensor) -> Tensor:
    """Pad values `[T]` of each row to `[B, L]` of a microbatch, typed as `like`, without gradient."""
    table = torch.zeros_like(like)
    for position, i in enumerate(part.index):
        table[position, : len(values[i])] = values[i].to(table)
    return table.detach()
