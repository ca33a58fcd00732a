"""The ledger adds up after any sequence of operations."""

from collections import Counter
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger_total import running, total
from ludus.errors import LudusError
from ludus.rollouts.ledger import (
    KEPT_STEPS,
    AccountingError,
    Ledger,
    LedgerCounts,
    LedgerState,
    RolloutKey,
    RolloutOutcome,
)


def key(step=0, task="t", sample=0, attempt=0):
    return RolloutKey(step, task, sample, attempt)


def test_rollouts_of_a_step_are_counted_by_outcome_and_reason():
    ledger = Ledger()
    endings = [
        (RolloutOutcome.TRAINED, "kept"),
        (RolloutOutcome.TRAINED, "kept"),
        (RolloutOutcome.MASKED, "truncated"),
        (RolloutOutcome.DROPPED, "zero_variance"),
        (RolloutOutcome.DROPPED, "stale"),
        (RolloutOutcome.FAILED, "engine"),
    ]
    for sample, (outcome, reason) in enumerate(endings):
        ledger.start(key(sample=sample))
        ledger.finish(key(sample=sample), outcome, reason)
    counts = ledger.close(0, trained=2)
    assert counts == LedgerCounts(
        step=0,
        started=6,
        trained=2,
        masked=1,
        dropped=2,
        failed=1,
        by_reason={
            "trained/kept": 2,
            "masked/truncated": 1,
            "dropped/zero_variance": 1,
            "dropped/stale": 1,
            "failed/engine": 1,
        },
    )
    assert running(ledger) == 0
    metrics = counts.metrics()
    assert metrics["ledger/started"] == 6
    assert metrics["ledger/clock_limited"] == 0
    assert metrics["ledger/dropped/stale"] == 1


def test_retry_counts_as_a_separate_rollout():
    ledger = Ledger()
    ledger.start(key())
    ledger.finish(key(), RolloutOutcome.FAILED, "sandbox")
    ledger.start(key(attempt=1))
    ledger.finish(key(attempt=1), RolloutOutcome.TRAINED, "kept")
    counts = ledger.close(0)
    assert (counts.started, counts.failed, counts.trained) == (2, 1, 1)


def test_lost_rollout_is_reported_with_its_key():
    ledger = Ledger()
    for sample in range(3):
        ledger.start(key(step=4, task="capital-of-peru", sample=sample))
    ledger.finish(key(step=4, task="capital-of-peru"), RolloutOutcome.TRAINED, "kept")
    with pytest.raises(AccountingError, match=r"2 of 3 rollouts of step 4 .* task capital-of-peru, sample 1"):
        ledger.close(4)
    assert running(ledger) == 2


def test_impossible_transitions_raise_accounting_error():
    ledger = Ledger()
    ledger.start(key())
    with pytest.raises(AccountingError, match="started twice"):
        ledger.start(key())
    with pytest.raises(AccountingError, match="never started"):
        ledger.finish(key(sample=1), RolloutOutcome.TRAINED, "kept")
    with pytest.raises(AccountingError, match="never started"):
        ledger.finish(key(step=9), RolloutOutcome.TRAINED, "kept")
    with pytest.raises(AccountingError, match="without a reason"):
        ledger.finish(key(), RolloutOutcome.DROPPED, " ")
    ledger.finish(key(), RolloutOutcome.DROPPED, "stale")
    with pytest.raises(AccountingError, match=r"twice, as dropped \(stale\) and as trained \(kept\)"):
        ledger.finish(key(), RolloutOutcome.TRAINED, "kept")
    assert ledger.close(0).dropped == 1
    with pytest.raises(AccountingError, match="step 0 is closed"):
        ledger.start(key(sample=5))
    with pytest.raises(AccountingError, match="step 0 is closed"):
        ledger.close(0)
    assert issubclass(AccountingError, LudusError)


def test_mismatch_with_the_number_the_learner_trained_raises_error():
    ledger = Ledger()
    ledger.start(key())
    ledger.finish(key(), RolloutOutcome.TRAINED, "kept")
    with pytest.raises(AccountingError, match="learner trained 0 rollouts, the ledger has 1"):
        ledger.close(0, trained=0)
    assert ledger.close(0, trained=1).trained == 1


def test_steps_close_in_order():
    ledger = Ledger()
    ledger.start(key(step=1))
    ledger.start(key(step=2))
    ledger.finish(key(step=2), RolloutOutcome.TRAINED, "kept")
    with pytest.raises(AccountingError, match="step 1 is still open"):
        ledger.close(2)
    ledger.finish(key(step=1), RolloutOutcome.DROPPED, "stale")
    ledger.close(1)
    assert ledger.close(2).trained == 1


@pytest.mark.parametrize("spanning", [False, True])
def test_restored_rollouts_dropped_after_resume_count_in_the_next_step(spanning):
    ledger = Ledger.restore(LedgerState(LedgerCounts(step=None), last_closed=4), spanning=spanning)
    ledger.drop_restored(5, 3, "too_late")
    ledger.start(key(5))
    ledger.finish(key(5), RolloutOutcome.TRAINED, "kept")
    counts = ledger.close(5, trained=1)
    assert (counts.started, counts.trained, counts.dropped) == (4, 1, 3)
    assert counts.by_reason == {"dropped/too_late": 3, "trained/kept": 1}
    assert total(ledger).dropped == 3
    assert ledger.close(6, trained=0).started == 0


def test_clock_limit_flag_is_permanent_in_the_total():
    ledger = Ledger()
    ledger.note_clock_limit(0)
    assert ledger.close(0).clock_limited
    assert not ledger.close(1).clock_limited
    assert total(ledger).clock_limited
    assert total(Ledger.restore(ledger.state())).clock_limited


def test_inconsistent_ledger_counts_raise_error():
    with pytest.raises(AccountingError, match="1 rollouts started and 2 ended"):
        LedgerCounts(step=0, started=1, trained=2, by_reason={"trained/kept": 2})
    with pytest.raises(AccountingError, match="1 rollouts are trained, and 0 have a reason"):
        LedgerCounts(step=0, started=1, trained=1)
    with pytest.raises(AccountingError, match="belongs to no outcome"):
        LedgerCounts(step=0, started=1, by_reason={"lost/somewhere": 1})


def test_open_step_is_not_included_in_the_state():
    ledger = Ledger()
    ledger.start(key(step=0))
    ledger.finish(key(step=0), RolloutOutcome.TRAINED, "kept")
    ledger.close(0)
    ledger.start(key(step=1))
    state = ledger.state()
    assert total(ledger).started == 2
    resumed = Ledger.restore(LedgerState(LedgerCounts(**asdict(state)["total"]), state.last_closed))
    assert total(resumed).started == 1
    resumed.start(key(step=1))
    with pytest.raises(AccountingError, match="closed"):
        resumed.start(key(step=0))


KEYS = st.builds(RolloutKey, st.integers(0, 2), st.sampled_from(["a", "b"]), st.integers(0, 1))
OPERATIONS = st.one_of(
    st.tuples(st.just("start"), KEYS),
    st.tuples(st.just("finish"), KEYS, st.sampled_from(RolloutOutcome), st.sampled_from(["x", "y"])),
    st.tuples(st.just("close"), st.integers(0, 2)),
    st.tuples(st.just("resume")),
)


class Model:
    """What the ledger must hold: the rollouts that run, those that ended, and the last closed step."""

    def __init__(self):
        self.running, self.ended, self.last = set(), {}, -1

    def start(self, key):
        allowed = key.step > self.last and key not in self.running and key not in self.ended
        self.running |= {key} if allowed else set()
        return allowed

    def finish(self, key, outcome, reason):
        allowed = key in self.running
        if allowed:
            self.running.remove(key)
            self.ended[key] = (outcome, reason)
        return allowed

    def close(self, step):
        earliest = min({k.step for k in self.running | self.ended.keys() if k.step > self.last} | {step})
        allowed = self.last < step == earliest and all(k.step != step for k in self.running)
        self.last = step if allowed else self.last
        return allowed

    def resume(self):
        self.running = {k for k in self.running if k.step <= self.last}
        self.ended = {k: ending for k, ending in self.ended.items() if k.step <= self.last}


def agree(ledger, model):
    counts = total(ledger)
    outcomes = Counter(outcome for outcome, _ in model.ended.values())
    assert (counts.started, running(ledger)) == (len(model.running) + len(model.ended), len(model.running))
    assert (counts.trained, counts.masked, counts.dropped, counts.failed) == tuple(outcomes[o] for o in RolloutOutcome)
    assert counts.by_reason == dict(Counter(f"{o}/{r}" for o, r in model.ended.values()))


@given(st.lists(OPERATIONS, max_size=60))
def test_ledger_counts_match_a_model_for_any_operation_sequence(operations):
    ledger, model = Ledger(), Model()
    for name, *arguments in operations:
        if name == "resume":
            ledger = Ledger.restore(ledger.state())
            model.resume()
        elif {"start": model.start, "finish": model.finish, "close": model.close}[name](*arguments):
            {"start": ledger.start, "finish": ledger.finish, "close": ledger.close}[name](*arguments)
        else:
            with pytest.raises(AccountingError):
                {"start": ledger.start, "finish": ledger.finish, "close": ledger.close}[name](*arguments)
        agree(ledger, model)


def test_only_trained_rollouts_of_the_newest_steps_are_kept():
    ledger = Ledger()
    for step in range(3 * KEPT_STEPS):
        ledger.start(key(step=step))
        ledger.finish(key(step=step), RolloutOutcome.TRAINED, "kept")
        ledger.close(step)
    last = 3 * KEPT_STEPS - 1
    assert len(ledger._trained) == KEPT_STEPS
    assert total(ledger).trained == last + 1
