"""The counts of a ledger, including its open steps."""

from ludus.rollouts.ledger import Ledger, LedgerCounts, _counts


def total(ledger: Ledger) -> LedgerCounts:
    counts = ledger._state.total
    for page in ledger._open_steps.values():
        counts = counts.plus(_counts(None, page))
    return counts


def running(ledger: Ledger) -> int:
    counts = total(ledger)
    return counts.started - counts.trained - counts.masked - counts.dropped - counts.failed
