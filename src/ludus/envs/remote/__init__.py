"""Worlds that run in another process or on another host (`ludus env serve`)."""
