"""`ludus eval --run RUN --follow`: evaluate each new checkpoint of a run that trains in another process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from ludus.cli.ui.terminal import make_console, print_text
from ludus.errors import UserError
from ludus.training.run.run_dir import RunFolder, is_running, list_checkpoints

POLL_S = 2.0
"""Seconds between two looks for a new checkpoint."""


def follow(args: argparse.Namespace, evaluate: Callable[[], int]) -> int:
    """Call `evaluate`, which evaluates the newest checkpoint, for each new one until the run ends.

    Checkpoints written during an evaluation are skipped except the newest. Returns the largest exit code of
    `evaluate`. Raises UserError if the run ends without a checkpoint.
    """
    if args.run is None:
        raise UserError("--follow needs a run.", "Add --run RUN.")
    folder, console, code, last = RunFolder(args.run), make_console(), 0, -1
    while True:
        running = is_running(folder)  # read first: a checkpoint written before the end is evaluated
        found = list_checkpoints(folder.checkpoints)
        if found and found[-1][0] > last:
            last = found[-1][0]
            code = max(code, evaluate())
        elif not running:
            break
        else:
            if last < 0:
                print_text(console, f"Waiting for the first checkpoint of {args.run} ...")
                last = 0
            time.sleep(POLL_S)
    if not found:
        raise UserError(f"The run {args.run} ended without a checkpoint.", "See its log.txt.")
    return code
