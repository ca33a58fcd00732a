"""The command line: parses, calls one function, prints."""

from ludus.cli.main import main

__all__ = ["main"]
