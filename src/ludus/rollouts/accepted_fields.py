"""Detection of the request fields that a chat-completions server accepts.

Servers may reject `max_tokens` (for `max_completion_tokens`), a temperature of 0, any temperature but 1,
seeds, `top_k`, or reasoning in the history. If a rejection names such a field, the request is
adapted and retried; the adaptation is reused once a request succeeds with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

REJECTED_STATUS = (400, 422)
"""Status codes of a rejected request."""
REASONING = ("reasoning_content", "reasoning")
"""Field names of the model's reasoning in an assistant message."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop")
NEAR_ZERO = 0.01
"""Temperature sent instead of a rejected 0."""
_RENAMED = "max_completion_tokens"
_SENT_AS_MAX_TOKENS = ("max_tokens", _RENAMED)


@dataclass(frozen=True, slots=True)
class AcceptedFields:
    """Adaptations of requests: omitted fields, the name of the length limit, the substitute of a temperature of 0."""

    dropped: frozenset[str] = frozenset()
    max_tokens_name: str = "max_tokens"
    zero_as: float = 0.0

    def apply(self, body: Mapping[str, object]) -> dict[str, object]:
        """Return the body adapted to this server."""
        names = {"max_tokens": self.max_tokens_name}
        adapted = {names.get(key, key): self._adapted_value(key, value) for key, value in body.items()}
        return {key: value for key, value in adapted.items() if key not in self.dropped}

    def after_rejection(self, body: Mapping[str, object], response: bytes) -> AcceptedFields | None:
        """Return the next adaptation to try after a rejection, or None if it names no adaptable field."""
        sent = self.apply(body)
        named = [name for name in _adaptable_fields(sent) if re.search(rf"(?<!\w){name}(?!\w)".encode(), response)]
        if not named:
            return None
        param = _error_param(response)
        name = param if param in named else named[0]
        if name == "max_tokens":
            return replace(self, max_tokens_name=_RENAMED)
        if name == "temperature" and sent[name] == 0:
            return replace(self, zero_as=NEAR_ZERO)
        return replace(self, dropped=self.dropped | {name})

    def union(self, other: AcceptedFields) -> AcceptedFields:
        names = {self.max_tokens_name, other.max_tokens_name}
        name = _RENAMED if _RENAMED in names else "max_tokens"
        return AcceptedFields(self.dropped | other.dropped, name, max(self.zero_as, other.zero_as))

    def notices(self) -> Iterator[str]:
        """Yield one message per adaptation."""
        if self.max_tokens_name == _RENAMED and _RENAMED not in self.dropped:
            yield f"The server rejects max_tokens: {_RENAMED} is sent instead."
        if self.zero_as and "temperature" not in self.dropped:
            yield f"The server rejects a temperature of 0: {self.zero_as:g} is sent instead."
        consequences = {
            **dict.fromkeys(REASONING, "so the model does not see its earlier reasoning"),
            **dict.fromkeys(_SENT_AS_MAX_TOKENS, "so turns are as long as the server allows"),
            "seed": "so repeated evaluations may differ",
        }
        for name in sorted(self.dropped):
            consequence = consequences.get(name, "so the server's default applies")
            yield f"The server rejects {name}: it is omitted, {consequence}."

    def _adapted_value(self, key: str, value: object) -> object:
        if key == "temperature" and value == 0:
            return self.zero_as
        if key == "messages" and isinstance(value, list):
            hidden = self.dropped.intersection(REASONING)
            return [{k: v for k, v in message.items() if k not in hidden} for message in value]
        return value


def _adaptable_fields(sent: Mapping[str, object]) -> Iterator[str]:
    """Yield the fields of a body that can be changed or omitted."""
    yield from (name for name in (*_SENT_AS_MAX_TOKENS, *SAMPLING) if name in sent)
    messages = sent.get("messages")
    for name in REASONING:
        if isinstance(messages, list) and any(name in message for message in messages):
            yield name


def _error_param(response: bytes) -> object:
    try:
        return json.loads(response)["error"]["param"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
