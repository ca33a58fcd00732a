"""Ludus's exceptions: `message` states the error in one sentence, `hint` the next step.

The command line prints both without a traceback and exits with the class's `exit_code`, which identifies the
failed part: 2 user input or storage, 3 engine, 4 environment, 5 learner, 6 weight sync, 7 cluster processes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_LONGEST_NAME = 200
"""Maximum number of characters of a name to compare: the time grows with the product of both lengths."""
_TIES = 3  # maximum number of equally similar names listed in a message


class LudusError(Exception):
    """Base class of all errors that Ludus raises on purpose."""

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
    """Invalid input: a setting, path, model or dataset. Raised before anything is written."""

    exit_code = 2
    part = "input"


class ConfigError(UserError):
    """A setting is unknown, has the wrong type, or contradicts another."""

    part = "config"


class EngineError(LudusError):
    """Inference failed: an infrastructure failure, which the rollout may retry."""

    exit_code = 3
    part = "engine"


class RequestRejected(EngineError):
    """The engine rejects the request permanently; it must not be retried."""


class EngineBusy(EngineError):
    """The engine's request queue is full; retry later."""


class WorldError(LudusError):
    """An environment failed at startup or later: an infrastructure failure, which may be retried."""

    exit_code = 4
    part = "environment"


class ToolFault(WorldError):
    """The backend of a tool failed (a server, a sandbox); the model is not at fault."""

    part = "tool"


class LearnerError(LudusError):
    """The optimizer step failed, for example because the loss or a gradient is not finite."""

    exit_code = 5
    part = "learner"


class SyncError(LudusError):
    """The weights of the engine differ from those that the learner sent."""

    exit_code = 6
    part = "weight sync"


class StorageError(LudusError):
    """A file could not be read or written (full disk, broken checkpoint)."""

    exit_code = 2
    part = "storage"


def reject_combination(text: str, cases: Mapping[str, object]) -> None:
    """Raise ConfigError if a case applies; the name of the first one replaces `{}` in the message."""
    if name := next((name for name, applies in cases.items() if applies), ""):
        raise ConfigError(text.replace("{}", name), "Unset one of them.")


def nearest_names(wrong: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return the `known` names most similar to a wrong one, and ties; `cutoff` is the least similarity, 0 to 1."""
    matcher = difflib.SequenceMatcher(None, b=wrong[:_LONGEST_NAME].lower())
    scores = {}
    for name in known:
        matcher.set_seq1(name[:_LONGEST_NAME].lower())
        scores[name] = matcher.ratio()
    best = max(scores.values(), default=0.0)
    return [name for name, score in scores.items() if score == best >= cutoff][:_TIES]


def did_you_mean(wrong: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "Did you mean ...? " for a hint, or "" if no known name is similar."""
    near = nearest_names(wrong, known, cutoff)
    return f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
