"""Commands that serve or talk to a checkpoint."""
