"""Held-out success with honest intervals."""
