"""What training changed elsewhere: success in several worlds and the loss on general dialogues, before and after."""

from __future__ import annotations

from collections.abc import Mapping

from ludus.evaluation.probes.report import Cell, ProbeReport, Scores, difference, mean_over_tasks

BeforeAfter = tuple[Scores, Scores]


def transfer_report(worlds: Mapping[str, BeforeAfter], losses: BeforeAfter | None, seed: int) -> ProbeReport:
    """Return a row for each world, with the difference paired by task, and one for the dialogues.

    `losses` are nats per token by dialogue. Raises UserError for fewer than 2 tasks or dialogues.
    """
    rows = [_row(name, pair, seed, percent=True) for name, pair in worlds.items()]
    if losses is not None:
        rows.append(_row("dialogues, nats per token", losses, seed, percent=False))
    lost = [name for name, pair in worlds.items() if difference(pair[1], pair[0], seed).interval.high < 0]
    gained = [name for name, pair in worlds.items() if difference(pair[1], pair[0], seed).interval.low > 0]
    notes = [f"Better after training: {', '.join(gained) or 'none'}; worse: {', '.join(lost) or 'none'}."]
    if losses is not None:
        notes.append(_loss_note(difference(losses[1], losses[0], seed, percent=False).interval.low))
    return ProbeReport("transfer", "Before and after training", rows, notes)


def _loss_note(low: float) -> str:
    if low > 0:
        return "The loss on the dialogues is higher after training, beyond the interval: forgetting."
    return "The interval shows no higher loss on the dialogues after training."


def _row(name: str, pair: BeforeAfter, seed: int, *, percent: bool) -> dict[str, Cell]:
    before, after = (mean_over_tasks(scores, seed, percent=percent) for scores in pair)
    gap = difference(pair[1], pair[0], seed, percent=percent)
    return {"measured on": name, "before": before, "after": after, "difference": gap}
