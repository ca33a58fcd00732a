"""One episode, many episodes, and the ledger that accounts for each."""
