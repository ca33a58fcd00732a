"""Response bodies and streamed chunks as JSON, in the formats of OpenAI and vLLM.

The types of the package `openai` are not used: they lack vLLM's fields (`token_ids`, `prompt_logprobs`,
`weight_versions`, ...), do not support log-probabilities that are already encoded, and would be a new dependency
(30 MB, 0.3 s to import).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

JsonBody = dict[str, object]


@dataclass(frozen=True)
class EncodedJson:
    """Value that is already encoded as JSON, to avoid creating an object for each part."""

    text: bytes


def response_body(
    kind: str, name: str, model: str, choices: list[JsonBody], usage: tuple[int, int] | None = None
) -> JsonBody:
    """Return a response or chunk; `usage` is the number of prompt tokens and of tokens of all choices."""
    tokens: JsonBody | None = None
    if usage is not None:
        tokens = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    created = int(time.time())
    return {"id": name, "object": kind, "created": created, "model": model, "choices": choices, "usage": tokens}


def version_spans(versions: Sequence[int]) -> list[JsonBody]:
    """Group consecutive tokens by weight version: tokens [`start`, `end`) were sampled by `version`."""
    lengths = [(str(version), len(list(run))) for version, run in groupby(versions)]
    ends = accumulate(num for _, num in lengths)
    return [
        {"version": version, "start": end - num, "end": end} for (version, num), end in zip(lengths, ends, strict=True)
    ]


def error_body(message: str, status: int, code: str | None = None) -> JsonBody:
    """Return the body of an error response; `code` is a machine-readable reason, by default the status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code or status}}


def json_bytes(body: JsonBody) -> bytes:
    """Serialize a body to JSON; `EncodedJson` values are copied. Unpaired surrogates are escaped, not rejected."""
    return b"{" + b",".join(_json(name) + b":" + _value(value) for name, value in body.items()) + b"}"


def _value(value: object) -> bytes:
    if isinstance(value, EncodedJson):
        return value.text
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return b"[" + b",".join(map(json_bytes, value)) + b"]"
    return _json(value)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
