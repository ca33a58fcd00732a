"""The package's own settings of its tests."""
