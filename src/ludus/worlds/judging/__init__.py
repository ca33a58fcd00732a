"""The judging world: verdicts on attempts."""
