"""Guess a number with comparisons."""
