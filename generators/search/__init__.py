"""Generates the facts of the world `search`."""
