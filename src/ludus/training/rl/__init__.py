"""The RL loops (sync, one-step, async) and the steps they share."""
