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
