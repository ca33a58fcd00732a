"""Create a sandbox backend by name. There is no fallback to another backend."""

from __future__ import annotations

from dataclasses import dataclass

from ludus.errors import UserError
from ludus.sandbox.base import Sandbox
from ludus.sandbox.local.container import ContainerSandbox, ContainerSettings
from ludus.sandbox.local.namespaces import NamespaceSettings, NamespacesSandbox
from ludus.sandbox.local.unsafe_process import ProcessSandbox

SERVICES = ("sandbox_fusion", "piston")
BACKENDS = ("namespaces", "docker", "podman", "remote", *SERVICES, "process")


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """Backend name and options: `concurrency`, `python`, `binds` and `paths` are for namespaces, `sessions` for
    namespaces, docker and podman, `image` and `runtime` for docker and podman, `url` and `token` for remote and public
    services, `unsafe` for process."""

    backend: str = "namespaces"
    concurrency: int = 0
    sessions: int = 0
    python: str = ""
    binds: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    image: str = "python:3.12-slim"
    runtime: str = ""
    url: str = ""
    token: str = ""
    unsafe: bool = False


def open_sandbox(settings: SandboxSettings | None = None) -> Sandbox:
    """Create the backend of the settings. Raises UserError if it cannot run on this machine."""
    chosen = settings or SandboxSettings()
    match chosen.backend:
        case "namespaces":
            return NamespacesSandbox(
                NamespaceSettings(chosen.concurrency, chosen.sessions, chosen.python, chosen.binds, chosen.paths)
            )
        case "docker" | "podman":
            return ContainerSandbox(ContainerSettings(chosen.backend, chosen.image, chosen.runtime, chosen.sessions))
        case "remote":
            from ludus.sandbox.remote.client import RemoteSandbox, RemoteSettings

            return RemoteSandbox(RemoteSettings(chosen.url, chosen.token))
        case "sandbox_fusion" | "piston":
            from ludus.sandbox.remote.client import RemoteSettings
            from ludus.sandbox.remote.services import FusionSandbox, PistonSandbox

            service = FusionSandbox if chosen.backend == "sandbox_fusion" else PistonSandbox
            return service(RemoteSettings(chosen.url, chosen.token))
        case "process":
            return ProcessSandbox(unsafe=chosen.unsafe)
    raise UserError(f"Unknown sandbox backend {chosen.backend!r}.", f"Backends: {', '.join(BACKENDS)}.")
