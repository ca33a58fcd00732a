"""Worlds: tasks, tools and rewards."""
