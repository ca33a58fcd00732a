"""Draws the problems of the world `math`."""
