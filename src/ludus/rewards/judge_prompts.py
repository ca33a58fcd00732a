"""Prompts and replies of judges: of the world `judging`, which trains them, and of `rewards.judge`, which uses them.

The judged material is data: enclosed in tags that end in a hash of the material, which its author cannot foresee and
which is not part of it. Invisible characters become visible, as `[U+200B]`; tags with our labels and control tokens of
chat templates lose their bracket, and keys of replies their first quotation mark.
"""

from __future__ import annotations

import json
import re
import tomllib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Final, Generic, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from ludus.config.sections.parts.judges import JudgeConfig
from ludus.engines.base import seed_for
from ludus.rewards.rubric import Rubric
from ludus.types import JSON, Message, Task

T = TypeVar("T")
Reading = TypeVar("Reading", covariant=True)

TRAINED_KINDS: Final = ("pairwise", "correct")
"""The kinds of `rewards.judge` that the world `judging` trains."""
_LABELS: Final = "task|text|first|second|reference|answer|think|tool_call|tool_response"
_KEYS: Final = "score|better|correct|holds"
_FORGED: Final = re.compile(rf"<(?=\s*/?\s*(?:{_LABELS})\b)|<(?=\|)|[\"'](?=\s*(?:{_KEYS})\s*[\"']\s*:)", re.IGNORECASE)
_HIDDEN = {"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"}
_ITEM: Final = "#/$defs/ItemReply"
_MAX_REASON: Final = 500  # characters of a reason or quote in a schema


@dataclass(frozen=True, slots=True)
class JudgedText:
    """A text to judge: its task, the text, the reference answer if there is one, and the leaves that rules decide."""

    task: Task
    text: str
    reference: str = ""
    rubric: Rubric | None = None
    rules: Mapping[str, bool] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The messages of the user in the prompt."""
        return question_of(self.task.prompt)

    @property
    def open_leaves(self) -> list[Rubric]:
        """The leaves of the rubric that no rule decides."""
        return [leaf for leaf in self.rubric.leaves() if leaf.name not in self.rules] if self.rubric else []


@dataclass(frozen=True, slots=True)
class JudgePrompt(Generic[Reading]):
    """A prompt, the schema of its reply, and the reader of a reply, which raises ValueError if it is invalid."""

    messages: tuple[Message, ...]
    schema: dict[str, JSON]
    read: Callable[[Mapping[str, JSON]], Reading]

    @property
    def key_text(self) -> str:
        """The content that determines the reply, as text."""
        return json.dumps([self.messages, self.schema], sort_keys=True)


class ScoreReply(BaseModel):
    """Reply of the kind score."""

    reason: str = Field("", max_length=_MAX_REASON)
    score: float


class PairReply(BaseModel):
    """Reply of the kind pairwise."""

    reason: str = Field("", max_length=_MAX_REASON)
    better: Literal["first", "second", "tie"]


class CorrectReply(BaseModel):
    """Reply of the kinds correct and reference."""

    reason: str = Field("", max_length=_MAX_REASON)
    correct: bool


class ItemReply(BaseModel):
    """Decision on one item of a rubric."""

    item: int
    quote: str = Field("", max_length=_MAX_REASON)
    holds: bool


class RubricReply(BaseModel):
    """Reply of the kind rubric."""

    items: list[ItemReply]


class WrittenItem(BaseModel):
    """Item of a rubric that a judge writes."""

    check: str = Field(min_length=3, max_length=_MAX_REASON)
    weight: float = Field(1.0, ge=1, le=5)


class WrittenRubric(BaseModel):
    """Reply with a rubric."""

    items: list[WrittenItem] = Field(min_length=1, max_length=12)


@cache
def templates() -> Mapping[str, str]:
    """Return the texts of `judge_prompts.toml`."""
    return {
        name: text.strip()
        for name, text in tomllib.loads(
            resources.files(__package__).joinpath("judge_prompts.toml").read_text("utf-8")
        ).items()
    }


def question_of(prompt: Sequence[Message]) -> str:
    """Return the messages of the user."""
    return "\n\n".join(message["content"] for message in prompt if message["role"] == "user")


def transcript(messages: Sequence[Message]) -> str:
    """Return messages as a judge sees them: contents, tool calls and results, without reasoning."""
    parts = []
    for message in messages:
        calls = [
            f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or []
        ]
        parts.append("\n".join(filter(None, [f"[{message['role']}]", message["content"], *calls])))
    return "\n\n".join(parts)


def shown_text(text: str, max_chars: int) -> str:
    """Return a text as a judge sees it: at most `max_chars`, visible, no tags of prompts or keys of replies."""
    if len(text) > max_chars:
        half = max_chars // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
    return _FORGED.sub("‹", "".join(map(_visible, text)))


def _visible(char: str) -> str:
    is_selector = "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"
    hidden = char not in "\n\t" and (is_selector or unicodedata.category(char) in _HIDDEN)
    return f"[U+{ord(char):04X}]" if hidden else char


def make_prompt(
    name: str,
    data: Mapping[str, str],
    reply: tuple[dict[str, JSON], Callable[[Mapping[str, JSON]], T]],
    **fills: object,
) -> JudgePrompt[T]:
    """Return the prompt `name` of `judge_prompts.toml` on the data by label; `reply` is its schema and reader."""
    number = 0
    while (tag := f"{seed_for('judge', number, *data.values()) % 2**32:08x}") in "".join(data.values()):
        number += 1
    fenced = "\n\n".join(f"<{label}-{tag}>\n{text}\n</{label}-{tag}>" for label, text in data.items())
    system = Message(role="system", content=templates()["system"])
    user = Message(role="user", content=templates()[name].format(data=fenced, **fills))
    return JudgePrompt((system, user), *reply)


def score_prompt(settings: JudgeConfig, one: JudgedText) -> JudgePrompt[float]:
    """Return the prompt for a score, which is read as a value in [0, 1]."""
    scale = settings.scale

    def read(reply: Mapping[str, JSON]) -> float:
        score = _checked(ScoreReply, reply).score
        if not 0 <= score <= scale:
            raise ValueError(f"the score {score:g} is not from 0 to {scale}")
        return score / scale

    schema = _schema(ScoreReply, score={"type": "integer", "minimum": 0, "maximum": scale})
    data = _data_of(one, settings.client.max_chars)
    return make_prompt("score", data, (schema, read), scale=scale, criteria=_criteria(one.rubric))


def correct_prompt(one: JudgedText, max_chars: int) -> JudgePrompt[float]:
    """Return the prompt that asks whether a text is correct, if given by the reference answer."""
    data, criteria = _data_of(one, max_chars), _criteria(one.rubric)
    if one.reference:
        data["reference"] = shown_text(one.reference, max_chars)
        criteria = "\nJudge by the reference answer: other words and formats are fine, other facts are not."
    return make_prompt("correct", data, (_schema(CorrectReply), read_correct), criteria=criteria)


def read_correct(reply: Mapping[str, JSON]) -> float:
    """Return 1 or 0 for a reply to `correct_prompt`. Raises ValueError."""
    return float(_checked(CorrectReply, reply).correct)


def pair_prompt(first: JudgedText, second: JudgedText, max_chars: int) -> JudgePrompt[float]:
    """Return the prompt for a comparison of two texts of one task."""
    texts = {"first": shown_text(first.text, max_chars), "second": shown_text(second.text, max_chars)}
    data = {"task": shown_text(first.question, max_chars)} | texts
    return make_prompt("pairwise", data, (_schema(PairReply), read_pair), criteria=_criteria(first.rubric))


def read_pair(reply: Mapping[str, JSON]) -> float:
    """Return the result of the first text in a reply to `pair_prompt`: 1, 0.5 or 0. Raises ValueError."""
    return {"first": 1.0, "tie": 0.5, "second": 0.0}[_checked(PairReply, reply).better]


@dataclass(frozen=True, slots=True)
class LeafVerdict:
    """Decision on a leaf; it holds only if the quote of the judge is in the text."""

    name: str
    claimed: bool
    quoted: bool

    @property
    def holds(self) -> bool:
        return self.claimed and self.quoted


def rubric_prompt(settings: JudgeConfig, one: JudgedText) -> JudgePrompt[tuple[LeafVerdict, ...]]:
    """Return the prompt for the leaves that no rule decides."""
    leaves, data = one.open_leaves, _data_of(one, settings.client.max_chars)
    plain = _plain(data["text"])

    def read(reply: Mapping[str, JSON]) -> tuple[LeafVerdict, ...]:
        found = {item.item: item for item in _checked(RubricReply, reply).items}
        if sorted(found) != list(range(1, len(leaves) + 1)):
            raise ValueError(f"the reply decides the items {sorted(found)} of {len(leaves)}")
        pairs = [(leaf, found[number], _plain(found[number].quote)) for number, leaf in enumerate(leaves, start=1)]
        return tuple(LeafVerdict(leaf.name, one.holds, bool(quote) and quote in plain) for leaf, one, quote in pairs)

    items = "\n".join(f"{number}. {leaf.text or leaf.name}" for number, leaf in enumerate(leaves, start=1))
    entries: JSON = {"type": "array", "minItems": len(leaves), "maxItems": len(leaves), "items": {"$ref": _ITEM}}
    return make_prompt("rubric", data, (_schema(RubricReply, items=entries), read), items=items)


def writing_prompt(settings: JudgeConfig, task: Task) -> JudgePrompt[Rubric]:
    """Return the prompt that writes a rubric for a task."""

    def read(reply: Mapping[str, JSON]) -> Rubric:
        items = _checked(WrittenRubric, reply).items
        leaves = (Rubric(f"item {n}", item.weight, text=item.check) for n, item in enumerate(items, start=1))
        return Rubric("written", 1.0, tuple(leaves))

    data = {"task": shown_text(JudgedText(task, "").question, settings.client.max_chars)}
    return make_prompt("write_rubric", data, (_schema(WrittenRubric), read))


def parse_reply(text: str, read: Callable[[Mapping[str, JSON]], T]) -> tuple[T, str]:
    """Return what a reply says, and its JSON: the last object in the text that `read` accepts. Raises ValueError
    without one.

    Text before a closing `</think>` is ignored.
    """
    text, last = text.rpartition("</think>")[2], ValueError("the reply has no JSON object")
    found: tuple[T, str] | None = None
    place = text.find("{")
    while place >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            try:
                found = read(value), json.dumps(value)
            except ValueError as error:
                last = error
        place = text.find("{", end)
    if found is None:
        raise last
    return found


def _data_of(one: JudgedText, max_chars: int) -> dict[str, str]:
    return {"task": shown_text(one.question, max_chars), "text": shown_text(one.text, max_chars)}


def _criteria(rubric: Rubric | None) -> str:
    if rubric is None:
        return ""
    return "\nCriteria:\n" + "\n".join(f"- {leaf.text or leaf.name}" for leaf in rubric.leaves())


def _plain(text: str) -> str:
    return " ".join(text.split()).strip("\"'“”„«» ").casefold()


def _schema(reply: type[BaseModel], **changed: JSON) -> dict[str, JSON]:
    """Return the JSON schema of a reply, with all of its properties and no others."""
    schema: dict[str, JSON] = reply.model_json_schema()
    properties, parts = schema["properties"], schema.get("$defs", {})
    assert isinstance(properties, dict)
    assert isinstance(parts, dict)
    inner: dict[str, JSON] = {name: _closed(part) for name, part in parts.items()}
    return _closed(schema | {"properties": properties | changed} | ({"$defs": inner} if inner else {}))


def _closed(schema: JSON) -> dict[str, JSON]:
    assert isinstance(schema, dict)
    properties = schema["properties"]
    assert isinstance(properties, dict)
    return schema | {"required": list(properties), "additionalProperties": False}


Reply = TypeVar("Reply", bound=BaseModel)


def _checked(kind: type[Reply], reply: Mapping[str, JSON]) -> Reply:
    try:
        return kind.model_validate(reply)
    except ValidationError as error:
        raise ValueError(str(error.errors()[0]["msg"])) from error
