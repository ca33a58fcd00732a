"""Sandboxes for programs written by a policy: one interface, one module per backend, limits as data.

See docs/use/sandbox.md.
"""

from ludus.sandbox.base import (
    FileChange,
    Limits,
    Outcome,
    Process,
    Sandbox,
    SandboxSession,
    SandboxSettings,
    SessionKind,
    Snapshot,
)
from ludus.sandbox.factory import BACKENDS, SERVICES, open_sandbox
from ludus.sandbox.local.namespaces import NamespacesSandbox

__all__ = [
    "BACKENDS",
    "SERVICES",
    "FileChange",
    "Limits",
    "NamespacesSandbox",
    "Outcome",
    "Process",
    "Sandbox",
    "SandboxSession",
    "SandboxSettings",
    "SessionKind",
    "Snapshot",
    "open_sandbox",
]
