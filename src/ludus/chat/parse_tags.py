"""Tag protocols for base models: Search-R1's (Jin et al. 2025, arXiv:2503.09516) and ReTool's (Feng et al. 2025,
arXiv:2504.11536)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ludus.chat.parse_json import THINK_CLOSE, THINK_OPEN, ParsedDraft, ToolCallParser, strip_fence
from ludus.tools.base import ToolSchema

ANSWER = "answer"
"""Tag of the answer in all protocols."""
TO_ANSWER = f"Give the answer inside <{ANSWER}> and </{ANSWER}>."
_ADVICE = f"To answer, I write the answer between <{ANSWER}> and </{ANSWER}>."


@dataclass(frozen=True, slots=True)
class TagProtocol:
    """Protocol in which a call is the `argument` of the `tool`, written between the tags `call`.

    Results are returned between the tags `result`; error messages refer to the argument as `label`. The prompt begins
    with `instructions`. If it `is_program`, its first line keeps its indentation, and a Markdown fence is removed.
    """

    name: str
    call: str
    result: str
    tool: str
    argument: str
    label: str
    advice: str
    instructions: str
    is_program: bool = False


SEARCH_R1 = TagProtocol(
    name="search_r1",
    call="search",
    result="information",
    tool="search",
    argument="query",
    label="query",
    advice="To search, I write the query between <search> and </search>.",
    instructions=(
        "Think inside <think> and </think>. To look something up, write <search> query </search>; what is "
        f"found comes back inside <information> and </information>. {TO_ANSWER}"
    ),
)
RETOOL = TagProtocol(
    name="retool",
    call="code",
    result="interpreter",
    tool="python",
    argument="code",
    label="program",
    advice="To run a program, I write it between <code> and </code>.",
    instructions=(
        "Think step by step. To run a Python program, write <code> program </code>; what it prints comes "
        f"back inside <interpreter> and </interpreter>. {TO_ANSWER}"
    ),
    is_program=True,
)


def _read_tags(protocol: TagProtocol, draft: ParsedDraft, rest: str, _: Sequence[ToolSchema]) -> None:
    """Read, for example, `<search>query</search>` as a call and `<answer>text</answer>` as the answer.

    After the thinking, only the first complete pair of tags counts, as in Search-R1. The content of an answer
    is the text between its tags. Closing tags are stop strings included in the text, so an unclosed tag is an
    error, as are a text without a pair and an empty call. An empty answer has empty content and is not an
    error.
    """
    whole = draft.whole.strip()
    if not whole:
        return
    advice = f"My action is not correct. {protocol.advice} {_ADVICE}"
    pairs = [pair for tag in (protocol.call, ANSWER) if (pair := _first_pair(rest, tag))]
    if not pairs:
        unclosed = _find_unclosed(whole, rest, protocol)
        draft.add_error(whole, f"The tag {unclosed} is not closed. {advice}" if unclosed else advice, content=rest)
        return
    start, end, tag = min(pairs)
    inner = rest[start + len(f"<{tag}>") : end - len(f"</{tag}>")]
    if tag == ANSWER:
        draft.add_text(inner)
        return
    draft.add_text(rest[:start])
    if given := _program(inner) if protocol.is_program else inner.strip():
        draft.add_call(protocol.tool, {protocol.argument: given})
    else:
        draft.add_error(rest[start:end], f"The {protocol.label} is empty. {advice}")
    draft.add_text(rest[end:])


def _program(text: str) -> str:
    inner = strip_fence(text)
    if inner != text.strip():
        return inner
    lines = text.rstrip().split("\n")
    while len(lines) > 1 and not lines[0].strip():
        del lines[0]
    return "\n".join(lines) if len(lines) > 1 else inner


def _first_pair(text: str, tag: str) -> tuple[int, int, str] | None:
    """Return start and end of the first opening tag with the next closing tag, and the tag."""
    start = text.find(f"<{tag}>")
    close = text.find(f"</{tag}>", start) if start >= 0 else -1
    return (start, close + len(f"</{tag}>"), tag) if close >= 0 else None


def _find_unclosed(whole: str, rest: str, protocol: TagProtocol) -> str:
    if whole.startswith(THINK_OPEN) and THINK_CLOSE not in whole:
        return THINK_OPEN
    return next((tag for tag in (f"<{protocol.call}>", f"<{ANSWER}>") if tag in rest), "")


TAGS = tuple(ToolCallParser(one.name, partial(_read_tags, one)) for one in (SEARCH_R1, RETOOL))
"""The parsers of the protocols."""
