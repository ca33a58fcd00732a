"""Create a sandbox backend by name. There is no fallback to another backend."""

from __future__ import annotations

from ludus.errors import UserError
from ludus.sandbox.base import Sandbox, SandboxSettings
from ludus.sandbox.local.container import ContainerSandbox
from ludus.sandbox.local.namespaces import NamespacesSandbox
from ludus.sandbox.local.unsafe_process import ProcessSandbox

SERVICES = ("sandbox_fusion", "piston")
BACKENDS = ("namespaces", "docker", "podman", "remote", *SERVICES, "process")


def open_sandbox(settings: SandboxSettings | None = None) -> Sandbox:
    """Create the backend of the settings. Raises UserError if it cannot run on this machine."""
    chosen = settings or SandboxSettings()
    match chosen.backend:
        case "namespaces":
            return NamespacesSandbox(chosen)
        case "docker" | "podman":
            return ContainerSandbox(chosen)
        case "remote":
            from ludus.sandbox.remote.client import RemoteSandbox

            return RemoteSandbox(chosen)
        case "sandbox_fusion" | "piston":
            from ludus.sandbox.remote.services import FusionSandbox, PistonSandbox

            return (FusionSandbox if chosen.backend == "sandbox_fusion" else PistonSandbox)(chosen)
        case "process":
            return ProcessSandbox(unsafe=chosen.unsafe)
    raise UserError(f"Unknown sandbox backend {chosen.backend!r}.", f"Backends: {', '.join(BACKENDS)}.")
