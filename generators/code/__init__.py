"""Makes the tasks of the environment `code`."""
