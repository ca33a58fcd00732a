"""Preference optimization: pairs, their sources, the training loop."""
