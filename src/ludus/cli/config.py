"""To come."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None yet."""


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Nothing yet."""
    return 0
