"""Sampling in other processes, on this machine or on many."""
