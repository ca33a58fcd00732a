"""Worlds by name. To add one, add a line here, or name a Python file in `env.name`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import cast

from ludus.config.sections.rollout import EnvConfig, RolloutConfig, SandboxConfig
from ludus.envs.base import World
from ludus.envs.mixture import MixedWorld, MixtureMember, bounded, check_tools
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import ToolWorld
from ludus.errors import ConfigError, LudusError, UserError
from ludus.plugins import describe_value, find_plugin, is_file_reference, plugin_errors
from ludus.rewards.base import check_rewards
from ludus.sandbox import Sandbox, SandboxSettings, open_sandbox
from ludus.sandbox.self_test import python_version
from ludus.tools.base import Tool

_ADAPTERS, _INTERFACES = "ludus.worlds.adapters", "ludus.worlds.interfaces"
ADAPTERS: Mapping[str, str] = {
    "gem": f"{_ADAPTERS}.gem:make_gem_world",
    "gymnasium": f"{_ADAPTERS}.gymnasium:make_gymnasium_world",
    "openspiel": f"{_ADAPTERS}.openspiel:make_openspiel_world",
    "scienceworld": f"{_ADAPTERS}.scienceworld:make_scienceworld_world",
    "textarena": f"{_ADAPTERS}.textarena:make_textarena_world",
    "textworld": f"{_ADAPTERS}.textworld:make_textworld_world",
    "textworld_express": f"{_ADAPTERS}.textworld_express:make_textworld_express_world",
    "browsergym": f"{_INTERFACES}.browsergym:make_browsergym_world",
    "nemo_gym": f"{_INTERFACES}.nemo_gym:make_nemo_gym_world",
    "openenv": f"{_INTERFACES}.openenv:make_openenv_world",
    "remote": "ludus.envs.remote.world:make_remote_world",
    "tau2": f"{_INTERFACES}.tau2:make_tau2_world",
    "tools": f"{_INTERFACES}.tool_tasks:make_tool_tasks_world",
    "verifiers": f"{_INTERFACES}.verifiers:make_verifiers_world",
}
"""Worlds whose tasks are those of another package or of a server (docs/extend/bring_your_environment.md and
environment_servers.md)."""
WORLDS: Mapping[str, str] = {
    "archive": "ludus.worlds.archive.world:make_archive_world",
    "code": "ludus.worlds.code.world:make_code_world",
    "functions": "ludus.worlds.functions.world:make_functions_world",
    "games": "ludus.worlds.games.world:make_games_world",
    "gui": "ludus.worlds.apps.world:make_gui_world",
    "guess": "ludus.worlds.guess.world:make_guess_world",
    "household": "ludus.worlds.household.world:make_household_world",
    "judging": "ludus.worlds.judging.world:make_judging_world",
    "math": "ludus.worlds.math.world:make_math_world",
    "proofs": "ludus.worlds.proofs.world:make_proofs_world",
    "proposals": "ludus.worlds.proposals.world:make_proposals_world",
    "puzzles": "ludus.worlds.puzzles.world:make_puzzles_world",
    "research": "ludus.worlds.research.world:make_research_world",
    "search": "ludus.worlds.search.world:make_search_world",
    "service": "ludus.worlds.service.world:make_service_world",
    "shop": "ludus.worlds.shop.world:make_shop_world",
    "sql": "ludus.worlds.sql.world:make_sql_world",
    "terminal": "ludus.worlds.terminal.world:make_terminal_world",
    "web": "ludus.worlds.apps.world:make_web_world",
    "swe": "ludus.worlds.swe.world:make_swe_world",
}
"""Worlds with tasks of their own: name -> `module:function`. The function takes settings and tool limits."""
FACTORIES: Mapping[str, str] = {**WORLDS, **ADAPTERS}
"""All worlds by name."""


def build_world(env: EnvConfig, rollout: RolloutConfig, sandbox: SandboxConfig | None = None) -> World:
    """Return the world of a configuration: `env.mixture` if it names worlds, else `env.name`.

    `env.name` is a name in `FACTORIES`, or the path of a Python file that defines
    `make_world(settings, limits)`. A world that runs programs uses the configured sandbox (None: the default).
    Raises ConfigError for an unknown name, a file without that function or that raises, and rewards in which shaping
    could outweigh the outcome; UserError for a missing file or package.
    """
    if env.mixture:
        mixture = _mixture(env, rollout)
        check_tools(mixture, env.rendering)
        return mixture.with_sandbox(_sandbox(sandbox)) if mixture.runs_programs else mixture
    world, tools = _one_world(env.name, env.settings, rollout), plugin_tools(env.tools)
    if tools:
        if not isinstance(world, ToolWorld):
            raise ConfigError(f"env.tools: the world {world.name!r} does not accept more tools.", "Write a ToolWorld.")
        world = replace(world, tools=(*world.tools, *tools))
    return world.with_sandbox(_sandbox(sandbox)) if world.implements("with_sandbox") else world


def _one_world(name: str, settings: Mapping[str, object], rollout: RolloutConfig) -> World:
    limits = ToolLimits.of(rollout)
    file = Path(name.partition(":")[0]) if is_file_reference(name) else None
    path = f"{name}:make_world" if name.endswith(".py") else name
    if name == "agent":
        raise UserError(
            "The run was trained on an agent function, which a command cannot load.",
            "Use ludus.evaluate or ludus.rollout with world=AgentWorld.of(agent, tasks, reward) (docs/use/agents.md).",
        )
    known = resolve_name(FACTORIES[name]) if name in FACTORIES else None
    found = known or find_plugin("worlds", path, "env.name", FACTORIES)
    factory = cast(Callable[[Mapping[str, object], ToolLimits], World], found)
    with plugin_errors(str(file), file.resolve()) if file else nullcontext():
        world = factory(settings, limits)
    if not isinstance(world, World):
        raise ConfigError(
            f"{name}: make_world returned {describe_value(world)}.",
            "Return an instance of a subclass of World (ludus.envs.base).",
        )
    check_rewards(world.rewards)
    return world


def _mixture(env: EnvConfig, rollout: RolloutConfig) -> MixedWorld:
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
    """Return the settings of the section `sandbox`. Raises ConfigError if the token cannot be read."""
    token = ""
    if config.token_file:
        try:
            token = Path(config.token_file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The token cannot be read from {config.token_file}: {error}.", "Check sandbox.token_file."
            ) from error
    own = config.model_dump(exclude={"token_file", "binds", "paths"})
    return SandboxSettings(**own, token=token, binds=tuple(config.binds), paths=tuple(config.paths))


async def try_sandbox(config: SandboxConfig, *, sessions: bool) -> str:
    """Run a test program in the sandbox, open a session if `sessions`, and return the version of its Python.

    Raises WorldError if the sandbox is unreachable or fails, UserError if it refuses or lacks something.
    """
    sandbox = _sandbox(config)
    try:
        version = await python_version(sandbox)
        if sessions:
            await (await sandbox.session("shell")).close()
    finally:
        await sandbox.close()
    return version


def check_sandbox(config: SandboxConfig, world: World) -> None:
    """Run a test program in the sandbox of a world that needs one, and open a session if its episodes use them.

    For use outside an event loop. Raises WorldError if the sandbox is unreachable or fails, UserError if it refuses
    or lacks something.
    """
    if not world.runs_programs:
        return
    worlds = [member.world for member in world.members] if isinstance(world, MixedWorld) else [world]
    try:
        asyncio.run(try_sandbox(config, sessions=any(one.implements("episodes_at_once") for one in worlds)))
    except LudusError as error:
        where = f" --url {config.url}" if config.url else ""
        raise type(error)(
            f"The world {world.name!r} runs programs, but its sandbox does not work. {error.message}",
            f"{error.hint} `ludus sandbox check --backend {config.backend}{where}` repeats this check.".strip(),
        ) from error


@asynccontextmanager
async def closing(world: World) -> AsyncIterator[None]:
    """Close the world at the end of the block."""
    try:
        yield
    finally:
        await world.close()


def plugin_tools(names: Sequence[str]) -> tuple[Tool, ...]:
    """Return the tools of `env.tools`. Raises ConfigError for an object that is not a tool."""
    found = [find_plugin("tools", name, "env.tools", ()) for name in names]
    for name, one in zip(names, found, strict=True):
        if not isinstance(one, Tool):
            raise ConfigError(f"env.tools: {name} is not a Tool.", "Make one with `ludus.tools.base.tool`.")
    return tuple(one for one in found if isinstance(one, Tool))
