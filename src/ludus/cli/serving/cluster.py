"""List, add or remove engines of a running run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ludus.cli.ui.fitted_table import make_table
from ludus.cli.ui.terminal import make_console, print_line
from ludus.errors import UserError
from ludus.training.run.run_dir import RunFolder


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Send the request to the run and print its engines afterwards."""
    from ludus.cluster.control import send_request

    folder = RunFolder(args.folder)
    folder.check()
    if args.number is not None and args.act != "remove-engine":
        raise UserError("--number is for remove-engine.", "Omit it.")
    if not folder.load_config().cluster.enabled:
        text = f"The run in {args.folder} has no cluster: its engine runs in the learner's process."
        raise UserError(text, f"Resume it with one: ludus train --resume {args.folder} --cluster local")
    reply = send_request(args.folder, args.act, args.number, timeout_s=args.timeout_s)
    rows = [(row["number"], row["url"], row["pid"], row["in_flight"]) for row in reply["engines"]]
    console = make_console()
    console.print(make_table(("engine", "address", "process", "requests"), rows))
    print_line(console, f"engines: {len(reply['engines'])}, workers: {reply['workers']}")
