"""The terminal world: shell tasks, graded on the host by the final files."""
