"""Generates the tasks of the environment `code`."""
