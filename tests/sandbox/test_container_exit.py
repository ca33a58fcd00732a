"""The exit code of a container's client tells a fault of the program from a failure of the engine."""

import asyncio
import subprocess

import pytest

from ludus.sandbox import Limits, SandboxSettings
from ludus.sandbox.local.container import Container


@pytest.mark.parametrize(
    ("command", "survives"), [("exit 0", True), ("exit 137", True), ("exit 125", False), ("kill -9 $$", False)]
)
def test_exit_of_process_1_is_no_failure_of_the_engine(command, survives):
    container = Container("docker", SandboxSettings(backend="docker"), Limits())
    with subprocess.Popen(["sh", "-c", command], stderr=subprocess.PIPE) as client:
        container._running = (client, client.stderr, None)
        assert asyncio.run(container.survives()) is survives
