"""Helpers for lists."""


def chunks(items, size):
    """Pieces of `size` items each; the last one may be shorter."""
    if size < 1:
        raise ValueError("size has to be 1 or more")
    return [items[i : i + size] for i in range(0, len(items), size)]


def window(items, size):
    """All runs of `size` items that stand side by side."""
    return [items[i : i + size] for i in range(len(items) - size + 1)]


def clamp(value, low, high):
    """The value, held between two bounds."""
    if value < low:
        return low
    return high if value > high else value


def spread(items):
    """The greatest item less the smallest; 0 of nothing."""
    if not items:
        return 0
    return max(items) - min(items)
