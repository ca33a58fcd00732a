"""Commands that evaluate, inspect and configure."""
