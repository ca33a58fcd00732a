"""The section `sandbox`: where programs that a policy writes run."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.section import Section


class SandboxConfig(Section):
    """Where tools run programs; worlds without such tools open none. See docs/use/sandbox.md."""

    backend: Literal["namespaces", "docker", "podman", "remote", "sandbox_fusion", "piston", "process"] = "namespaces"
    """What keeps programs apart from the host; nothing weaker is ever taken instead."""
    concurrency: int = Field(0, ge=0)
    """Of namespaces: runs at once, sessions not counted; 0 is one for each processor, at least 2."""
    sessions: int = Field(0, ge=0)
    """Of namespaces, docker and podman: episodes at once that each hold a session (`terminal`, `swe`); more
    wait until one has ended. 0 is what half of the memory has room for, at 512 MiB each."""
    python: str = ""
    """Of namespaces: the interpreter inside; empty is this one, else the system's."""
    binds: list[str] = Field([])
    """Of namespaces: folders of the host that programs may read, as `folder` or `folder:place`."""
    paths: list[str] = Field([])
    """Of namespaces: what is added to `sys.path` inside."""
    image: str = "python:3.12-slim"
    """Of docker and podman: the image, which must be there already."""
    runtime: str = ""
    """Of docker and podman: the runtime, `runsc` for gVisor; empty is the engine's own."""
    url: str = ""
    """Of remote: the address of `ludus sandbox serve`; of sandbox_fusion and piston: that of the service."""
    token_file: str | None = None
    """A file with the server's token, which is kept out of the run folder so; none sends no token."""
    unsafe: bool = False
    """Of process: yes, programs may do all that your user may."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.backend == "remote" and not (self.url and self.token_file):
            raise ValueError("sandbox.backend remote needs sandbox.url and sandbox.token_file")
        if self.backend in ("sandbox_fusion", "piston") and not self.url:
            raise ValueError(f"sandbox.backend {self.backend} needs sandbox.url")
        if self.backend == "process" and not self.unsafe:
            raise ValueError("sandbox.backend process isolates nothing and needs sandbox.unsafe = true")
        return self
