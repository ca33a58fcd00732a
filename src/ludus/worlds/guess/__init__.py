"""The guess world: find a number by comparisons."""
