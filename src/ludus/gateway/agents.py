"""The server of a run's agents, started only if they need it."""

from __future__ import annotations

from pathlib import Path

from ludus.config.sections.rollout import AgentConfig
from ludus.engines.control_tokens import read_token
from ludus.envs.base import World
from ludus.errors import UserError
from ludus.rollouts.agent_runs import AgentServer


def agent_server(world: World, settings: AgentConfig) -> AgentServer | None:
    """Return the server of agents that use a base URL, if there are any. Raises UserError without the extra `serve`."""
    if not (world.needs_server or settings.is_set):
        return None
    try:
        from ludus.gateway.sessions import session_server
    except ImportError as error:
        hint = "Install it: pip install 'ludus[serve]'."
        raise UserError(f"Agents with a base URL need the package {error.name}.", hint) from error
    token = read_token(Path(settings.token_file)) if settings.token_file is not None else ""
    return session_server(settings.host, settings.port, token)
