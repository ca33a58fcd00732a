"""The settings: data only, no torch."""
