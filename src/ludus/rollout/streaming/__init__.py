"""Asynchronous rollouts: the group queue, staleness control, partial rollouts."""
