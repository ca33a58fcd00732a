"""The math world: generated problems with known answers, and a tool for the computation."""
