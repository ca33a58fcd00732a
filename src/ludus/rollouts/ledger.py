"""Ledger of rollouts: each one ends exactly once as trained, masked, dropped or failed.

It rejects an end without a start, a second end, closing a step with running rollouts, and training a rollout twice,
also across a resume. Use it from one event loop. In a `spanning` ledger rollouts may outlive their step: the counts of
a step then cover the rollouts that ended since the previous step closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

from ludus.errors import LudusError


class AccountingError(LudusError):
    """Internal error: a rollout was lost or counted twice."""

    part = "ledger"


class RolloutOutcome(StrEnum):
    """Final status of a rollout."""

    TRAINED = "trained"
    """Its action tokens entered the loss."""
    MASKED = "masked"
    """It counted in group statistics, but its tokens did not enter the loss."""
    DROPPED = "dropped"
    """A filter removed it, alone or with its group."""
    FAILED = "failed"
    """The infrastructure failed, not the model."""


@dataclass(frozen=True, slots=True, order=True)
class RolloutKey:
    """Key of a rollout: requesting step, task, index in the group, attempt (from 0)."""

    step: int
    task_id: str
    sample: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"step {self.step}, task {self.task_id}, sample {self.sample}, attempt {self.attempt}"


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Rollout counts of one step, or of the whole run if `step` is None, also `by_reason` ("dropped/zero_variance").

    `clock_limited`: a wall-clock limit fired, so the run is not reproducible. AccountingError if inconsistent.
    """

    step: int | None
    started: int = 0
    trained: int = 0
    masked: int = 0
    dropped: int = 0
    failed: int = 0
    by_reason: Mapping[str, int] = field(default_factory=dict)
    clock_limited: bool = False

    def __post_init__(self) -> None:
        ended = (self.trained, self.masked, self.dropped, self.failed)
        if min(ended) < 0 or sum(ended) > self.started:
            raise AccountingError(f"{self.started} rollouts started and {sum(ended)} ended: {self}.")
        for outcome, count in zip(RolloutOutcome, ended, strict=True):
            reasons = sum(n for name, n in self.by_reason.items() if name.startswith(f"{outcome}/"))
            if reasons != count:
                raise AccountingError(f"{count} rollouts are {outcome}, and {reasons} have a reason.")
        if sum(self.by_reason.values()) != sum(ended):
            raise AccountingError(f"a reason in {sorted(self.by_reason)} belongs to no outcome.")

    def plus(self, other: LedgerCounts) -> LedgerCounts:
        """Return the sum of both counts, with `step` None."""
        reasons, counts, more = Counter(self.by_reason), asdict(self), asdict(other)
        reasons.update(other.by_reason)
        return LedgerCounts(
            step=None,
            **{name: counts[name] + more[name] for name in ("started", *RolloutOutcome)},
            by_reason=dict(sorted(reasons.items())),
            clock_limited=self.clock_limited or other.clock_limited,
        )

    def metrics(self) -> dict[str, float]:
        """Return the counts as `ledger/...` metrics, including every reason with a nonzero count."""
        counts = {name: value for name, value in asdict(self).items() if name not in ("step", "by_reason")}
        counts |= sorted(self.by_reason.items())
        return {f"ledger/{name}": float(count) for name, count in counts.items()}


@dataclass(frozen=True, slots=True)
class LedgerState:
    """Checkpoint of a ledger: totals of closed steps and the last closed step (None before the first).

    Rollouts of an open step are excluded: a resumed run samples that step again. In a spanning ledger,
    running rollouts are excluded. `ahead` are rollouts that were trained before the step that requested them.
    """

    total: LedgerCounts = LedgerCounts(step=None)
    last_closed: int | None = None
    ahead: tuple[RolloutKey, ...] = ()


@dataclass(slots=True)
class _OpenStep:
    """Outcome of each rollout of an open step (None while it runs), and dropped restored rollouts by reason."""

    endings: dict[RolloutKey, tuple[RolloutOutcome, str] | None] = field(default_factory=dict)
    clock_limited: bool = False
    restored_drops: Counter[str] = field(default_factory=Counter)


KEPT_STEPS = 16  # number of newest closed steps whose trained rollouts are retained
_TRAINS = (RolloutOutcome.TRAINED, RolloutOutcome.MASKED)


class Ledger:
    """Count the rollouts of a run. Steps close in order."""

    def __init__(self, *, spanning: bool = False) -> None:
        self._spanning = spanning
        self._open_steps: dict[int, _OpenStep] = {}
        self._trained: set[RolloutKey] = set()
        self._state = LedgerState()

    def start(self, key: RolloutKey) -> None:
        """Record the start of a rollout. Raises AccountingError if it was started or trained, or its step is closed."""
        if key in self._trained:
            raise AccountingError(f"rollout was trained before: {key}.")
        endings = self._open_step(key.step).endings
        if key in endings:
            raise AccountingError(f"rollout started twice: {key}.")
        endings[key] = None

    def finish(self, key: RolloutKey, outcome: RolloutOutcome, reason: str) -> None:
        """Record outcome and reason, such as "zero_variance". AccountingError if not started, ended, or no reason."""
        if not reason.strip():
            raise AccountingError(f"rollout {outcome} without a reason: {key}.")
        page = self._open_steps.get(key.step)
        if page is None or key not in page.endings:
            raise AccountingError(f"rollout finished as {outcome} ({reason}) but it never started: {key}.")
        if (before := page.endings[key]) is not None:
            first = f"{before[0]} ({before[1]})"
            raise AccountingError(f"rollout finished twice, as {first} and as {outcome} ({reason}): {key}.")
        page.endings[key] = (RolloutOutcome(outcome), reason)

    def drop_restored(self, step: int, count: int, reason: str) -> None:
        """Record `count` restored rollouts of `step` as dropped."""
        self._open_step(step).restored_drops[reason] += count

    def note_clock_limit(self, step: int) -> None:
        """Record that a wall-clock limit fired in this step: the run is flagged as non-reproducible."""
        self._open_step(step).clock_limited = True

    def close(self, step: int, trained: int | None = None) -> LedgerCounts:
        """Add a step to the totals and drop its keys; a spanning ledger moves running rollouts to the next step.

        Raises AccountingError if the step is closed, an earlier one is open, a rollout has not ended, or the learner
        `trained` another number of trajectories.
        """
        self._check_not_closed(step)
        carried = self._carry_over(step) if self._spanning else []
        page = self._open_steps.get(step, _OpenStep())
        if running := sorted(key for key, ending in page.endings.items() if ending is None):
            what = f"{len(running)} of {len(page.endings)} rollouts of step {step} have no outcome"
            raise AccountingError(f"{what}, the first is {running[0]}.")
        counts = _counts(step, page)
        if trained is not None and counts.trained != trained:
            raise AccountingError(
                f"step {step}: the learner trained {trained} rollouts, the ledger has {counts.trained}."
            )
        if (earliest := min(self._open_steps, default=step)) < step:
            raise AccountingError(f"step {step} cannot be closed: step {earliest} is still open.")
        self._open_steps.pop(step, None)
        self._trained.update(key for key, ending in page.endings.items() if ending and ending[0] in _TRAINS)
        self._trained = {key for key in self._trained if key.step > step - KEPT_STEPS}
        ahead = tuple(sorted(key for key in self._trained if key.step > step))
        self._state = LedgerState(self._state.total.plus(counts), step, ahead)
        for key in carried:
            self._open_step(key.step).endings[key] = None
        return counts

    def _carry_over(self, step: int) -> list[RolloutKey]:
        """Merge the open steps into `step`; remove and return their running rollouts."""
        whole = _OpenStep()
        for page in self._open_steps.values():
            whole.restored_drops.update(page.restored_drops)
            whole.endings |= page.endings
            whole.clock_limited |= page.clock_limited
        self._open_steps = {step: whole}
        running = [key for key, ending in whole.endings.items() if ending is None]
        for key in running:
            del whole.endings[key]
        return running

    def state(self) -> LedgerState:
        """Return the state for `restore`; with the ended rollouts of open steps in the totals of a spanning ledger."""
        total = self._state.total
        for page in self._open_steps.values() if self._spanning else ():
            ended = dict(item for item in page.endings.items() if item[1] is not None)
            total = total.plus(_counts(None, replace(page, endings=ended)))
        return replace(self._state, total=total)

    def trained_ahead(self, step: int) -> set[str]:
        """Return the tasks of an open step whose rollouts were trained already."""
        return {key.task_id for key in self._state.ahead if key.step == step}

    @property
    def steps_ahead(self) -> set[int]:
        """The open steps with rollouts that were trained already."""
        return {key.step for key in self._state.ahead}

    @classmethod
    def restore(cls, state: LedgerState, *, spanning: bool = False) -> Ledger:
        """Return a ledger that continues after `state.last_closed`."""
        ledger = cls(spanning=spanning)
        ledger._state, ledger._trained = state, set(state.ahead)
        return ledger

    def _open_step(self, step: int) -> _OpenStep:
        if not self._spanning:
            self._check_not_closed(step)
        return self._open_steps.setdefault(step, _OpenStep())

    def _check_not_closed(self, step: int) -> None:
        last = self._state.last_closed
        if last is not None and step <= last:
            raise AccountingError(f"step {step} is closed (the last closed step is {last}).")


def _counts(step: int | None, page: _OpenStep) -> LedgerCounts:
    ended = [ending for ending in page.endings.values() if ending is not None]
    outcomes = Counter(outcome for outcome, _ in ended)
    outcomes[RolloutOutcome.DROPPED] += page.restored_drops.total()
    reasons = Counter(f"{outcome}/{reason}" for outcome, reason in ended)
    reasons.update({f"{RolloutOutcome.DROPPED}/{reason}": count for reason, count in page.restored_drops.items()})
    return LedgerCounts(
        step=step,
        started=len(page.endings) + page.restored_drops.total(),
        **{outcome: outcomes[outcome] for outcome in RolloutOutcome},
        by_reason=dict(sorted(reasons.items())),
        clock_limited=page.clock_limited,
    )
