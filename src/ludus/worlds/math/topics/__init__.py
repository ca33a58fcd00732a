"""The generators of problems by topic."""
