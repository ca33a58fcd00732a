"""Generator of the tasks of the world `functions`."""
