"""Commands that serve a checkpoint or chat with it."""
