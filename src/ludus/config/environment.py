"""Environment variables: the only module that reads them."""

from __future__ import annotations

import os


def launched_rank() -> int | None:
    """Return the rank that torchrun assigned to this process; None if torchrun did not start the process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["RANK"])


def child_environment(variables: dict[str, str]) -> dict[str, str]:
    """Return the environment of a child process: this environment with these variables added."""
    return os.environ | variables


def variable(name: str, default: str) -> str:
    """Return an environment variable, or the default if it is unset or empty."""
    return os.environ.get(name) or default


def set_default_variables(variables: dict[str, str]) -> None:
    """Set environment variables of this process that are not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
