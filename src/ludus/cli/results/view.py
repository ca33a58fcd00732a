"""Look at a run in the browser: rollouts, tokens, groups, tasks and curves."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable, Sequence

from ludus.cli.serving.serve import needs_serve_extra
from ludus.cli.ui.terminal import bars, make_console, print_line, print_text
from ludus.config.schema import Config
from ludus.envs.registry import build_world
from ludus.errors import LudusError
from ludus.rewards.base import success
from ludus.rollouts.rollout_files import RolloutRecord
from ludus.training.run.run_dir import RunFolder


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Serve until interrupted."""
    with needs_serve_extra():
        import uvicorn

        from ludus.gateway.limits import open_socket, url_of
        from ludus.viewer.server import make_app
    from ludus.viewer.index import RolloutIndex, rollout_files
    from ludus.viewer.pages import RunPages

    folder = RunFolder(args.run)
    console = make_console()
    index = RolloutIndex(folder, _verifier(folder.load_config()))
    with bars(console) as progress:
        task = progress.add_task("indexing rollouts", total=len(rollout_files(folder)), numbers="")
        if not index.refresh(lambda _: progress.advance(task)):
            progress.remove_task(task)
    loopback = args.host in ("127.0.0.1", "localhost", "::1")
    token = args.token or ("" if loopback else secrets.token_urlsafe(24))
    with open_socket(args.host, args.port) as listener:
        url = url_of(listener) + (f"/?token={token}" if token else "")
        print_line(console, f"Viewing {args.run} at {url}")
        print_text(console, "Stop with Ctrl-C.")
        app = make_app(RunPages(index), token=token, live=args.live)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


def _verifier(config: Config) -> Callable[[RolloutRecord], bool | None]:
    """Return a function that returns whether a rollout solved its task, or None if the world is not available."""
    try:
        rewards = build_world(config.env, config.rollout).rewards
    except LudusError:
        return lambda _: None
    return lambda record: success(rewards, record.trajectory)
