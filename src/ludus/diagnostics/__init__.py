"""Metrics, timings, alarms and trackers of a run."""
