"""The section `sandbox`: where programs written by the policy run."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.section import Section


class SandboxConfig(Section):
    """Where tools run programs. See docs/use/sandbox.md."""

    backend: Literal["namespaces", "docker", "podman", "remote", "sandbox_fusion", "piston", "process"] = "namespaces"
    """Isolation of programs from the host; there is no fallback to a weaker backend."""
    concurrency: int = Field(0, ge=0)
    """namespaces: concurrent runs outside sessions; 0 is one per processor, at least 2."""
    sessions: int = Field(0, ge=0)
    """namespaces, docker and podman: concurrent sessions of episodes (`terminal`, `swe`); more episodes wait. 0 is as
    many as fit into half of the memory at 512 MiB each."""
    python: str = ""
    """namespaces: the interpreter inside; empty is this one, otherwise the system's."""
    binds: list[str] = Field([])
    """namespaces: host folders that programs may read, as `folder` or `folder:place`."""
    paths: list[str] = Field([])
    """namespaces: additions to `sys.path` inside."""
    image: str = "python:3.12-slim"
    """docker and podman: the image, which must be present."""
    runtime: str = ""
    """docker and podman: the runtime, `runsc` for gVisor; empty is the engine's default."""
    url: str = ""
    """remote: address of `ludus sandbox serve`; sandbox_fusion and piston: address of the service."""
    token_file: str | None = None
    """A file with the server's token, so that the token is not stored in the run folder; none sends no token."""
    unsafe: bool = False
    """process, required: confirm that programs may do everything that your user may."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.backend == "remote" and not (self.url and self.token_file):
            raise ValueError("sandbox.backend remote needs sandbox.url and sandbox.token_file")
        if self.backend in ("sandbox_fusion", "piston") and not self.url:
            raise ValueError(f"sandbox.backend {self.backend} needs sandbox.url")
        if self.backend == "process" and not self.unsafe:
            raise ValueError("sandbox.backend process isolates nothing and needs sandbox.unsafe = true")
        return self
