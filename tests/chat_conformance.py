"""Check that a chat template only appends, for any tokenizer with a template.

A rollout renders each message once: it appends sampled tokens and the deltas of the environment's messages.
A deployed model renders the whole dialogue with the template at every turn. Both agree if the template only
appends and if tokenizing the whole text equals tokenizing its pieces. Many templates do not append, for example
because they drop the thinking of earlier turns. Training is still exact, since it uses the sampled tokens, but
in deployment the model is conditioned on other tokens than in training from the reported turn on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from ludus.chat.render import TemplateRenderer, control_ids, decode_exactly, render_dialogue
from ludus.errors import UserError
from ludus.tools.base import Tool, tool
from ludus.types import Message, Segment

_EXCERPT = 60


@dataclass(frozen=True, slots=True)
class ProbeDialogue:
    """Test dialogue that ends with an assistant message."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class ConformanceFailure:
    """Difference: dialogue, assistant turn (from 0), description, and both texts.

    A prompt belongs to turn 0, an observation to the turn before it.
    """

    dialogue: str
    turn: int
    what: str
    expected: str = ""
    got: str = ""


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """Result of `check_conformance`; `ok` if there are no failures."""

    num_dialogues: int
    failures: tuple[ConformanceFailure, ...]

    @property
    def ok(self) -> bool:
        return not self.failures


def check_conformance(
    renderer: TemplateRenderer, dialogues: Sequence[ProbeDialogue] | None = None
) -> ConformanceReport:
    """Compare appended segments with whole renderings, on the built-in dialogues by default.

    For each dialogue: prompt, actions and deltas, joined, are the tokens of the whole rendered dialogue, up
    to the text after the last end of turn; each action contains the end-of-turn token once, at its end, and
    parses to its message; user and tool messages produce no special token. If the template rejects a
    dialogue, the report contains a failure; no error is raised.
    """
    probes = probe_dialogues() if dialogues is None else tuple(dialogues)
    failures = tuple(failure for probe in probes for failure in _check(renderer, probe))
    return ConformanceReport(len(probes), failures)


def _check(renderer: TemplateRenderer, probe: ProbeDialogue) -> Iterator[ConformanceFailure]:
    try:
        segments = render_dialogue(renderer, probe.messages, probe.tools)
        whole = renderer.text(probe.messages, probe.tools, generate=False)
    except UserError as error:
        yield ConformanceFailure(probe.name, _first_rejected_turn(renderer, probe), error.message)
        return
    if difference := _difference(renderer, probe, segments, whole):
        yield difference
    yield from _check_actions(renderer, probe, segments)
    yield from _check_control(renderer, probe, segments)


def _first_rejected_turn(renderer: TemplateRenderer, probe: ProbeDialogue) -> int:
    """Return the first assistant turn at which rendering fails."""
    turns = _assistant_indices(probe.messages)
    for turn, at in enumerate(turns):
        try:
            render_dialogue(renderer, probe.messages[: at + 1], probe.tools)
            renderer.text(probe.messages[: at + 1], probe.tools, generate=False)
        except UserError:
            return turn
    return len(turns) - 1


def _difference(
    renderer: TemplateRenderer, probe: ProbeDialogue, segments: Sequence[Segment], whole: str
) -> ConformanceFailure | None:
    expected = renderer.tokenizer.encode(whole, add_special_tokens=False)
    got = [token for segment in segments for token in segment.tokens]
    pairs = zip(expected, got, strict=False)
    prefix = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
    ends_at_role = len(got) - prefix == 1 and prefix == len(expected) and got[-1] in renderer.stop_token_ids
    if prefix == len(got) or ends_at_role:
        return None
    ends = accumulate(len(segment.tokens) for segment in segments)
    segment = next((one for one, end in zip(segments, ends, strict=True) if prefix < end), segments[-1])
    decode = renderer.tokenizer.decode
    if decode(expected).startswith(decode(got)):
        what = "tokenizing the whole text differs from tokenizing its pieces"
    else:
        what = _reason(renderer, probe, segment, whole)
    shown = (decode(tokens[prefix : prefix + _EXCERPT])[:_EXCERPT] for tokens in (expected, got))
    return ConformanceFailure(probe.name, segment.turn, what, *shown)


def _reason(renderer: TemplateRenderer, probe: ProbeDialogue, segment: Segment, whole: str) -> str:
    if segment.kind == "prompt":
        return "the template renders the prompt differently if later messages follow"
    if segment.kind == "observation":
        return "the template renders the messages after this turn differently in the whole dialogue"
    at = _assistant_indices(probe.messages)[segment.turn]
    message = probe.messages[at]
    alone = renderer.text(probe.messages[: at + 1], probe.tools, generate=False)
    if _is_dropped(message.get("reasoning_content", ""), alone, whole):
        return "the template drops the thinking of earlier turns"
    names = [call["function"]["name"] for call in message.get("tool_calls", [])]
    if names and alone.count(names[0]) > whole.count(names[0]):
        return "the template drops the tool calls of earlier turns"
    if _is_dropped(message["content"], alone, whole):
        return "the template drops the text of earlier turns"
    return "the template renders this turn differently if later messages follow"


def _is_dropped(part: str, alone: str, whole: str) -> bool:
    return bool(part) and part in alone and part not in whole


def _check_actions(
    renderer: TemplateRenderer, probe: ProbeDialogue, segments: Sequence[Segment]
) -> Iterator[ConformanceFailure]:
    """Check that each action ends with its only end-of-turn token and parses to its message."""
    messages = [message for message in probe.messages if message["role"] == "assistant"]
    actions = [segment for segment in segments if segment.kind == "action"]
    for message, segment in zip(messages, actions, strict=True):
        where = probe.name, segment.turn
        num_ends = sum(segment.tokens.count(end) for end in renderer.stop_token_ids)
        if not num_ends or segment.tokens[-1] not in renderer.stop_token_ids:
            yield ConformanceFailure(*where, "the turn does not end with the end-of-turn token")
        elif num_ends > 1:
            yield ConformanceFailure(*where, "the end-of-turn token occurs inside the turn")
        if unread := _find_unparsed(renderer, probe, message, segment):
            yield ConformanceFailure(*where, *unread)


def _find_unparsed(
    renderer: TemplateRenderer, probe: ProbeDialogue, message: Message, segment: Segment
) -> tuple[str, str, str] | None:
    text = decode_exactly(renderer.tokenizer, segment.tokens)
    read = renderer.parse(segment.tokens, segment.turn, "stop", probe.tools).message
    thinking, content = message.get("reasoning_content", ""), message["content"].strip()
    calls, read_calls = _normalise_calls(message), _normalise_calls(read)
    if thinking != read.get("reasoning_content", ""):
        what = _parse_failure("thinking", omitted=thinking not in text)
        return what, thinking[:_EXCERPT], read.get("reasoning_content", "")[:_EXCERPT]
    if calls != read_calls:
        what = _parse_failure("calls", omitted=any(name not in text for name, _ in calls))
        if [name for name, _ in calls] == [name for name, _ in read_calls]:
            what = "the template rewrites the arguments of this turn's calls"
        return what, str(calls)[:_EXCERPT], str(read_calls)[:_EXCERPT]
    if content != read["content"]:
        return _parse_failure("text", omitted=content not in text), content[:_EXCERPT], read["content"][:_EXCERPT]
    return None


def _parse_failure(part: str, *, omitted: bool) -> str:
    return f"the {'template omits' if omitted else 'parser does not recover'} the {part} of this turn"


def _normalise_calls(message: Message) -> list[tuple[str, str]]:
    """Return names and arguments (normalized JSON) of the calls in order."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(f["name"], json.dumps(json.loads(f["arguments"]), ensure_ascii=False)) for f in functions]


def _check_control(
    renderer: TemplateRenderer, probe: ProbeDialogue, segments: Sequence[Segment]
) -> Iterator[ConformanceFailure]:
    """Check that special tokens equal those of the dialogue with neutral user and tool messages."""
    control = control_ids(renderer.tokenizer)
    neutral = [message.copy() for message in probe.messages]
    for message in neutral:
        if message["role"] in ("user", "tool"):
            message["content"] = "x"
    for segment, plain in zip(segments, render_dialogue(renderer, neutral, probe.tools), strict=True):
        expected = [token for token in plain.tokens if token in control]
        got = [token for token in segment.tokens if token in control]
        if segment.kind != "action" and expected != got:
            shown = (renderer.tokenizer.decode(tokens)[:_EXCERPT] for tokens in (expected, got))
            what = "text of a user or tool message is encoded as special tokens"
            yield ConformanceFailure(probe.name, segment.turn, what, *shown)


def _assistant_indices(messages: Sequence[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def probe_dialogues() -> tuple[ProbeDialogue, ...]:
    """Return the built-in dialogues: typical rollouts and adversarial tool output."""
    look_up = tool(name="look_up")(_look_up)
    text = Path(__file__).with_name("chat").joinpath("probe_dialogues.jsonl").read_text("utf-8")
    rows = [json.loads(line) for line in text.strip().split("\n")]
    return tuple(ProbeDialogue(row["name"], tuple(row["messages"]), (look_up,) * row["tools"]) for row in rows)


def _look_up(query: str, k: int = 2) -> str:
    """Look something up.

    Args:
        query: the words to look for.
        k: the number of results.
    """
    return f"{query}: {k} results"
