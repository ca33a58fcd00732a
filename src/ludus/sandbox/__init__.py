"""Where programs that a policy writes run: one protocol, a backend a file, limits as data.

See docs/sandbox.md.
"""

from ludus.sandbox.base import Limits, Outcome, Sandbox, Session, Snapshot
from ludus.sandbox.namespaces import NamespaceSettings, NamespacesSandbox

__all__ = ["Limits", "NamespaceSettings", "NamespacesSandbox", "Outcome", "Sandbox", "Session", "Snapshot"]
