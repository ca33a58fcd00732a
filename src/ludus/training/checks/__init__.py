"""Checks before the first step: memory, settings without effect, frozen references."""
