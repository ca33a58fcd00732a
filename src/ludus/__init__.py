"""Ludus trains tool-using LLM agents by reinforcement learning. Read `ludus.types` first."""

__version__ = "0.1.0"
