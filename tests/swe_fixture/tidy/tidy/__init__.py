"""Small helpers for lists and texts."""

from tidy.lists import chunks, clamp, spread, window
from tidy.texts import Slug, shorten, title

__all__ = ["Slug", "chunks", "clamp", "shorten", "spread", "title", "window"]
