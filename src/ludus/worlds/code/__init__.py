"""The code world: programs from a specification, graded by tests whose expected values programs cannot access."""
