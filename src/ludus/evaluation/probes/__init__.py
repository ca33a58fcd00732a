"""Probes: evaluations that change an episode, compare two models, or recombine attempts."""
