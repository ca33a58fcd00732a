"""Engines behind HTTP: routing, API adapters, weight updates."""
