"""The text protocol of Search-R1 and ReSearch, for base models: tags instead of a chat template.

    <think> ... </think> <search> query </search>   the model
    <information> ... </information>                the environment
    <answer> ... </answer>                          the model, at the end

The world needs a tool `search` whose only required argument is a string `query`. Special tokens in what users
and tools say, and information tags in tool output, are broken (`ludus.chat.control`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from ludus.chat.control import ControlGuard, make_guard
from ludus.chat.guides import GUIDES_EXIST
from ludus.chat.parse import PARSERS
from ludus.chat.render import Tokenizer, decode_exactly
from ludus.errors import ConfigError, UserError
from ludus.tools.base import Tool
from ludus.types import Action, FinishReason, Guide, Message

_HOW = (
    "Think inside <think> and </think>. To look something up, write <search> query </search>; what is "
    "found comes back inside <information> and </information>. Give the answer inside <answer> and "
    "</answer>."
)
_HOW_WITHOUT_TOOLS = "Give the answer inside <answer> and </answer>."


@dataclass(frozen=True)
class TagsRenderer:
    """Renders with tags; stop strings end an action."""

    tokenizer: Tokenizer
    guard: ControlGuard = field(init=False, repr=False)

    def __post_init__(self) -> None:
        guard = make_guard(self.tokenizer, wrappers=("<information>", "</information>"))
        object.__setattr__(self, "guard", guard)

    @property
    def stop(self) -> tuple[str, ...]:
        """The closing tags of a search and of the answer."""
        return ("</search>", "</answer>")

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """None: a base model has no end of turn."""
        return ()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        """Instructions and question as plain text."""
        if tools and "search" not in {tool.name for tool in tools}:
            raise ConfigError(
                "The tags protocol knows one tool, search, and this world has none of that name.",
                "Set env.rendering to 'chat'.",
            )
        how = _HOW if tools else _HOW_WITHOUT_TOOLS
        said = "\n".join(self.guard.message(message)["content"] for message in messages)
        return tuple(self.tokenizer.encode(f"{how}\n{said}\n", add_special_tokens=True))

    def guide(self, tools: Sequence[Tool]) -> Guide:
        """Raises UserError: the tags hold free text, so that nothing is left to guide."""
        raise UserError("There are no guided tool calls in the tags of Search-R1.", GUIDES_EXIST)

    def parse(self, tokens: Sequence[int], turn: int, finish_reason: FinishReason) -> Action:
        """The first search or answer after the thinking."""
        text = decode_exactly(self.tokenizer, tokens, skip_special=True)
        parsed = PARSERS["search_r1"].parse(text, turn=turn)
        return Action(parsed.message, parsed.calls, parsed.errors, finish_reason)

    def observation(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Tool output in information tags; what a user says as it is."""
        texts = [
            f"<information>{message['content']}</information>"
            if message["role"] == "tool"
            else message["content"]
            for message in map(self.guard.message, messages)
        ]
        return tuple(self.tokenizer.encode("\n" + "\n".join(texts) + "\n", add_special_tokens=False))

    def action(self, history: Sequence[Message], message: Message, tools: Sequence[Tool]) -> tuple[int, ...]:
        """Thought and search, or the answer. Of the call's arguments only the query is written.

        Raises `UserError` for several calls in one turn.
        """
        del history, tools
        thought = message.get("reasoning_content", "")
        calls = message.get("tool_calls", [])
        if len(calls) > 1:
            raise UserError(
                "The tags protocol writes one search a turn, and this turn has several calls.",
                "Set env.rendering to 'chat', or split the turn.",
            )
        if calls:
            query = json.loads(calls[0]["function"]["arguments"])["query"]
            before = f"{message['content']}\n" if message["content"] else ""
            said = f"{before}<search>{query}</search>"
        else:
            said = f"<answer>{message['content']}</answer>"
        opening = f"<think>{thought}</think>\n" if thought else ""
        return tuple(self.tokenizer.encode(opening + said, add_special_tokens=False))
