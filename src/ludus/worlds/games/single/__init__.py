"""Games for one player."""
