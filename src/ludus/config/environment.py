"""What the environment says: the one place that asks it."""

from __future__ import annotations

import os


def launched_rank() -> int | None:
    """The number of this process among those that torchrun started; None where it did not."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["RANK"])
