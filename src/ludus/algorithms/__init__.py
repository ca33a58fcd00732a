"""Pure tensor functions: advantages, losses, aggregation, KL, corrections, filters."""
