"""The forward and backward passes of one step: log-probabilities, loss, gradient, optimizer."""
