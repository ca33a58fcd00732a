"""Value models: critics, outcome critics, PRIME, reward models."""
