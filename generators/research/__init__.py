"""Generates the facts of the world `research`."""
