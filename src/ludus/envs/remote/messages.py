"""Messages between `ludus env serve` and its clients, protocol version 1: JSON objects without unknown keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from ludus.envs.base import Demonstration
from ludus.envs.tool_world import Dialogue
from ludus.tools.base import ToolSchema, described_tool
from ludus.types import Action, CallError, DataClass, FinishReason, Message, Task, ToolCall, ToolOutcome

PROTOCOL: Final = 1
MAX_PAGE: Final = 1000
"""Maximum number of tasks or demonstrations in a page."""

Schema = dict[str, JsonValue]
"""A tool description in OpenAI's format."""


class WireMessage(BaseModel):
    """Base of the messages."""

    model_config = ConfigDict(extra="forbid")


class FunctionRecord(WireMessage):
    """The `function` part of a tool call."""

    name: str
    arguments: str


class CallRecord(WireMessage):
    """A tool call inside a chat message."""

    id: str
    type: Literal["function"]
    function: FunctionRecord


class MessageRecord(WireMessage):
    """A chat message (`ludus.types.Message`); keys that are not set are not sent."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning_content: str = ""
    tool_calls: list[CallRecord] = []
    tool_call_id: str = ""
    name: str = ""
    train: bool = True
    images: list[str] = []

    def unpack(self) -> Message:
        """Return the message."""
        return cast(Message, self.model_dump(exclude_unset=True))


Chat = tuple[MessageRecord, ...]


def pack_chat(messages: Sequence[Message]) -> Chat:
    """Return chat messages to send."""
    return tuple(MessageRecord.model_validate(message) for message in messages)


def unpack_chat(messages: Sequence[MessageRecord]) -> tuple[Message, ...]:
    """Return received chat messages."""
    return tuple(message.unpack() for message in messages)


class RewardRecord(WireMessage):
    """A reward part, without its function."""

    name: str
    weight: float
    outcome: bool
    low: float


class WorldInfo(WireMessage):
    """Description of a world: sizes of its splits, rewards, and the optional methods that it defines."""

    protocol: Literal[1] = PROTOCOL
    name: str
    splits: dict[str, int]
    rewards: tuple[RewardRecord, ...]
    implements: tuple[str, ...]
    emits_turn_rewards: bool
    has_state_key: bool
    num_text_dialogues: int
    episodes_at_once: int
    difficulty_report: str


class InfoRequest(WireMessage):
    """Request of the description."""


class PageRequest(WireMessage):
    """Request of the items from `start`: tasks of a split, or a stream of a seed."""

    kind: Literal["tasks", "demonstrations", "texts"]
    split: str = ""
    seed: int = 0
    start: int = Field(0, ge=0)
    num: int = Field(MAX_PAGE, ge=1, le=MAX_PAGE)


class TaskRecord(WireMessage):
    """A task without its truth. `tools` are indices into the page's list."""

    id: str
    prompt: Chat
    tags: dict[str, str]
    seed: int
    tools: tuple[int, ...]


class DialogueRecord(WireMessage):
    """A demonstration. `tools` are indices into the page's list."""

    messages: Chat
    tools: tuple[int, ...]
    data_class: DataClass | None = None


class TaskPage(WireMessage):
    """Some items, the tool descriptions to which they refer, and whether they are the last ones."""

    tasks: tuple[TaskRecord, ...] = ()
    dialogues: tuple[DialogueRecord, ...] = ()
    texts: tuple[str, ...] = ()
    tools: tuple[Schema, ...] = ()
    is_last: bool = False


class TaskRequest(WireMessage):
    """A task by split and id: to start an episode of it, or to ask for its solutions."""

    split: str
    id: str


class Solutions(WireMessage):
    """Scripted episodes of a task: of the expert, other correct ones, cheats; and texts as correct as the answer."""

    expert: DialogueRecord | None = None
    tools: tuple[Schema, ...] = ()
    alternatives: tuple[Chat, ...] = ()
    cheats: dict[str, Chat] = {}
    paraphrases: tuple[str, ...] = ()


class MalformedCallRecord(WireMessage):
    """A malformed tool call."""

    id: str
    text: str
    reason: str


class ValidCallRecord(WireMessage):
    """A well-formed tool call."""

    id: str
    name: str
    arguments: dict[str, JsonValue]


class StepRequest(WireMessage):
    """The `step`-th action of an episode, counted from 1. A repeated request returns the same reply."""

    step: int = Field(ge=1)
    message: MessageRecord
    calls: tuple[ValidCallRecord, ...] = ()
    errors: tuple[MalformedCallRecord, ...] = ()
    finish_reason: FinishReason = "stop"

    @classmethod
    def of(cls, step: int, action: Action) -> StepRequest:
        """Return the request for an action."""
        return cls.model_validate({"step": step, **asdict(action)})

    @property
    def action(self) -> Action:
        """The action."""
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in self.calls)
        errors = tuple(CallError(error.id, error.text, error.reason) for error in self.errors)
        return Action(self.message.unpack(), calls, errors, self.finish_reason)


class EpisodeReply(WireMessage):
    """Response of an environment, with the reward parts of an episode that ends here."""

    step: int
    messages: Chat = ()
    done: bool = False
    reward: float | None = None
    outcomes: tuple[ToolOutcome, ...] = ()
    grades: dict[str, float] = {}
    state: str = ""


class CloseRequest(WireMessage):
    """Request to close an episode; one that is not open is closed already."""


class ToolTable:
    """The distinct tool descriptions of a page."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    @property
    def schemas(self) -> tuple[Schema, ...]:
        """The descriptions in order."""
        return tuple(map(json.loads, self._places))

    def add(self, schemas: Sequence[ToolSchema]) -> tuple[int, ...]:
        """Return the indices of tool descriptions, added if they are new."""
        return tuple(self._places.setdefault(json.dumps(schema), len(self._places)) for schema in schemas)

    def pack(self, shown: Demonstration) -> DialogueRecord:
        """Return a demonstration to send."""
        tools = self.add([tool.schema for tool in shown.tools])
        messages = []
        for message, trains in zip(shown.messages, shown.trains, strict=True):
            is_context = message["role"] == "assistant" and not trains
            messages.append(Message({**message, "train": False}) if is_context else message)
        return DialogueRecord(messages=pack_chat(messages), tools=tools, data_class=shown.data_class)


def unpack_dialogue(record: DialogueRecord, schemas: Sequence[Schema]) -> Dialogue:
    """Return a received demonstration."""
    tools = tuple(described_tool(cast(ToolSchema, schemas[i])) for i in record.tools)
    return Dialogue(unpack_chat(record.messages), tools, record.data_class)


def same_task(task: Task) -> tuple[object, ...]:
    """Return what identifies a task among those of all splits."""
    return task.id, task.seed, tuple(sorted(task.tags.items()))
