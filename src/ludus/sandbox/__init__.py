"""Sandboxes for programs written by a policy: one interface, one module per backend, limits as data.

See docs/use/sandbox.md.
"""

from ludus.errors import UserError
from ludus.sandbox.base import Limits, Sandbox, SandboxSettings
from ludus.sandbox.local.container import ContainerSandbox
from ludus.sandbox.local.namespaces import NamespacesSandbox
from ludus.sandbox.local.unsafe_process import ProcessSandbox

__all__ = ["BACKENDS", "SERVICES", "Limits", "NamespacesSandbox", "Sandbox", "SandboxSettings", "open_sandbox"]

SERVICES = ("sandbox_fusion", "piston")
BACKENDS = ("namespaces", "docker", "podman", "remote", *SERVICES, "process")


def open_sandbox(settings: SandboxSettings | None = None) -> Sandbox:
    """Create the sandbox of the configured backend. Raises UserError if it cannot run on this machine."""
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
            from ludus.sandbox.remote.client import FusionSandbox, PistonSandbox

            return (FusionSandbox if chosen.backend == "sandbox_fusion" else PistonSandbox)(chosen)
        case "process":
            return ProcessSandbox(unsafe=chosen.unsafe)
    raise UserError(f"Unknown sandbox backend {chosen.backend!r}.", f"Backends: {', '.join(BACKENDS)}.")
