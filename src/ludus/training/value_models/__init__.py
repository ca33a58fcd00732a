"""Models that grade states: critics, outcome critics, PRIME, reward models."""
