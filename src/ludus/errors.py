"""The error family. Each error says in one sentence what is wrong, and in `hint` what to do next.

The command line prints both without a traceback and exits with the class's `exit_code`, so that the
exit code alone says which part failed: 2 what the user gave, 3 engine, 4 environment, 5 learner,
6 weight sync, 7 the processes of a cluster. Storage that fails (a full disk) exits with 2 as well: it is the
user who can mend it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST_NAME = 200
"""Characters of a wrong name that are compared: time grows with the product of two lengths."""
_TIES = 3
"""Names that are equally near which a message lists, at most."""


class LudusError(Exception):
    """Base of all errors that Ludus raises on purpose."""

    exit_code = 1
    part = "ludus"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        gap = "" if self.hint.startswith("\n") else " "
        return f"{self.message}{gap}{self.hint}".strip()

    def __reduce__(self) -> tuple[type[LudusError], tuple[str, str]]:
        return type(self), (self.message, self.hint)


class UserError(LudusError):
    """Bad input: a setting, a path, a model, a dataset. Nothing has been written."""

    exit_code = 2
    part = "input"


class ConfigError(UserError):
    """A setting is unknown, of the wrong type, or contradicts another."""

    part = "config"


class EngineError(LudusError):
    """Inference failed: an infrastructure failure, which the rollout may retry."""

    exit_code = 3
    part = "engine"


class RequestRefused(EngineError):
    """The request can never be served as it stands."""


class EngineBusy(EngineError):
    """The engine has as many requests as it takes: come again later."""


class WorldError(LudusError):
    """An environment could not start or broke: an infrastructure failure, which may be retried."""

    exit_code = 4
    part = "environment"


class ToolFault(WorldError):
    """What stands behind a tool broke (a server, a sandbox): it says nothing about the model."""

    part = "tool"


class LearnerError(LudusError):
    """The optimiser step is not usable (a loss or gradient that is not finite, say)."""

    exit_code = 5
    part = "learner"


class SyncError(LudusError):
    """The engine does not hold the weights that the learner sent."""

    exit_code = 6
    part = "weight sync"


class StorageError(LudusError):
    """A file could not be written or read (a full disk, a broken checkpoint)."""

    exit_code = 2
    part = "storage"


def nearest_names(wrong: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Which of the `known` names are most like a wrong one: several that are equally near, or none.

    `cutoff` is the similarity below which a name is not near, from 0 (any is) to 1 (only the same).
    """
    matcher = difflib.SequenceMatcher(None, b=wrong[:_LONGEST_NAME].lower())
    scores = {}
    for name in known:
        matcher.set_seq1(name[:_LONGEST_NAME].lower())
        scores[name] = matcher.ratio()
    best = max(scores.values(), default=0.0)
    return [name for name, score in scores.items() if score == best >= cutoff][:_TIES]


def did_you_mean(wrong: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The question of a hint, with a space behind it; empty where no known name is near."""
    near = nearest_names(wrong, known, cutoff)
    return f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
