"""The section `sandbox`, and how a world opens and closes its sandbox."""

import asyncio
import dataclasses

import pytest

from ludus.config import load_config
from ludus.config.sections.rollout import SandboxConfig
from ludus.envs.registry import build_world, closing, sandbox_settings
from ludus.errors import ConfigError
from ludus.sandbox import SandboxSettings

WORLD = """
from dataclasses import dataclass, replace
from ludus.envs.base import World
from ludus.envs.tool_env import ToolEnv
from ludus.rewards.base import Reward
from ludus.sandbox.base import Sandbox
from ludus.tools.workspace import python_tool
from ludus.types import Message, Task

@dataclass(frozen=True)
class Programs(World):
    limits: object
    sandbox: Sandbox | None = None
    name: str = "programs"
    splits: tuple = ("train",)
    rewards: tuple = (Reward("right", lambda task, trajectory: 1.0, outcome=True),)

    def tasks(self, split):
        return [Task("1", (Message(role="user", content="?"),), None)]

    def environment(self, task):
        return ToolEnv([python_tool(self.sandbox)], self.rewards, self.limits)

    def with_sandbox(self, sandbox):
        return replace(self, sandbox=sandbox)

    async def close(self):
        await self.sandbox.close()

def make_world(settings, limits):
    return Programs(limits)
"""


def world_of(tmp_path, *overrides):
    path = tmp_path / "programs.py"
    path.write_text(WORLD)
    config = load_config(None, ["--env.name", str(path), *overrides])
    return build_world(config.env, config.rollout, config.sandbox)


def test_a_world_acquires_and_releases_the_configured_sandbox(tmp_path):
    world = world_of(tmp_path, "--sandbox.concurrency", "3")
    assert world.implements("with_sandbox")
    assert (world.sandbox.name, world.sandbox.concurrency) == ("namespaces", 3)

    async def act():
        async with closing(world):
            outcome = await world.sandbox.run("print(5)")
            assert world.sandbox._open
            return outcome.text

    assert asyncio.run(act()) == "5\n"
    assert not world.sandbox._open


def test_every_setting_reaches_the_sandbox(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    words = {
        "backend": "remote",
        "concurrency": "2",
        "sessions": "3",
        "python": "/usr/bin/python3",
        "binds": '["/usr/share:/shown"]',
        "paths": '["/shown"]',
        "image": "mine",
        "runtime": "runsc",
        "url": "http://127.0.0.1:1",
        "token_file": str(tmp_path / "token"),
        "unsafe": "true",
    }
    assert set(words) == set(SandboxConfig.model_fields)
    overrides = [word for name, value in words.items() for word in (f"--sandbox.{name}", value)]
    made = sandbox_settings(load_config(None, overrides).sandbox)
    assert (made.token, made.binds, made.paths) == ("secret", ("/usr/share:/shown",), ("/shown",))
    plain = SandboxSettings()
    same = [f.name for f in dataclasses.fields(plain) if vars_of(made)[f.name] == vars_of(plain)[f.name]]
    assert same == []


def vars_of(settings):
    return dataclasses.asdict(settings)


def test_sandbox_config_defaults_match_the_sandbox_settings():
    assert sandbox_settings(SandboxConfig()) == SandboxSettings()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--sandbox.backend", "process"], "isolates nothing"),
        (["--sandbox.backend", "remote", "--sandbox.url", "http://x"], "sandbox.token_file"),
        (["--sandbox.backend", "chroot"], "sandbox.backend"),
    ],
)
def test_invalid_sandbox_settings_raise_config_error(overrides, words):
    with pytest.raises(ConfigError, match=words):
        load_config(None, overrides)


def test_an_unreadable_token_is_reported(tmp_path):
    words = ["--sandbox.backend", "remote", "--sandbox.url", "http://x"]
    with pytest.raises(ConfigError, match="The token cannot be read"):
        world_of(tmp_path, *words, "--sandbox.token_file", str(tmp_path / "none"))
