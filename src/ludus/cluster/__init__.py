"""Run engines, rollouts and rewards in other processes, on one or many machines."""
