"""`ludus serve` in another process, as users start it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from ludus.config import load_config
from ludus.engines.control_tokens import find_token
from ludus.training.run.preflight import model_path

COLD_START = Path(model_path(load_config("search")))
CONTEXT = 768


@dataclass
class Served:
    """A running server. `said` is the first line of its output."""

    process: subprocess.Popen[str]
    said: str

    @property
    def url(self) -> str:
        return self.said.rsplit(" at ", 1)[1]

    @property
    def headers(self) -> dict[str, str]:
        """The headers for its control endpoints."""
        return {"Authorization": f"Bearer {find_token(self.url)}"}

    @property
    def port(self) -> str:
        return self.url.rsplit(":", 1)[1]

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def start_server(*arguments: str, model: Path = COLD_START, port: str = "0") -> Served:
    """Start a server and wait until it listens."""
    command = [sys.executable, "-m", "ludus", "serve", str(model), "--port", port, "--name", "policy"]
    command += ["--context-tokens", str(CONTEXT), *arguments]
    with tempfile.TemporaryFile("w+") as errors:  # an unread pipe would fill up
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        said = process.stdout.readline().strip()
        if not said:
            errors.seek(0)
            raise AssertionError(errors.read())
    return Served(process, said)


def counted(metrics: str) -> dict[str, float]:
    """Return the metrics of a server by name without the prefix."""
    lines = [line.split() for line in metrics.splitlines() if not line.startswith("#")]
    return {name.removeprefix("ludus_"): float(value) for name, value in lines}


async def until_counts(client: httpx.AsyncClient, hold: Callable[[dict[str, float]], bool]) -> None:
    """Wait until the condition holds for the metrics of a server. Raise TimeoutError after a minute."""
    async with asyncio.timeout(60):
        while not hold(counted((await client.get("/metrics")).text)):
            await asyncio.sleep(0.005)


@contextmanager
def serving_model(*arguments: str, model: Path = COLD_START):
    """Run a server for the time of a block."""
    served = start_server(*arguments, model=model)
    try:
        yield served
    finally:
        served.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            served.process.communicate(timeout=15)
        served.process.kill()
        served.process.communicate()
