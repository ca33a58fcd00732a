"""ReasonMaxxer (arXiv:2605.06241): offline training of the tokens at which the base model is undecided.

An example is one rollout as a labelled dialogue: `gap` is its advantage, its side is `chosen` if that is positive, and
`reference` holds the base model's entropies instead of log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

import torch
from torch import Tensor

from ludus.algorithms.losses.likelihood import forks
from ludus.config.sections.stages import PreferenceConfig
from ludus.diagnostics.metrics import mean, std
from ludus.errors import LearnerError
from ludus.rollouts.rollout_files import RolloutRecord
from ludus.training.batches.chunked_lm_head import DivergenceTarget
from ludus.training.batches.rows import Microbatch, microbatches
from ludus.training.learner.logprobs import LogprobScorer, TokenScorer
from ludus.training.learner.optimizer import Optimizer
from ludus.training.preference.pairs import NO_SIDE, PairSide, PreferencePair, groups_of
from ludus.training.run.supervised import step_metrics
from ludus.training.value_models.reward_model import is_usable
from ludus.types import grouped


def pairs_of_rewards(
    name: str, records: Iterable[RolloutRecord], min_gap: float, max_tokens: int
) -> list[PreferencePair]:
    """Return the usable attempts of groups with different rewards, each with `(r - mean) / std` (`ddof=0`) as its gap.

    Groups whose rewards differ by less than `min_gap` are skipped.
    """
    pairs = []
    for source, group in groups_of(name, (r for r in records if is_usable(r, max_tokens))):
        rewards = [record.trajectory.reward for record in group]
        if max(rewards) == min(rewards) or max(rewards) - min(rewards) < min_gap:
            continue
        centre, spread = mean(rewards), std(rewards)
        for record, reward in zip(group, rewards, strict=True):
            side, gain = (
                PairSide(record.trajectory.token_ids, record.trajectory.action_mask),
                (reward - centre) / spread,
            )
            sides = (side, NO_SIDE) if gain > 0 else (NO_SIDE, side)
            pairs.append(PreferencePair(f"{source}/{record.trajectory.sample}", gain, *sides))
    return pairs


def nearest_to_half(pairs: Sequence[PreferencePair], num_groups: int) -> list[PreferencePair]:
    """Return the pairs of the groups whose share of positive advantages is nearest to one half, in their order."""
    groups = grouped(pairs, lambda pair: pair.source.rpartition("/")[0])
    ranked = sorted(groups, key=lambda name: abs(fmean(pair.gap > 0 for pair in groups[name]) - 0.5))
    kept = set(ranked[:num_groups])
    return [pair for pair in pairs if pair.source.rpartition("/")[0] in kept]


def forks_step(
    scorer: LogprobScorer,
    base: TokenScorer,
    optimizer: Optimizer,
    pairs: Sequence[PreferencePair],
    settings: PreferenceConfig,
) -> dict[str, float]:
    """Take one optimizer step on the loss `forks`; `base` is the model before the training.

    Raises LearnerError if the loss is not finite.
    """
    sides, device = [pair.sides[0] for pair in pairs], next(scorer.model.parameters()).device
    decided = [sum(value > settings.forks.entropy for value in side.reference) for side in sides]
    counts = sum(decided), sum(len(side.reference) for side in sides) - sum(decided)
    totals = {"loss/total": 0.0, "forks/kl_base": 0.0}
    rows = [side.row for side in sides]
    for part in microbatches(rows, settings.microbatch_tokens, device, torch.float32, shared=scorer.shares_prefixes):
        target = DivergenceTarget(base.distributions(part.tokens, part.trains), "full_forward")
        scores, divergences = scorer.compare(part.tokens, part.trains, "none", {"base": target})
        decisions, advantages = _inputs(part, pairs, settings, scores.logprobs)
        loss = forks(
            logprobs=scores.logprobs,
            advantages=advantages,
            decisions=decisions,
            base_kl=divergences["base"],
            mask=part.trains,
            kl_coef=settings.forks.kl_coef,
            counts=counts,
        )
        if not torch.isfinite(loss):
            raise LearnerError(f"The loss is {float(loss.detach())}.", "Lower preference.learning_rate.")
        torch.autograd.backward(loss)
        totals["loss/total"] += float(loss.detach())
        totals["forks/kl_base"] += float((divergences["base"].detach() * (part.trains & ~decisions)).sum())
    totals["forks/kl_base"] /= max(counts[1], 1)
    return (
        totals
        | step_metrics(optimizer)
        | {
            "forks/decisions": counts[0] / max(sum(counts), 1),
            "batch/trained_tokens": float(sum(counts)),
            "batch/total_tokens": float(sum(len(side.tokens) for side in sides)),
        }
    )


def _inputs(
    part: Microbatch, pairs: Sequence[PreferencePair], settings: PreferenceConfig, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the decision tokens and the advantages of a microbatch, `[B, L]`."""
    entropies, limit = torch.zeros_like(like), settings.forks.advantage_clip
    gains = torch.tensor([max(-limit, min(limit, pairs[i].gap)) for i in part.index], dtype=like.dtype).to(like)
    for place, i in enumerate(part.index):
        values = torch.tensor(pairs[i].sides[0].reference, dtype=like.dtype, device=like.device)
        entropies[place, part.trains[place]] = values
    return part.trains & (entropies > settings.forks.entropy), gains[:, None].expand(like.shape)
