"""Combination of reward parts: mixing, judges, several objectives, rewards without labels."""
