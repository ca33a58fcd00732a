"""The account of every rollout: what started ends as exactly one of trained, masked, dropped or failed.

Takes: `start` when an episode begins, `finish` when its fate is known. Gives: counts by outcome and reason,
step by step and over the run. Refuses: an ending without a beginning, a second ending, and closing a step
while one of its rollouts has no ending; and a rollout that has trained before, also in the run that is
resumed. Never: guesses an outcome. It belongs to one event loop and takes
no lock. A ledger that is `spanning` has rollouts that outlive the step that asked for them: a step's counts
are then of all that ended before it closed and after the step before.

    started --finish--> trained | masked | dropped | failed        (per rollout, once)
    start/finish ... -> close(step) -> LedgerCounts                (per step, in order)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ludus.errors import LudusError


class AccountingError(LudusError):
    """The ledger does not add up: a rollout was lost, or counted twice: a fault of Ludus, not of a user."""

    part = "ledger"


class RolloutOutcome(StrEnum):
    """What became of a rollout."""

    TRAINED = "trained"
    """Its action tokens entered the loss."""
    MASKED = "masked"
    """It counted for its group's statistics, and its own tokens did not enter the loss."""
    DROPPED = "dropped"
    """A filter took it out, alone or with its group."""
    FAILED = "failed"
    """The infrastructure failed; it says nothing about the model."""


@dataclass(frozen=True, slots=True, order=True)
class RolloutKey:
    """Which rollout: the step that asked for it, the task, the place in the group, the attempt (from 0)."""

    step: int
    task_id: str
    sample: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"step {self.step}, task {self.task_id}, sample {self.sample}, attempt {self.attempt}"


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Rollouts of one step, or of the whole run where `step` is None.

    `by_reason` is keyed `outcome/reason` ("dropped/zero_variance"). `clock_limited`: a wall-clock limit
    fired, so that a second run need not repeat this one bit for bit. Raises AccountingError where the counts
    cannot be true.
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
                raise AccountingError(f"{count} rollouts are {outcome}, and reasons are given for {reasons}.")
        if sum(self.by_reason.values()) != sum(ended):
            raise AccountingError(f"a reason in {sorted(self.by_reason)} belongs to no outcome.")

    @property
    def running(self) -> int:
        """Rollouts that have started and not ended."""
        return self.started - self.trained - self.masked - self.dropped - self.failed

    def plus(self, other: LedgerCounts) -> LedgerCounts:
        """The sum of both, as counts of the whole run."""
        reasons = Counter(self.by_reason)
        reasons.update(other.by_reason)
        return LedgerCounts(
            step=None,
            started=self.started + other.started,
            trained=self.trained + other.trained,
            masked=self.masked + other.masked,
            dropped=self.dropped + other.dropped,
            failed=self.failed + other.failed,
            by_reason=dict(sorted(reasons.items())),
            clock_limited=self.clock_limited or other.clock_limited,
        )

    def metrics(self) -> dict[str, float]:
        """The counts under `ledger/...` names; those of the reasons follow, and appear once they occur."""
        named = {
            "ledger/started": self.started,
            "ledger/trained": self.trained,
            "ledger/masked": self.masked,
            "ledger/dropped": self.dropped,
            "ledger/failed": self.failed,
            "ledger/clock_limited": self.clock_limited,
        }
        reasons = {f"ledger/{name}": count for name, count in sorted(self.by_reason.items())}
        return {name: float(count) for name, count in (named | reasons).items()}


@dataclass(frozen=True, slots=True)
class LedgerState:
    """What a checkpoint keeps: the totals of all closed steps, and the last of them (None before the first).

    Rollouts of a step that is still open are not in it: a resumed run samples that step again. A spanning
    ledger has no such step: those that run are not in it. `ahead` are the rollouts that have trained although
    a later step asked for them.
    """

    total: LedgerCounts = LedgerCounts(step=None)
    last_closed: int | None = None
    ahead: tuple[RolloutKey, ...] = ()


@dataclass(slots=True)
class _Page:
    """One open step: the ending of each rollout, None while it runs.

    `gone` are rollouts from before a resume that were dropped, by reason.
    """

    endings: dict[RolloutKey, tuple[RolloutOutcome, str] | None] = field(default_factory=dict)
    clock_limited: bool = False
    gone: Counter[str] = field(default_factory=Counter)


KEPT_STEPS = 16
"""Closed steps whose counts, and the rollouts that trained, a ledger keeps: the newest."""
_TRAINS = (RolloutOutcome.TRAINED, RolloutOutcome.MASKED)


class Ledger:
    """Keeps the account of a run. Steps are closed in order; the newest of them stay readable afterwards."""

    def __init__(self, *, spanning: bool = False) -> None:
        self._spanning = spanning
        self._pages: dict[int, _Page] = {}
        self._closed: dict[int, LedgerCounts] = {}
        self._trained: set[RolloutKey] = set()
        self._state = LedgerState()

    def start(self, key: RolloutKey) -> None:
        """Note that a rollout begins.

        Raises AccountingError if it has begun or trained before, or its step is closed.
        """
        if key in self._trained:
            raise AccountingError(f"rollout has trained before: {key}.")
        endings = self._page(key.step).endings
        if key in endings:
            raise AccountingError(f"rollout started twice: {key}.")
        endings[key] = None

    def finish(self, key: RolloutKey, outcome: RolloutOutcome, reason: str) -> None:
        """Note how a rollout ended, and why, in one or a few words ("zero_variance").

        Raises AccountingError if the rollout never started, has ended before, or no reason is given.
        """
        if not reason.strip():
            raise AccountingError(f"rollout {outcome} without a reason: {key}.")
        page = self._pages.get(key.step)
        if page is None or key not in page.endings:
            raise AccountingError(f"rollout finished as {outcome} ({reason}) but it never started: {key}.")
        before = page.endings[key]
        if before is not None:
            raise AccountingError(
                f"rollout finished twice, as {before[0]} ({before[1]}) and as {outcome} ({reason}): {key}."
            )
        page.endings[key] = (RolloutOutcome(outcome), reason)

    def drop_kept(self, step: int, count: int, reason: str) -> None:
        """Note that rollouts which a checkpoint kept will not train; they are counted in `step`."""
        self._page(step).gone[reason] += count

    def note_clock_limit(self, step: int) -> None:
        """Say that a wall-clock limit fired in this step: its numbers may not repeat bit for bit."""
        self._page(step).clock_limited = True

    def check(self, step: int | None = None, trained: int | None = None) -> None:
        """Raise AccountingError unless every rollout of `step` (None: of all open steps) has ended.

        `trained` is the number of trajectories that the learner says it trained in the step; a number that
        differs from the ledger's raises as well.
        """
        pages = self._pages if step is None else {step: self._pages.get(step, _Page())}
        for number, page in sorted(pages.items()):
            running = sorted(key for key, ending in page.endings.items() if ending is None)
            if running:
                raise AccountingError(
                    f"{len(running)} of {len(page.endings)} rollouts of step {number} have no outcome, "
                    f"the first is {running[0]}."
                )
        if trained is not None and step is not None and (known := self.summary(step).trained) != trained:
            raise AccountingError(
                f"step {step}: the learner trained {trained} rollouts, the ledger has {known}."
            )

    def close(self, step: int, trained: int | None = None) -> LedgerCounts:
        """End a step: check it, add it to the totals, forget its keys.

        Raises AccountingError as `check` does, and where an earlier step is still open or this one is closed.
        A spanning ledger carries what still runs over to the next step.
        """
        self._refuse_closed(step)
        running = self._carry(step) if self._spanning else {}
        self.check(step, trained)
        earliest = min(self._pages, default=step)
        if earliest < step:
            raise AccountingError(f"step {step} cannot be closed: step {earliest} is still open.")
        counts = self.summary(step)
        closed = self._pages.pop(step, _Page()).endings
        self._trained.update(key for key, ending in closed.items() if ending and ending[0] in _TRAINS)
        self._trained = {key for key in self._trained if key.step > step - KEPT_STEPS}
        self._closed[step] = counts
        if len(self._closed) > KEPT_STEPS:
            del self._closed[min(self._closed)]
        self._state = LedgerState(self._state.total.plus(counts), step, self._ahead(step))
        for key in running:
            self._page(key.step).endings[key] = None
        return counts

    @property
    def num_running(self) -> int:
        """Rollouts that have started and not ended."""
        return sum(ending is None for page in self._pages.values() for ending in page.endings.values())

    def _carry(self, step: int) -> dict[RolloutKey, None]:
        """Put all that has ended on the page of `step`, and take what runs off the pages."""
        whole = _Page(clock_limited=any(page.clock_limited for page in self._pages.values()))
        running: dict[RolloutKey, None] = {}
        for page in self._pages.values():
            whole.gone.update(page.gone)
            for key, ending in page.endings.items():
                if ending is None:
                    running[key] = None
                else:
                    whole.endings[key] = ending
        self._pages = {step: whole}
        return running

    def summary(self, step: int) -> LedgerCounts:
        """The counts of a step, open or closed; all 0 where nothing of it started.

        Raises AccountingError for a step closed before `restore`, or more than `KEPT_STEPS` steps ago: only
        its share of the totals is known.
        """
        if step in self._closed:
            return self._closed[step]
        self._refuse_closed(step)
        return _counts(step, self._pages.get(step, _Page()))

    def total(self) -> LedgerCounts:
        """The counts of the whole run so far, open steps included."""
        total = self._state.total
        for page in self._pages.values():
            total = total.plus(_counts(None, page))
        return total

    def state(self) -> LedgerState:
        """What to put into a checkpoint, and to give to `restore` on resume.

        The totals of a spanning ledger count what has ended since the last step was closed, too.
        """
        total = self._state.total
        for page in self._pages.values() if self._spanning else ():
            ended = _Page(clock_limited=page.clock_limited, gone=page.gone)
            ended.endings.update((key, ending) for key, ending in page.endings.items() if ending is not None)
            total = total.plus(_counts(None, ended))
        return replace(self._state, total=total)

    def trained_ahead(self, step: int) -> set[str]:
        """The tasks of a step that is not closed whose rollouts have trained already."""
        return {key.task_id for key in self._state.ahead if key.step == step}

    @property
    def steps_ahead(self) -> set[int]:
        """The steps that are not closed and have such tasks."""
        return {key.step for key in self._state.ahead}

    @classmethod
    def restore(cls, state: LedgerState, *, spanning: bool = False) -> Ledger:
        """A ledger that goes on after `state.last_closed`."""
        ledger = cls(spanning=spanning)
        ledger._state, ledger._trained = state, set(state.ahead)
        return ledger

    def _ahead(self, step: int) -> tuple[RolloutKey, ...]:
        return tuple(sorted(key for key in self._trained if key.step > step))

    def _page(self, step: int) -> _Page:
        if not self._spanning:
            self._refuse_closed(step)
        return self._pages.setdefault(step, _Page())

    def _refuse_closed(self, step: int) -> None:
        last = self._state.last_closed
        if last is not None and step <= last:
            raise AccountingError(f"step {step} is closed (the last closed step is {last}).")


def _counts(step: int | None, page: _Page) -> LedgerCounts:
    ended = [ending for ending in page.endings.values() if ending is not None]
    outcomes = Counter(outcome for outcome, _ in ended)
    reasons = Counter(f"{outcome}/{reason}" for outcome, reason in ended)
    reasons.update({f"{RolloutOutcome.DROPPED}/{reason}": count for reason, count in page.gone.items()})
    return LedgerCounts(
        step=step,
        started=len(page.endings) + page.gone.total(),
        trained=outcomes[RolloutOutcome.TRAINED],
        masked=outcomes[RolloutOutcome.MASKED],
        dropped=outcomes[RolloutOutcome.DROPPED] + page.gone.total(),
        failed=outcomes[RolloutOutcome.FAILED],
        by_reason=dict(sorted(reasons.items())),
        clock_limited=page.clock_limited,
    )
