"""Collect the data of a step: prompts, rollouts, filters, demonstrations, replay buffer."""
