"""Metrics of the policy's texts and calls: repetition, copied text, scripts, and how it uses its tools.

All are shares in [0, 1] except `tools/sequences`, a count. A share of an empty set is 0. They read the messages and
tokens of finished episodes and need no forward pass.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ludus.chat.hints import full_text
from ludus.types import FunctionCall, Message, Trajectory

_NGRAM = 8
"""Tokens of a passage that counts as repeated or copied."""
_WORD = re.compile(r"\w+")


def behavior_metrics(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of finished episodes; a tree counts as one episode per path."""
    paths = [path for episode in episodes for path in episode.attempts()]
    calls = [[call for message in path.messages for call in _calls(message)] for path in paths]
    repeats = [now == before for own in calls for before, now in pairwise(own)]
    unused = [not used for path in paths for used in used_results(path.messages) if used is not None]
    return {
        **_passage_metrics(paths),
        "text/foreign_script": _share([foreign for path in paths for foreign in _foreign_letters(path.messages)]),
        "tools/repeated": sum(repeats) / max(1, sum(map(len, calls))),
        "tools/unused_results": _share(unused),
        "tools/sequences": float(len({tuple(call["name"] for call in own) for own in calls})),
    }


def _passage_metrics(paths: Sequence[Trajectory]) -> dict[str, float]:
    """Return the shares of action tokens in passages that occurred before in their turn, or in an observation."""
    tokens = repeated = copied = 0
    for path in paths:
        observed: set[int] = set()
        for segment in path.segments:
            if segment.kind == "action":
                tokens += len(segment.tokens)
            if segment.kind == "prompt" or len(segment.tokens) < _NGRAM:
                continue
            passages = passage_hashes(segment.tokens, _NGRAM).tolist()
            if segment.kind == "observation":
                observed.update(passages)
                continue
            if len(set(passages)) < len(passages):
                firsts = {passage: place for place, passage in reversed([*enumerate(passages)])}
                repeated += _covered([firsts[passage] < place for place, passage in enumerate(passages)])
            if not observed.isdisjoint(passages):
                copied += _covered([passage in observed for passage in passages])
    return {"text/repeated": repeated / max(1, tokens), "text/copied": copied / max(1, tokens)}


def passage_hashes(tokens: ArrayLike, size: int) -> NDArray[np.int64]:
    """Return a polynomial hash modulo 2**64 of each passage of `size` tokens, `[T - size + 1]`."""
    return np.convolve(np.asarray(tokens, np.int64), _factors(size), "valid")


@cache
def _factors(size: int) -> NDArray[np.int64]:
    return np.array([pow(0x9E3779B97F4A7C15, i, 2**62) for i in range(1, size + 1)], np.int64)


def _covered(found: Sequence[bool]) -> int:
    """Return the number of tokens in the passages that start at the places of `found`."""
    return int(np.count_nonzero(np.convolve(found, np.ones(_NGRAM))))


def _calls(message: Message) -> list[FunctionCall]:
    return [call["function"] for call in message.get("tool_calls") or []]


def used_results(messages: Sequence[Message]) -> list[bool | None]:
    """Return for each tool message whether a new word of it occurs in a later assistant message.

    None for a message without words that are new in the dialogue.
    """
    known: set[str] = set()
    waiting: dict[int, set[str]] = {}
    used: list[bool | None] = []
    for message in messages:
        words = set(_WORD.findall(full_text(message)))
        if message["role"] == "tool":
            new = words - known
            used.append(False if new else None)
            waiting[len(used) - 1] = new
        elif message["role"] == "assistant":
            for place in [place for place, new in waiting.items() if new & words]:
                used[place] = True
                del waiting[place]
        known |= words
    return used


def _foreign_letters(messages: Sequence[Message]) -> list[bool]:
    """Return for each letter of the assistant whether its script occurs in no message of others; ASCII never counts."""
    others = "".join(full_text(message) for message in messages if message["role"] != "assistant")
    scripts = {_script(letter) for letter in set(others) if letter.isalpha()} | {_script("a")}
    own = "".join(full_text(message) for message in messages if message["role"] == "assistant")
    return [not letter.isascii() and _script(letter) not in scripts for letter in own if letter.isalpha()]


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    """Return the first word of a letter's Unicode name, such as LATIN or CJK."""
    return unicodedata.name(letter, "").partition(" ")[0]


def _share(found: Sequence[bool]) -> float:
    return sum(found) / len(found) if found else 0.0
