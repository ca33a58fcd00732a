"""Checks before the first step: memory, settings without effect, reference digests."""
