"""The kinds of problems by topic."""
