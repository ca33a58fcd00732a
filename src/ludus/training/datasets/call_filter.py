"""Toolformer's filter (arXiv:2302.04761): a call of a dialogue is kept if it makes what follows easier to predict.

What follows a call and its results is the next assistant message. Its loss is `sum_t w_t (-log p_t) / sum_t w_t` over
its tokens, with `w_t = max(0, 1 - t / window)`; the paper's window is 5 tokens. A call is kept if that loss is lower by
`margin` with the call and its results than both without the call and with the call and empty results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ludus.chat.render import Renderer
from ludus.training.batches.rows import Row, microbatches, row_of_segments
from ludus.training.datasets.files import FileDialogue
from ludus.training.datasets.sources import dialogue_segments
from ludus.training.learner.logprobs import LogprobScorer
from ludus.types import Message

NextLosses = Callable[[Sequence[FileDialogue]], list[float]]
"""Return the loss of the last assistant message of each dialogue, nats per token."""


@dataclass(frozen=True, slots=True)
class FilteredDialogue:
    """A dialogue without the rejected calls, and the gain in nats of each call that was compared."""

    dialogue: FileDialogue
    gains: tuple[float, ...]
    num_rejected: int


def filter_calls(dialogue: FileDialogue, losses: NextLosses, margin: float) -> FilteredDialogue:
    """Remove the assistant messages whose calls do not pass the filter, with their results.

    Each message with calls is compared in the original dialogue. One that no assistant message follows is kept.
    """
    messages, removed, gains = dialogue.messages, set[int](), []
    for at, message in enumerate(messages):
        follows = next((i for i in range(at + 1, len(messages)) if messages[i]["role"] == "assistant"), None)
        if message["role"] != "assistant" or not message.get("tool_calls") or follows is None:
            continue
        results = [i for i in range(at + 1, follows) if messages[i]["role"] == "tool"]
        empty = [Message(**{**one, "content": ""}) if i in results else one for i, one in enumerate(messages)]
        shown = _without(dialogue, {*range(follows + 1, len(messages))})
        variants = [
            shown,
            _without(dialogue, {at, *results, *range(follows + 1, len(messages))}),
            replace(shown, messages=tuple(empty[: follows + 1])),
        ]
        with_call, without_call, without_results = losses(variants)
        gains.append(min(without_call, without_results) - with_call)
        if gains[-1] < margin:
            removed |= {at, *results}
    num = sum(messages[i]["role"] == "assistant" for i in removed)
    return FilteredDialogue(_without(dialogue, removed), tuple(gains), num)


def _without(dialogue: FileDialogue, removed: set[int]) -> FileDialogue:
    kept = [i for i in range(len(dialogue.messages)) if i not in removed]
    messages = tuple(dialogue.messages[i] for i in kept)
    return replace(dialogue, messages=messages, trains=tuple(dialogue.trains[i] for i in kept))


@dataclass
class NextMessageLosses:
    """The losses of the next messages under a model; `window` as in the module's formula."""

    scorer: LogprobScorer
    renderer: Renderer
    window: int = 5

    @torch.no_grad()
    def __call__(self, dialogues: Sequence[FileDialogue]) -> list[float]:
        rows, device = [self._row(one) for one in dialogues], next(self.scorer.model.parameters()).device
        (part,) = microbatches(rows, sys.maxsize, device, torch.float32, shared=self.scorer.shares_prefixes)
        logprobs = self.scorer.score(part.tokens, part.trains).logprobs
        found = {}
        for place, i in enumerate(part.index):
            losses = -logprobs[place][part.trains[place]].double().cpu()
            weights = (1 - torch.arange(len(losses), dtype=torch.float64) / self.window).clamp(min=0)
            found[i] = float((weights * losses).sum() / weights.sum())
        return [found[i] for i in range(len(rows))]

    def _row(self, dialogue: FileDialogue) -> Row:
        """Return the row of a dialogue; only the last message is scored."""
        segments = dialogue_segments(self.renderer, dialogue)
        last = max(i for i, one in enumerate(segments) if one.kind == "action")
        marked = [
            one if i == last or one.kind != "action" else replace(one, kind="observation")
            for i, one in enumerate(segments)
        ]
        return row_of_segments(marked)
