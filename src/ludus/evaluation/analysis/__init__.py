"""What evaluations and rollouts show beyond success: cost, behavior, contamination."""
