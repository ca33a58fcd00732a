"""What each row of a verifier's scorecard comes to: pass, doubtful or fail, with a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.evaluation.env_audit import Mark
from ludus.evaluation.stats import wilson
from ludus.evaluation.verifier_report import Scorecard, VerdictShare

LEAST_TRIED = 4
"""With fewer tries than this a share decides nothing."""
LEAST_ACCEPTED = 0.3
"""The share of right answers, written otherwise, below which a verifier fails."""
SLOW_MS = 2000.0
"""A grading that takes longer holds a batch of episodes up."""


@dataclass(frozen=True, slots=True)
class ScorecardVerdict:
    """A row: what was looked at, what was found, what that comes to, and why if it does not pass."""

    what: str
    found: str
    mark: Mark = "pass"
    why: str = ""


def verdicts(card: Scorecard) -> list[ScorecardVerdict]:
    """All rows of a scorecard, each with its verdict."""
    truths = ", ".join(f"{name} ({count} tasks)" for name, count in card.truths.items())
    graded = f"graded, {len(card.values)} values seen" if card.is_graded else "two values at most"
    alone, together = f"{card.alone_per_s:,.0f}", f"{card.together_per_s:,.0f}"
    slow = card.grading_ms > SLOW_MS
    return [
        ScorecardVerdict("truth", truths),
        ScorecardVerdict(
            "speed",
            f"{card.grading_ms:.3f} ms a grading",
            "doubtful" if slow else "pass",
            "A grading takes seconds: training waits for it." if slow else "",
        ),
        ScorecardVerdict("parallelism", f"{alone} episodes/s alone, {together} with {card.concurrency} at once"),
        _noise("noise, graded again", card.unstable, "trajectories"),
        _noise("noise, played again", card.replayed, "episodes"),
        _accepts("paraphrases", card.paraphrased, "none on offer", "answers in other words or done otherwise"),
        _accepts("other writings", card.rewritten, "nothing to rewrite", "answers in other case, with blanks"),
        refuses_wrong(card.spoilt),
        _errors(card),
        ScorecardVerdict("outcome", graded),
        _distinct(card.distinct),
        _saturation(card.saturated),
    ]


def _errors(card: Scorecard) -> ScorecardVerdict:
    """The row of false refusals and false payments, with 95 % intervals."""
    right = card.paraphrased.whole + card.rewritten.whole
    refused = right - card.paraphrased.part - card.rewritten.part
    told = [("refused though right", refused, right), ("paid though wrong", card.spoilt.part, card.spoilt.whole)]
    return ScorecardVerdict("errors", "; ".join(f"{name} {_rate(part, whole)}" for name, part, whole in told))


def _rate(part: int, whole: int) -> str:
    if not whole:
        return "0 of 0"
    interval = wilson(part, whole)
    return f"{part} of {whole} [{interval.low:.1%}, {interval.high:.1%}]"


def problems_in(rows: Sequence[ScorecardVerdict]) -> list[str]:
    """The sentences of the rows that fail."""
    return [row.why for row in rows if row.mark == "fail"]


def _of(share: VerdictShare) -> str:
    return f"{share.part} of {share.whole}"


def _noise(what: str, changed: VerdictShare, which: str) -> ScorecardVerdict:
    found = f"{_of(changed)} {which} change"
    if not changed.part:
        return ScorecardVerdict(what, found)
    mark: Mark = "fail" if changed.value > 0.05 else "doubtful"
    return ScorecardVerdict(
        what, found, mark, f"The verdict is not stable: {_of(changed)} {which} earn something else."
    )


def _accepts(what: str, accepted: VerdictShare, nothing: str, which: str) -> ScorecardVerdict:
    if not accepted.whole:
        return ScorecardVerdict(what, nothing)
    found = f"{_of(accepted)} accepted"
    why = f"The verifier refuses {accepted.whole - accepted.part} of {accepted.whole} right {which}."
    if accepted.value < LEAST_ACCEPTED and accepted.whole >= LEAST_TRIED:
        return ScorecardVerdict(what, found, "fail", why)
    return ScorecardVerdict(what, found, "doubtful", why) if accepted.value < 0.9 else ScorecardVerdict(what, found)


def refuses_wrong(accepted: VerdictShare) -> ScorecardVerdict:
    """The row on wrong answers near the right one."""
    what = "wrong answers near the truth"
    if not accepted.whole:
        return ScorecardVerdict(what, "none to try")
    found = f"{_of(accepted)} accepted"
    why = f"The verifier pays {_of(accepted)} wrong answers near the right one (denied, cut, other numbers)."
    if accepted.value > 0.1 and accepted.whole >= LEAST_TRIED:
        return ScorecardVerdict(what, found, "fail", why)
    return ScorecardVerdict(what, found, "doubtful", why) if accepted.part else ScorecardVerdict(what, found)


def _distinct(distinct: VerdictShare) -> ScorecardVerdict:
    found = f"{_of(distinct)} without identifiers, names and numbers"
    few = distinct.whole >= 50 and distinct.part < 5
    why = f"The prompts of {distinct.whole:,} tasks differ in names and numbers alone." if few else ""
    return ScorecardVerdict("distinct tasks", found, "doubtful" if few else "pass", why)


def _saturation(solved: VerdictShare) -> ScorecardVerdict:
    found = f"{_of(solved)} tasks go to null, idle, echo or the majority answer"
    why = f"Agents without tools and skill solve {_of(solved)} tasks."
    if solved.value > 0.5 and solved.whole >= LEAST_TRIED:
        return ScorecardVerdict("saturation", found, "fail", why)
    return ScorecardVerdict(
        "saturation", found, "doubtful" if solved.value > 0.25 else "pass", why if solved.value > 0.25 else ""
    )
