"""`ToolWorld`, a world defined by tasks by split, tools and rewards, and messages of dialogues."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ludus.envs.base import World, defines
from ludus.envs.tool_env import Resource, ToolEnv, ToolLimits, as_text
from ludus.errors import UserError, did_you_mean
from ludus.rewards.base import Reward
from ludus.tools.base import Tool
from ludus.types import JSON, DataClass, FunctionCall, Message, MessageToolCall, Task

SUMMARY = "Summary of the work so far:\n"
"""Start of the message with a summary."""


def assistant(text: str) -> Message:
    """Return an assistant message without a tool call."""
    return Message(role="assistant", content=text)


def summary_message(summary: str) -> Message:
    """Return the message with which a rewritten dialogue continues after the first messages."""
    return Message(role="user", content=SUMMARY + summary.strip())


def tool_call(call_id: str, tool: str, arguments: Mapping[str, JSON]) -> MessageToolCall:
    """Return a tool call with its arguments as JSON text."""
    text = json.dumps(dict(arguments), ensure_ascii=False)
    return MessageToolCall(id=call_id, type="function", function=FunctionCall(name=tool, arguments=text))


def calling_message(
    turn: int, tool: str, arguments: Mapping[str, JSON], *, content: str = "", reasoning: str = ""
) -> Message:
    """Return an assistant message with one tool call, whose id is `call_{turn}_0`."""
    message = Message(role="assistant", content=content)
    if reasoning:
        message["reasoning_content"] = reasoning
    message["tool_calls"] = [tool_call(f"call_{turn}_0", tool, arguments)]
    return message


def tool_turn(
    turn: int, tool: str, arguments: Mapping[str, JSON], output: str, *, content: str = "", reasoning: str = ""
) -> tuple[Message, Message]:
    """Return an assistant message with one tool call, and the tool message with its output."""
    call = calling_message(turn, tool, arguments, content=content, reasoning=reasoning)
    return call, Message(role="tool", content=output, tool_call_id=f"call_{turn}_0", name=tool)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A demonstration: messages, and the tools that its prompt offers.

    An assistant message with `train` false is context, excluded from the loss.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    data_class: DataClass | None = None

    @property
    def trains(self) -> tuple[bool, ...]:
        """For each message, whether it is part of the loss."""
        return tuple(m["role"] == "assistant" and m.get("train", True) for m in self.messages)

    def texts(self) -> Iterator[str]:
        """Yield the contents of the messages and, after each, its tool calls as JSON."""
        for message in self.messages:
            yield message["content"]
            for made in (call["function"] for call in message.get("tool_calls", [])):
                yield f'{{"name": "{made["name"]}", "arguments": {made["arguments"]}}}'


@dataclass(frozen=True)
class ToolWorld(World):
    """Tasks with stateless tools.

    `tools` are the same for every task; a world with state, or whose tools depend on the task, subclasses `World`.
    `show` yields dialogues for the cold start from a seed. `resources` are shared by the tools of all episodes, such
    as an MCP server, and closed at the end of a command.
    """

    name: str
    task_lists: Mapping[str, Sequence[Task]]
    tools: Sequence[Tool]
    rewards: Sequence[Reward]
    limits: ToolLimits = field(default_factory=ToolLimits)
    show: Callable[[int], Iterator[Sequence[Message]]] | None = None
    resources: Sequence[Resource] = ()

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits."""
        return tuple(self.task_lists)

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split."""
        return split_of(self.task_lists, split, self.name)

    def environment(self, task: Task) -> ToolEnv:
        """Return a new episode."""
        return ToolEnv(self.tools, self.rewards, self.limits)

    async def close(self) -> None:
        """Close the resources."""
        for resource in self.resources:
            await resource.close()

    def implements(self, method: str) -> bool:
        """Return whether an optional method is available: `demonstrations` only with `show` or in a subclass."""
        needs_show = method == "demonstrations" and not defines(self, ToolWorld, method)
        return super().implements(method) and not (needs_show and self.show is None)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield the dialogues of `show`; none if it is not set."""
        for messages in self.show(seed) if self.show else ():
            yield Dialogue(tuple(messages), tuple(self.tools))


def split_of(task_lists: Mapping[str, Sequence[Task]], split: str, world: str) -> Sequence[Task]:
    """Return the tasks of a split. Raises UserError, as `check_split` does."""
    check_split(split, tuple(task_lists), world)
    return task_lists[split]


def check_split(split: str, splits: Sequence[str], world: str) -> None:
    """Raise UserError, suggesting the nearest name, if the world has no such split."""
    if split not in splits:
        guess = did_you_mean(split, splits)
        raise UserError(f"The world {world!r} has no split {split!r}.", f"{guess}Splits: {', '.join(splits)}.")


def call_and_result(tool: Tool, arguments: Mapping[str, JSON], turn: int = 0) -> tuple[Message, Message]:
    """Run a tool, and return its call and its output as two messages of a demonstration.

    For use outside an event loop. `turn` numbers the call within its dialogue. Raises ArgumentError for invalid
    arguments, and any exception of the tool.
    """
    checked = tool.check(arguments)
    output: object = tool.function(**checked)
    if asyncio.iscoroutine(output):
        output = asyncio.run(output)
    return tool_turn(turn, tool.name, arguments, as_text(output))
