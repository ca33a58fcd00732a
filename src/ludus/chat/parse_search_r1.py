"""The tags of Search-R1 (Jin et al. 2025, arXiv:2503.09516): `<think>`, `<search>` and `<answer>`."""

from __future__ import annotations

from dataclasses import dataclass

from ludus.chat.parse_draft import THINK_CLOSE, THINK_OPEN, Draft, split_thinking
from ludus.types import Action

TOOL = "search"
"""The tool that a `<search>` calls; its one argument is `query`."""

_ADVICE = (
    "My action is not correct. To search, I write the query between <search> and </search>. "
    "To answer, I write the answer between <answer> and </answer>."
)


@dataclass(frozen=True, slots=True)
class SearchR1Parser:
    """Reads `<search>query</search>` as a call of `search` and `<answer>text</answer>` as the answer.

    After the thinking, the first pair of tags that is complete counts, as in Search-R1; what follows it does
    not act. The content of an answer is the text between its tags alone. The engine stops at the closing
    tags and keeps them, so that a tag without its closing one is an error, as is a text with no pair at all,
    or an empty query. An empty answer gives empty content and no error.
    """

    name: str = "search_r1"

    def parse(self, text: str, *, turn: int) -> Action:
        """Return the message, the calls and the errors of turn `turn`. Never raises."""
        reasoning, rest = split_thinking(text, inside_call=lambda _: False)
        draft = Draft(turn)
        if text.strip():
            _fill(draft, rest, text.strip())
        return draft.action(reasoning)


def _fill(draft: Draft, rest: str, whole: str) -> None:
    pairs = [pair for tag in ("search", "answer") if (pair := _first_pair(rest, tag))]
    if not pairs:
        unclosed = _unclosed(whole, rest)
        draft.fail(
            whole, f"The tag {unclosed} is not closed. {_ADVICE}" if unclosed else _ADVICE, content=rest
        )
        return
    start, end, tag = min(pairs)
    inner = rest[start + len(f"<{tag}>") : end - len(f"</{tag}>")].strip()
    if tag == "answer":
        draft.say(inner)
        return
    draft.say(rest[:start])
    if inner:
        draft.call(TOOL, {"query": inner})
    else:
        draft.fail(rest[start:end], f"The query is empty. {_ADVICE}")
    draft.say(rest[end:])


def _first_pair(text: str, tag: str) -> tuple[int, int, str] | None:
    """Return where the first opening tag and the closing tag after it begin and end, and the tag."""
    start = text.find(f"<{tag}>")
    close = text.find(f"</{tag}>", start) if start >= 0 else -1
    return (start, close + len(f"</{tag}>"), tag) if close >= 0 else None


def _unclosed(whole: str, rest: str) -> str:
    if whole.startswith(THINK_OPEN) and THINK_CLOSE not in whole:
        return THINK_OPEN
    return next((tag for tag in ("<search>", "<answer>") if tag in rest), "")
