"""Where two models disagree on the same tokens: forks, and the entropy there.

Both models are teacher-forced over the same rollouts. A fork is an action token at which their most probable tokens
differ. Models before and after RL agree on most tokens, and disagree where the entropy is high (Wang et al. 2025,
arXiv:2506.01939).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ludus.chat.render import Tokenizer, decode_exactly
from ludus.errors import UserError
from ludus.evaluation.probes.report import Cell, ProbeReport, Scores, difference, mean_over_tasks
from ludus.types import Segment, Trajectory

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

NUM_EXAMPLES = 5
"""Number of the most frequent pairs of tokens in the notes."""


@dataclass(frozen=True, slots=True)
class TokenViews:
    """A model's most probable tokens, log-probabilities of the sampled ones and entropies in nats, each `[A]`."""

    top: Tensor
    logprobs: Tensor
    entropy: Tensor


def token_views(logits: Tensor, sampled: Tensor) -> TokenViews:
    """Return the view with `logits` `[A, V]` of the tokens `sampled` `[A]`."""
    table = torch.log_softmax(logits.float(), -1)
    entropy = -(table.exp() * table.masked_fill(table == -torch.inf, 0.0)).sum(-1)
    return TokenViews(table.argmax(-1), table.gather(1, sampled[:, None])[:, 0], entropy)


@torch.no_grad()
def teacher_forced(model: PreTrainedModel, segments: Sequence[Segment]) -> TokenViews:
    """Return a model's view of the action tokens of a chain, at temperature 1, from one forward pass."""
    acts = [segment.kind == "action" for segment in segments for _ in segment.tokens]
    tokens = torch.tensor([[t for segment in segments for t in segment.tokens]], device=model.device)
    at = torch.tensor([place for place, is_action in enumerate(acts) if is_action and place], device=model.device)
    was_training = model.training
    model.eval()
    found = token_views(model(input_ids=tokens).logits[0, at - 1], tokens[0, at])
    model.train(was_training)
    return TokenViews(found.top.cpu(), found.logprobs.cpu(), found.entropy.cpu())


@dataclass(frozen=True, slots=True)
class ForkCounts:
    """Numbers of action tokens and forks of an episode, and its sums of entropy at forks and elsewhere, in nats."""

    tokens: int
    forks: int
    entropy_at_forks: float
    entropy_elsewhere: float


def count_forks(base: TokenViews, trained: TokenViews) -> ForkCounts:
    """Return the forks of an episode; entropies are those of the base model."""
    differs = base.top != trained.top
    at, elsewhere = (float(base.entropy[mask].sum()) for mask in (differs, ~differs))
    return ForkCounts(len(differs), int(differs.sum()), at, elsewhere)


def forks_report(
    tasks: Sequence[str], views: Sequence[tuple[TokenViews, TokenViews]], tokenizer: Tokenizer, seed: int
) -> ProbeReport:
    """Return rate and entropy of the forks; `views` are those of base and trained. UserError for fewer than 2 tasks."""
    counts = {task: count_forks(*pair) for task, pair in zip(tasks, views, strict=True) if len(pair[0].top)}
    if len(counts) < 2:
        raise UserError(f"{len(counts)} tasks have sampled tokens, too few for an interval.", "Increase --tasks.")
    rate = mean_over_tasks({task: one.forks / one.tokens for task, one in counts.items()}, seed)
    forked = {task: one for task, one in counts.items() if 0 < one.forks < one.tokens}
    at = {task: one.entropy_at_forks / one.forks for task, one in forked.items()}
    elsewhere = {task: one.entropy_elsewhere / (one.tokens - one.forks) for task, one in forked.items()}
    rows: list[dict[str, Cell]] = [{"measure": "tokens that are forks", "mean over tasks": rate}]
    if len(forked) > 1:
        rows += [
            _entropy_row("entropy at forks, nats", at, seed),
            _entropy_row("entropy elsewhere, nats", elsewhere, seed),
            {"measure": "difference, nats", "mean over tasks": difference(at, elsewhere, seed, percent=False)},
        ]
    tokens, forks = sum(one.tokens for one in counts.values()), sum(one.forks for one in counts.values())
    notes = [f"{forks:,} of {tokens:,} sampled tokens are forks, in {len(forked)} of {len(counts)} episodes."]
    total = math.fsum(elsewhere.values())
    if forked and total:
        notes.append(f"The entropy of the base model at forks is {math.fsum(at.values()) / total:.1f} times higher.")
    return ProbeReport("forks", "Tokens at which the two models differ", rows, (*notes, *_examples(views, tokenizer)))


def _entropy_row(name: str, values: Scores, seed: int) -> dict[str, Cell]:
    return {"measure": name, "mean over tasks": mean_over_tasks(values, seed, percent=False)}


def _examples(views: Sequence[tuple[TokenViews, TokenViews]], tokenizer: Tokenizer) -> list[str]:
    """Return a sentence with the most frequent pairs of differing tokens; empty without forks."""
    pairs = Counter(
        (first, second)
        for base, trained in views
        for first, second in zip(base.top.tolist(), trained.top.tolist(), strict=True)
        if first != second
    )
    words = [
        f"{decode_exactly(tokenizer, [a])!r} to {decode_exactly(tokenizer, [b])!r} ({num})"
        for (a, b), num in pairs.most_common(NUM_EXAMPLES)
    ]
    return [f"Most frequent: {', '.join(words)}."] if words else []


def usable(episodes: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the episodes with sampled tokens."""
    return [one for one in episodes if one.failure is None and any(part.kind == "action" for part in one.segments)]
