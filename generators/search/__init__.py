"""Generates the questions of the world `search`."""
