"""Tasks in the layout of Terminal-Bench, from a folder."""
