"""The math world: problems whose answers are known because they were made, and a tool to work them out."""
