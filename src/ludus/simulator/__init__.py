"""Predict the step time of a run on other hardware: a cost model, and a simulation of the scheduler in virtual time."""
