"""Worlds of environments that other packages define or serve (docs/extend/environment_servers.md)."""
