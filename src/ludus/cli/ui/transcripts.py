"""Transcripts: what was prompt, action and observation, as messages or as tokens, and what it earned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ludus.cli.ui.terminal import say
from ludus.engines.embedded.kv_cache import common_prefix
from ludus.rollout.rollout_files import RolloutRecord
from ludus.rollout.trees import attempts
from ludus.types import Message, Segment, ToolOutcome, ToolStatus, Trajectory

if TYPE_CHECKING:
    from ludus.chat.render import Tokenizer

STYLES = {"prompt": "dim", "action": "bold cyan", "observation": "yellow"}
"""How the three kinds of text are told apart on screen; each also carries its name."""


def print_transcript(console: Console, trajectory: Trajectory) -> None:
    """A whole dialogue, each part marked, and what it earned."""
    for kind, text in marked_messages(trajectory):
        say(console, f"[{kind}] {text}", STYLES[kind])
    say(console, f"{ending(trajectory)}\n")


def print_record(console: Console, record: RolloutRecord, tokenizer: Tokenizer | None = None) -> None:
    """A stored rollout: which it is, the dialogue or (given a tokenizer) its tokens, and its fate."""
    trajectory = record.trajectory
    tags = "  ".join(f"{name} {value}" for name, value in trajectory.tags.items())
    console.rule(Text(f"task {record.group}, sample {trajectory.sample}", style="bold"))
    if tags:
        say(console, tags, "dim")
    shown: list[list[tuple[str, str]]] = []
    for path in attempts(trajectory):
        if tokenizer is None or not path.segments:  # an endpoint shows no tokens
            parts = list(marked_messages(path))
        else:
            parts = list(marked_tokens(path.segments, tokenizer))
        shared = max((common_prefix(parts, before) for before in shown), default=0)
        shown.append(parts)
        if shared:
            say(console, f"branch {len(shown) - 1}, after the {shared} parts that it shares:", "bold")
        for kind, text in parts[shared:]:
            say(console, f"[{kind}] {text}", STYLES[kind])
        for outcome in path.outcomes:
            if outcome.status is not ToolStatus.OK:
                say(console, f"tool error: {outcome.tool or 'no tool'}: {outcome.status}", "red")
        say(console, ending(path))
    if trajectory.leaves:
        say(console, f"mean reward of {len(trajectory.leaves)} leaves: {trajectory.reward:g}")
    if trajectory.failure is not None:
        failure = trajectory.failure
        say(console, f"failed in the {failure.part} after {failure.attempts} attempts: {failure.error}", "red")
    say(console, f"{fate(record)}\n")


def fate(record: RolloutRecord) -> str:
    """What became of a rollout, in the ledger's words, and its advantage."""
    reason = "" if record.reason == record.outcome.value else f" ({record.reason})"
    advantage = "none" if record.advantage is None else f"{record.advantage:+.4g}"
    return f"ledger: {record.outcome}{reason}   advantage {advantage}"


def ending(trajectory: Trajectory) -> str:
    """Why it stopped, and the reward with its parts."""
    parts = "  ".join(f"{name} {value:g}" for name, value in trajectory.rewards.items())
    return f"stop: {trajectory.stop_reason}   reward {trajectory.reward:g}   ({parts})"


def marked_messages(trajectory: Trajectory) -> Iterator[tuple[str, str]]:
    """The messages with their kinds: all before the model's first is prompt, what follows it observation."""
    acted = False
    for message in trajectory.messages:
        acted = acted or message["role"] == "assistant"
        kind = "action" if message["role"] == "assistant" else "observation" if acted else "prompt"
        yield kind, message_text(message) or "(nothing)"


def marked_tokens(segments: Sequence[Segment], tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """The segments as the tokens that they are, control tokens included."""
    for segment in segments:
        text = tokenizer.decode(segment.tokens, skip_special_tokens=False)
        yield segment.kind, f"{_segment_numbers(segment)}\n{text}"


def _segment_numbers(segment: Segment) -> str:
    numbers = f"{len(segment.tokens)} tokens, turn {segment.turn}"
    if segment.logprobs:
        numbers += f", mean log-probability {sum(segment.logprobs) / len(segment.logprobs):.3f}"
    if segment.versions:
        low, high = min(segment.versions), max(segment.versions)
        numbers += f", weights {low}" if low == high else f", weights {low} to {high}"
    return numbers


def message_text(message: Message) -> str:
    """A message as a person reads it: thinking, text and calls."""
    thought = message.get("reasoning_content", "")
    said = [f"(thinks) {thought}" if thought else "", message["content"], *map("(calls) {}".format, calls(message))]
    return "\n".join(part for part in said if part)


def calls(message: Message) -> list[str]:
    """The tool calls of a message, each on one line."""
    return [f"{call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls", [])]


def outcome_text(outcome: ToolOutcome) -> str:
    """A tool's answer with its name and, unless all went well, how it ended."""
    status = "" if outcome.status is ToolStatus.OK else f" ({outcome.status})"
    return f"{outcome.tool or 'no tool'}{status}: {outcome.output}"
