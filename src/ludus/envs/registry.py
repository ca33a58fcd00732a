"""Worlds by name. A new one is one line here, or a file of the user's own."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ludus.config.sections.rollout import EnvConfig, RolloutConfig
from ludus.config.sections.sandbox import SandboxConfig
from ludus.envs.base import Closes, LimitsConcurrency, UsesSandbox, World, runs_programs
from ludus.envs.mixture import MixedWorld, MixtureMember, bounded, check_tools
from ludus.envs.toolbox import ToolLimits, describe_error
from ludus.errors import ConfigError, LudusError, UserError, did_you_mean
from ludus.rewards.base import check_rewards
from ludus.sandbox import Sandbox, SandboxSettings, open_sandbox
from ludus.sandbox.self_test import python_inside

WORLDS: Mapping[str, str] = {
    "code": "ludus.worlds.code.world:make_code_world",
    "functions": "ludus.worlds.functions.world:make_functions_world",
    "guess": "ludus.worlds.guess.world:make_guess_world",
    "math": "ludus.worlds.math.world:make_math_world",
    "search": "ludus.worlds.search.world:make_search_world",
    "sql": "ludus.worlds.sql.world:make_sql_world",
    "terminal": "ludus.worlds.terminal.world:make_terminal_world",
    "swe": "ludus.worlds.swe.world:make_swe_world",
}
"""Name -> `module:function`. The function takes the world's settings and the limits of its tools."""

Factory = Callable[[Mapping[str, Any], ToolLimits], World]


def build_world(env: EnvConfig, rollout: RolloutConfig, sandbox: SandboxConfig | None = None) -> World:
    """The world of a configuration.

    `env.name` is a name in `WORLDS` or the path of a Python file, relative to the working directory, that
    defines `make_world(settings, limits)`. A world that is a `UsesSandbox` gets the sandbox of the settings
    (none: the default one). Where `env.mixture` names worlds it is they, as one. Raises ConfigError for an
    unknown name, a file without that function or that raises, and rewards in which shaping could outweigh
    the outcome; UserError for a file that is missing and for a package that is not installed.
    """
    if env.mixture:
        mixture = _mixture(env, rollout)
        check_tools(mixture, env.rendering)
        return mixture.with_sandbox(_sandbox(sandbox)) if mixture.runs_programs else mixture
    world = _one_world(env.name, env.settings, rollout)
    return world.with_sandbox(_sandbox(sandbox)) if isinstance(world, UsesSandbox) else world


def _one_world(name: str, settings: Mapping[str, object], rollout: RolloutConfig) -> World:
    limits = ToolLimits(timeout_s=rollout.tool_timeout_s, max_output=rollout.max_tool_output)
    with _blaming(Path(name)) if name.endswith(".py") else nullcontext():
        world = _factory(name)(settings, limits)
    if world is None:
        raise ConfigError(f"{name}: make_world returned nothing.", "Have it return the world.")
    check_rewards(world.rewards)
    return world


def _mixture(env: EnvConfig, rollout: RolloutConfig) -> MixedWorld:
    """The worlds of `env.mixture`. Errors name the place in the mixture."""
    members = []
    for name, member in env.mixture.items():
        own = bounded(rollout, member)
        try:
            world = _one_world(member.world or name, member.settings, own)
        except UserError as error:
            place = f"env.mixture.{name}.settings"
            raise type(error)(
                error.message.replace("env.settings", place),
                f"{error.hint.replace('env.settings', place)} (The world is env.mixture.{name}.)",
            ) from error
        members.append(MixtureMember(name, world, own, member.weight, member.weight_end))
    return MixedWorld(tuple(members))


def _sandbox(config: SandboxConfig | None) -> Sandbox:
    return open_sandbox(sandbox_settings(config or SandboxConfig()))


def sandbox_settings(config: SandboxConfig) -> SandboxSettings:
    """The section `sandbox` as the sandbox takes it. Raises ConfigError for a token that cannot be read."""
    token = ""
    if config.token_file:
        try:
            token = Path(config.token_file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The token cannot be read from {config.token_file}: {error}.", "Check sandbox.token_file."
            ) from error
    return SandboxSettings(
        backend=config.backend,
        concurrency=config.concurrency,
        sessions=config.sessions,
        python=config.python,
        binds=tuple(config.binds),
        paths=tuple(config.paths),
        image=config.image,
        runtime=config.runtime,
        url=config.url,
        token=token,
        unsafe=config.unsafe,
    )


def check_sandbox(config: SandboxConfig, world: World) -> None:
    """Have one program run where the world's programs will, and a session where its episodes hold one.

    For use outside an event loop. Raises WorldError where nothing answers or it fails, UserError for what the
    sandbox refuses or does not have.
    """
    if not runs_programs(world):
        return
    worlds = [member.world for member in world.members] if isinstance(world, MixedWorld) else [world]

    async def ask() -> None:
        sandbox = _sandbox(config)
        try:
            await python_inside(sandbox)
            if any(isinstance(one, LimitsConcurrency) for one in worlds):
                await (await sandbox.session("shell")).close()
        finally:
            await sandbox.close()

    try:
        asyncio.run(ask())
    except LudusError as error:
        where = f" --url {config.url}" if config.url else ""
        raise type(error)(
            f"The world {world.name!r} runs programs, and its sandbox does not. {error.message}",
            f"{error.hint} `ludus sandbox check --backend {config.backend}{where}` tries it.".strip(),
        ) from error


@asynccontextmanager
async def closing(world: World) -> AsyncIterator[None]:
    """Close what a world has opened when the block is left."""
    try:
        yield
    finally:
        if isinstance(world, Closes):
            await world.close()


def _factory(name: str) -> Factory:
    if name.endswith(".py"):
        return _from_file(Path(name))
    if name not in WORLDS:
        guess = did_you_mean(name, WORLDS)
        raise ConfigError(
            f"There is no world {name!r}.",
            f"{guess}Known: {', '.join(sorted(WORLDS))}; a world of your own is given by its .py file.",
        )
    module, _, function = WORLDS[name].partition(":")
    factory: Factory = vars(importlib.import_module(module))[function]
    return factory


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """What a user's file raises, as one sentence that names the line."""
    try:
        yield
    except LudusError:
        raise
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}, line {error.lineno}: {error.msg}.", "Mend the file.") from error
    except Exception as error:  # boundary: foreign code; the cause and its line travel in the message
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise ConfigError(f"{where}: {describe_error(error)}.", "Mend the file.") from error


def _from_file(path: Path) -> Factory:
    if not path.is_file():
        raise UserError(
            f"There is no file {path}.",
            f"env.name takes the path of a Python file, as seen from the working directory ({Path.cwd()}).",
        )
    name = f"ludus_world_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported.", "Is it a Python file?")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look their own module up
    spec.loader.exec_module(module)
    factory = vars(module).get("make_world")
    if not callable(factory):
        raise ConfigError(f"{path} defines no function make_world(settings, limits).", "Add one.")
    found: Factory = factory
    return found
