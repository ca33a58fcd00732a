"""Building blocks of programs: typed functions whose docstrings are the task texts."""
