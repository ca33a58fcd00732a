"""Reward models: data, Monte Carlo rollouts, the training loop."""
