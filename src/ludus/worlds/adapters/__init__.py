"""Worlds over environments of other packages."""
