"""Transcripts with marked prompt, action and observation, as messages or tokens, and their rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from ludus.chat.render import Tokenizer, decode_exactly
from ludus.cli.ui.terminal import print_line, print_text
from ludus.engines.base import common_prefix
from ludus.evaluation.tables import message_lines
from ludus.rollouts.rollout_files import RolloutRecord
from ludus.rollouts.trees import has_rows, row_starts
from ludus.tools.base import Tool
from ludus.types import Message, Segment, ToolOutcome, ToolStatus, Trajectory

STYLES = {"prompt": "dim", "action": "bold cyan", "observation": "yellow"}
"""Styles of the three kinds of text."""


def print_transcript(console: Console, trajectory: Trajectory) -> None:
    """Print a dialogue with marked parts, and its reward."""
    for kind, text in marked_messages(trajectory):
        print_text(console, f"[{kind}] {text}", STYLES[kind])
    print_text(console, f"{_ending(trajectory)}\n")


def print_record(
    console: Console, record: RolloutRecord, tokenizer: Tokenizer | None = None, *, as_tokens: bool = False
) -> None:
    """Print a stored rollout: its dialogue or, with a tokenizer and `as_tokens`, its tokens, rows, and its outcome."""
    trajectory = record.trajectory
    console.rule(Text(f"task {record.group}, sample {trajectory.sample}", style="bold"))
    if trajectory.tags:
        print_line(console, "  ".join(f"{name} {value}" for name, value in trajectory.tags.items()), "dim")
    shown: list[list[tuple[str, str]]] = []
    for path in trajectory.attempts():
        if tokenizer is None or not as_tokens or not path.segments:  # an endpoint returns no tokens
            parts = list(marked_messages(path))
        else:
            parts = [] if has_rows(path) else list(_marked_tokens(path.segments, tokenizer))
        shared = max((common_prefix(parts, before) for before in shown), default=0)
        shown.append(parts)
        if shared:
            print_line(console, f"branch {len(shown) - 1}, after {shared} shared parts:", "bold")
        for kind, text in parts[shared:]:
            print_text(console, f"[{kind}] {text}", STYLES[kind])
        for error in (outcome for outcome in path.outcomes if outcome.status is not ToolStatus.OK):
            print_line(console, f"tool error: {error.tool or 'no tool'}: {error.status}", "red")
        if has_rows(path):
            _print_rows(console, path, tokenizer, whole=as_tokens)
        print_text(console, _ending(path))
    if trajectory.leaves:
        print_line(console, f"mean reward of {len(trajectory.leaves)} leaves: {trajectory.reward:g}")
    if (failure := trajectory.failure) is not None:
        print_text(console, f"failed in the {failure.part} after {failure.attempts} attempts: {failure.error}", "red")
    print_text(console, f"{_outcome_line(record)}\n")


def _print_rows(console: Console, trajectory: Trajectory, tokenizer: Tokenizer | None, *, whole: bool) -> None:
    """Print how each row begins, the first difference, and its own segments, shortened unless `whole`."""
    for number, start in enumerate(row_starts(trajectory)):
        how = f"forks from row {start.of} after {start.recorded} tokens" if start.recorded else "has a new prompt"
        equal = f"; {start.shared} tokens equal those of row {start.of}" if start.shared else ""
        print_line(console, f"row {number} {how}{equal}", "bold")
        if start.shared:
            for name, tokens in ((start.of, start.before), (number, start.after)):
                print_text(console, f"  row {name} continues with {_decoded(tokens, tokenizer)!r}")
        if tokenizer is None:
            continue
        for kind, text in _marked_tokens([trajectory.segments[i] for i in start.segments], tokenizer):
            shown = text if whole else shorten(text.partition("\n")[2], console.width)
            print_text(console, f"[{kind}] {shown}", STYLES[kind])


def _decoded(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None or not tokens:
        return " ".join(map(str, tokens)) or "(its end)"
    return decode_exactly(tokenizer, tokens)


def _outcome_line(record: RolloutRecord) -> str:
    reason = "" if record.reason == record.outcome.value else f" ({record.reason})"
    advantage = "none" if record.advantage is None else f"{record.advantage:+.4g}"
    return f"ledger: {record.outcome}{reason}   advantage {advantage}"


def _ending(trajectory: Trajectory) -> str:
    parts = "  ".join(f"{name} {value:g}" for name, value in trajectory.rewards.items())
    return f"stop: {trajectory.stop_reason}   reward {trajectory.reward:g}   ({parts})"


def marked_messages(trajectory: Trajectory) -> Iterator[tuple[str, str]]:
    """Yield the kind and text of each message: `prompt` before the model's first message, `observation` after it."""
    acted = False
    for message in trajectory.messages:
        acted = acted or message["role"] == "assistant"
        kind = "action" if message["role"] == "assistant" else "observation" if acted else "prompt"
        yield kind, message_text(message) or "(nothing)"


def _marked_tokens(segments: Sequence[Segment], tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    for segment in segments:
        numbers = f"{len(segment.tokens)} tokens, turn {segment.turn}"
        if segment.logprobs:
            numbers += f", mean log-probability {sum(segment.logprobs) / len(segment.logprobs):.3f}"
        if segment.versions:
            low, high = min(segment.versions), max(segment.versions)
            numbers += f", weights {low}" if low == high else f", weights {low} to {high}"
        yield segment.kind, f"{numbers}\n{decode_exactly(tokenizer, segment.tokens)}"


def message_text(message: Message) -> str:
    """Return a message as text: reasoning, content and tool calls."""
    return "\n".join(message_lines(message, "(thinks) {}", "(calls) {}"))


def calls(message: Message) -> list[str]:
    """Return the tool calls of a message, each on one line."""
    return [f"{call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls", [])]


def describe_tool(tool: Tool) -> str:
    """Describe a tool on one line: name, parameters and description."""
    return f"{tool.name}({', '.join(tool.schema['function']['parameters']['properties'])}): {tool.description}"


def shorten(text: str, width: int, num_rows: int = 8) -> str:
    """Return the first lines of a text, as many as fill `num_rows` rows of the terminal, and the number of others."""
    lines, rows = text.split("\n"), 0
    for index, line in enumerate(lines):
        rows += max(1, math.ceil(len(line) / width))
        if rows <= num_rows:
            continue
        if index == 0:
            kept = num_rows * width
            return f"{text[:kept]}\n... {len(text) - kept:,} more characters"
        return "\n".join([*lines[:index], f"... {len(lines) - index:,} more lines"])
    return text


def outcome_text(outcome: ToolOutcome) -> str:
    """Return the output of a tool with its name and, unless it succeeded, its status."""
    status = "" if outcome.status is ToolStatus.OK else f" ({outcome.status})"
    return f"{outcome.tool or 'no tool'}{status}: {outcome.output}"
