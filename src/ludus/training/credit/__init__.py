"""Compute advantages from rewards: turn rewards, self-play roles, model estimates, calibration."""
