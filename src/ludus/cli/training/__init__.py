"""Training commands."""
