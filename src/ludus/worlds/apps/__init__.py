"""The worlds gui and web: tasks in small web applications, verified by their tables."""
