"""The learner and the loops that drive it."""
