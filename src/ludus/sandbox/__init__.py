"""Where programs that a policy writes run: one protocol, a backend a file, limits as data.

See docs/sandbox.md.
"""

from ludus.sandbox.base import Change, Limits, Outcome, Process, Sandbox, Session, SessionKind, Snapshot
from ludus.sandbox.factory import BACKENDS, SERVICES, SandboxSettings, open_sandbox
from ludus.sandbox.local.namespaces import NamespaceSettings, NamespacesSandbox

__all__ = [
    "BACKENDS",
    "SERVICES",
    "Change",
    "Limits",
    "NamespaceSettings",
    "NamespacesSandbox",
    "Outcome",
    "Process",
    "Sandbox",
    "SandboxSettings",
    "Session",
    "SessionKind",
    "Snapshot",
    "open_sandbox",
]
