"""Training: learners, trainers and their data."""
