"""Tag protocols for base models: Search-R1's (Jin et al. 2025, arXiv:2503.09516) and ReTool's (Feng et al. 2025,
arXiv:2504.11536)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.chat.parse_json import THINK_CLOSE, THINK_OPEN, ParsedDraft, split_thinking, strip_fence
from ludus.tools.base import ToolSchema
from ludus.types import Action

ANSWER = "answer"
"""Tag of the answer in all protocols."""
_TO_ANSWER = f"To answer, I write the answer between <{ANSWER}> and </{ANSWER}>."


@dataclass(frozen=True, slots=True)
class TagProtocol:
    """Protocol in which a call is the `argument` of the `tool`, written between the tags `call`.

    Results are returned between the tags `result`; error messages refer to the argument as `label`. If it
    `is_program`, its first line keeps its indentation, and a Markdown fence around it is removed.
    """

    name: str
    call: str
    result: str
    tool: str
    argument: str
    label: str
    advice: str
    is_program: bool = False


SEARCH_R1 = TagProtocol(
    name="search_r1",
    call="search",
    result="information",
    tool="search",
    argument="query",
    label="query",
    advice="To search, I write the query between <search> and </search>.",
)
RETOOL = TagProtocol(
    name="retool",
    call="code",
    result="interpreter",
    tool="python",
    argument="code",
    label="program",
    advice="To run a program, I write it between <code> and </code>.",
    is_program=True,
)


@dataclass(frozen=True, slots=True)
class TagsParser:
    """Parser of, for example, `<search>query</search>` as a call and `<answer>text</answer>` as the answer.

    After the thinking, only the first complete pair of tags counts, as in Search-R1. The content of an answer
    is the text between its tags. Closing tags are stop strings included in the text, so an unclosed tag is an
    error, as are a text without a pair and an empty call. An empty answer has empty content and is not an
    error.
    """

    protocol: TagProtocol

    @property
    def name(self) -> str:
        return self.protocol.name

    def parse(self, text: str, *, turn: int, schemas: Sequence[ToolSchema] = ()) -> Action:
        reasoning, rest = split_thinking(text)
        draft = ParsedDraft(turn)
        if whole := text.strip():
            _fill(draft, rest, whole, self.protocol)
        return draft.action(reasoning)


def _fill(draft: ParsedDraft, rest: str, whole: str, protocol: TagProtocol) -> None:
    advice = f"My action is not correct. {protocol.advice} {_TO_ANSWER}"
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
