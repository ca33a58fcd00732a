"""The `ludus` command line."""

from ludus.cli.main import main

__all__ = ["main"]
