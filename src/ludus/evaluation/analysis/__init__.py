"""Analysis of evaluations and rollouts beyond success: cost, behavior, contamination."""
