"""Forward and backward passes of a step: log-probabilities, loss, gradient, optimizer."""
