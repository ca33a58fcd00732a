"""Rollouts: run episodes concurrently and account for each in the ledger."""
