"""Rewards of executed work: unit tests, patches, SQL rows, turns."""
