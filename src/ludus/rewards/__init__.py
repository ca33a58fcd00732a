"""Verifiers and shaping, as small composable functions."""
