"""Commands that evaluate a model, and that compare evaluations."""
