"""Comparisons of two models.

- Swap: one model writes the tool calls, the other the answer after reading their results. The caller plays an episode
  until it answers; its answering turn is discarded, and the reader writes that turn instead. If the reader calls a
  tool there, the episode ends without an answer. With equal models the episode is unchanged.
- Transfer: success in several worlds and the loss on general dialogues, before and after training.
- Forks: both models are teacher-forced over the same rollouts. A fork is an action token at which their most probable
  tokens differ. Models before and after RL agree on most tokens, and disagree where the entropy is high (Wang et al.
  2025, arXiv:2506.01939).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from ludus.chat.render import Tokenizer, decode_exactly
from ludus.engines.base import Engine
from ludus.errors import UserError
from ludus.evaluation.probes import common
from ludus.evaluation.probes.common import Cell, MakeScheduler, ProbePlan, ProbeReport, Scores
from ludus.rollouts.episode import ChatSession, EngineChatSession
from ludus.rollouts.scheduler import RolloutRequest
from ludus.types import Action, Segment, StopReason, Trajectory

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

BeforeAfter = tuple[Scores, Scores]
DIALOGUES = "dialogues, nats per token"
NUM_EXAMPLES = 5
"""Number of the most frequent pairs of tokens in the notes."""
MAX_TEXTS = 8
"""Number of episodes whose sampled tokens are stored, those with the most forks first."""


@dataclass(frozen=True, slots=True)
class TokenViews:
    """Sampled tokens, and a model's most probable tokens, log-probabilities of the sampled ones and entropies in nats,
    each `[A]`."""

    sampled: Tensor
    top: Tensor
    logprobs: Tensor
    entropy: Tensor


def token_views(logits: Tensor, sampled: Tensor) -> TokenViews:
    """Return the view with `logits` `[A, V]` of the tokens `sampled` `[A]`."""
    table = torch.log_softmax(logits.float(), -1)
    entropy = -(table.exp() * table.masked_fill(table == -torch.inf, 0.0)).sum(-1)
    return TokenViews(sampled, table.argmax(-1), table.gather(1, sampled[:, None])[:, 0], entropy)


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
    return TokenViews(found.sampled.cpu(), found.top.cpu(), found.logprobs.cpu(), found.entropy.cpu())


def forks_report(
    tasks: Sequence[str], views: Sequence[tuple[TokenViews, TokenViews]], tokenizer: Tokenizer, seed: int
) -> ProbeReport:
    """Return rate and entropy of the forks. `views`: base and trained model by task. UserError below 2 tasks."""
    pairs = {task: pair for task, pair in zip(tasks, views, strict=True) if len(pair[0].top)}
    if len(pairs) < 2:
        raise UserError(f"{len(pairs)} tasks have sampled tokens, too few for an interval.", "Increase --tasks.")
    masks = {task: base.top != trained.top for task, (base, trained) in pairs.items()}
    rate = common.mean_over_tasks({task: int(mask.sum()) / len(mask) for task, mask in masks.items()})
    forked = {task: (mask, pairs[task][0].entropy) for task, mask in masks.items() if mask.any() and not mask.all()}
    at = {task: float(entropy[mask].sum()) / int(mask.sum()) for task, (mask, entropy) in forked.items()}
    elsewhere = {task: float(entropy[~mask].sum()) / int((~mask).sum()) for task, (mask, entropy) in forked.items()}
    rows: list[dict[str, Cell]] = [{"measure": "tokens that are forks", "mean over tasks": rate}]
    if len(forked) > 1:
        for place, values in (("at forks", at), ("elsewhere", elsewhere)):
            mean = common.mean_over_tasks(values, percent=False, seed=seed)
            rows.append({"measure": f"entropy {place}, nats", "mean over tasks": mean})
        rows.append({"measure": "difference, nats", "mean over tasks": common.difference(at, elsewhere, percent=False)})
    tokens, forks = sum(map(len, masks.values())), sum(int(mask.sum()) for mask in masks.values())
    notes = [f"{forks:,} of {tokens:,} sampled tokens are forks, in {len(forked)} of {len(pairs)} episodes."]
    total = math.fsum(elsewhere.values())
    if forked and total:
        notes.append(f"The entropy of the base model at forks is {math.fsum(at.values()) / total:.1f} times higher.")
    most = sorted(masks, key=lambda task: int(masks[task].sum()), reverse=True)[:MAX_TEXTS]
    texts = [(task, _spans(*pairs[task], tokenizer)) for task in most if masks[task].any()]
    notes += _examples(views, tokenizer)
    return ProbeReport("forks", "Tokens at which the two models differ", rows, notes, texts=texts)


def _spans(base: TokenViews, trained: TokenViews, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return the sampled text in spans; a span with a note is a fork, and the note has both most probable tokens."""
    spans: list[tuple[str, str]] = []
    pending: list[int] = []
    for token, *tops in zip(base.sampled.tolist(), base.top.tolist(), trained.top.tolist(), strict=True):
        if tops[0] == tops[1]:
            pending.append(token)
            continue
        before, after = (repr(decode_exactly(tokenizer, [top])) for top in tops)
        spans += [(decode_exactly(tokenizer, pending), "")] if pending else []
        spans.append((decode_exactly(tokenizer, [token]), f"before {before}, after {after}"))
        pending = []
    return [*spans, (decode_exactly(tokenizer, pending), "")] if pending else spans


def _examples(views: Sequence[tuple[TokenViews, TokenViews]], tokenizer: Tokenizer) -> list[str]:
    """Return a sentence with the most frequent pairs of differing tokens; empty without forks."""
    pairs: Counter[tuple[int, int]] = Counter()
    for base, trained in views:
        tops = zip(base.top.tolist(), trained.top.tolist(), strict=True)
        pairs.update(pair for pair in tops if pair[0] != pair[1])
    words = []
    for pair, num in pairs.most_common(NUM_EXAMPLES):
        a, b = (decode_exactly(tokenizer, [token]) for token in pair)
        words.append(f"{a!r} to {b!r} ({num})")
    return [f"Most frequent: {', '.join(words)}."] if words else []


def usable(episodes: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the episodes with sampled tokens."""
    return [one for one in episodes if one.failure is None and any(part.kind == "action" for part in one.segments)]


@dataclass
class ReaderSession(EngineChatSession):
    """Session whose answering turn is written by `reader`, from the same history with the same seed."""

    reader: Engine | None = None

    async def act(self) -> Action | StopReason:
        """Return the caller's action if it calls tools, else the reader's answer."""
        caller, reader = self.engine, self.reader
        action = await super().act()
        if reader is None or isinstance(action, StopReason) or action.calls or action.errors:
            return action
        discarded = self._segments.pop()
        del self._tokens[-len(discarded.tokens) :]
        self._turn -= 1
        self.engine = reader
        try:
            answer = await super().act()
        finally:
            reader.release(self.episode)
            self.engine = caller
        calls = not isinstance(answer, StopReason) and (answer.calls or answer.errors)
        return StopReason.MAX_TURNS if calls else answer


async def measure_swap(
    makers: Mapping[str, MakeScheduler], engines: Mapping[str, Engine], plan: ProbePlan
) -> ProbeReport:
    """Return success in the four cells of "A" and "B", and the paired effect of each role. UserError below 2 tasks."""
    rates: dict[str, Scores] = {}
    without_calls = 0
    for caller, reader in product("AB", "AB"):
        scheduler = makers[caller](plan.sampling)

        def swapped(_: RolloutRequest, session: ChatSession, reader: str = reader) -> ChatSession:
            one = common.needs_tokens(session)
            settings = (one.engine, one.renderer, one.params, one.max_tokens, one.episode, one.seed)
            return ReaderSession(*settings, reader=engines[reader])

        episodes = await common.roll_out(common.with_sessions(scheduler, swapped), plan.requests(plan.samples))
        rates[caller + reader] = common.success_rates(scheduler, episodes)
        without_calls += sum(not one.outcomes for one in episodes)
    rows: list[dict[str, Cell]] = []
    for cell, found in rates.items():
        base = None if cell == "AA" else rates["AA"]
        rows.append({"calls, answer": ", ".join(cell), **common.compared(found, base, "to A, A")})
    for name, after, before in (("calls by B", "BA BB", "AA AB"), ("answers by B", "AB BB", "AA BA")):
        pairs = [[rates[cell] for cell in cells.split()] for cells in (after, before)]
        b, a = ({task: fmean(one[task] for one in pair) for task in pair[0]} for pair in pairs)
        rows.append({"calls, answer": name, "success": None, "to A, A": common.difference(b, a)})
    total = 4 * len(plan.tasks) * plan.samples
    notes = ["The last two rows are the effect of a role, averaged over the models in the other one."]
    if without_calls:
        notes.append(f"{without_calls} of {total} episodes called no tool; there the reader writes the whole answer.")
    return ProbeReport("swap", "Tool calls and answers by two models", rows, notes)


def transfer_report(worlds: Mapping[str, BeforeAfter], losses: BeforeAfter | None, seed: int) -> ProbeReport:
    """Return a row per world, and of `losses` in nats per token by dialogue. UserError for fewer than 2 of either."""
    measured = {name: (pair, True) for name, pair in worlds.items()}
    if losses is not None:
        measured[DIALOGUES] = (losses, False)
    gaps = {name: common.difference(pair[1], pair[0], percent=share) for name, (pair, share) in measured.items()}
    rows: list[dict[str, Cell]] = []
    for name, (pair, share) in measured.items():
        before, after = (common.mean_over_tasks(scores, percent=share, seed=seed) for scores in pair)
        rows.append({"measured on": name, "before": before, "after": after, "difference": gaps[name]})
    lost = [name for name in worlds if gaps[name].interval.high < 0]
    gained = [name for name in worlds if gaps[name].interval.low > 0]
    notes = [f"Better after training: {', '.join(gained) or 'none'}; worse: {', '.join(lost) or 'none'}."]
    if losses is not None and gaps[DIALOGUES].interval.low > 0:
        notes.append("The loss on the dialogues is higher after training, beyond the interval: forgetting.")
    elif losses is not None:
        notes.append("The interval shows no higher loss on the dialogues after training.")
    return ProbeReport("transfer", "Before and after training", rows, notes)
