"""Tag protocols for base models, without a chat template.

Search-R1 and ReSearch (`env.rendering` is `tags`), for a world with a tool `search` whose only required
argument is a string `query`:

    <think> ... </think> <search> query </search>   the model
    <information> ... </information>                the environment
    <answer> ... </answer>                          the model, at the end

ReTool and ToRL (`code`), for a world with a tool `python` whose only required argument is a string `code`:

    ... <code> program </code>                      the model
    <interpreter> output </interpreter>             the environment
    ... <answer> ... </answer>                      the model, at the end

Special tokens in user and tool messages, and result tags in tool output, are broken (`ludus.chat.render`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ludus.chat.parse_json import GUIDES_EXIST
from ludus.chat.parse_tags import ANSWER, RETOOL, SEARCH_R1, TagProtocol, TagsParser
from ludus.chat.render import ControlGuard, Tokenizer, decode_exactly, document_tokens, make_guard
from ludus.errors import ConfigError, UserError
from ludus.tools.base import Tool
from ludus.types import JSON, Action, FinishReason, Guide, Message

_TO_ANSWER = "Give the answer inside <answer> and </answer>."
_INSTRUCTIONS: Mapping[str, str] = {
    SEARCH_R1.name: (
        "Think inside <think> and </think>. To look something up, write <search> query </search>; what is "
        f"found comes back inside <information> and </information>. {_TO_ANSWER}"
    ),
    RETOOL.name: (
        "Think step by step. To run a Python program, write <code> program </code>; what it prints comes "
        f"back inside <interpreter> and </interpreter>. {_TO_ANSWER}"
    ),
}
PROTOCOLS: Mapping[str, TagProtocol] = {"tags": SEARCH_R1, "code": RETOOL}
"""The protocols by `env.rendering` value."""


@dataclass(frozen=True)
class TagsRenderer:
    """Renderer of a tag protocol; stop strings end an action."""

    tokenizer: Tokenizer
    protocol: TagProtocol = SEARCH_R1
    guard: ControlGuard = field(init=False, repr=False)

    def __post_init__(self) -> None:
        result = self.protocol.result
        guard = make_guard(self.tokenizer, wrappers=(f"<{result}>", f"</{result}>"))
        object.__setattr__(self, "guard", guard)

    @property
    def stop(self) -> tuple[str, ...]:
        """The closing tags of a call and of the answer."""
        return (f"</{self.protocol.call}>", f"</{ANSWER}>")

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Empty: a base model has no end-of-turn token."""
        return ()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        """Render instructions and question as plain text."""
        supported = self.protocol.tool
        if tools and supported not in {tool.name for tool in tools}:
            raise ConfigError(
                f"The tags protocol supports only the tool {supported}, which this world does not have.",
                "Set env.rendering to 'chat'.",
            )
        instructions = _INSTRUCTIONS[self.protocol.name] if tools else _TO_ANSWER
        text = "\n".join(self.guard.message(message)["content"] for message in messages)
        return tuple(self.tokenizer.encode(f"{instructions}\n{text}\n", add_special_tokens=True))

    def document(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a plain text with an end-of-text token."""
        return document_tokens(self.tokenizer, text)

    def guide(self, tools: Sequence[Tool]) -> Guide:
        """Raise UserError: tags contain free text, so no guide is supported."""
        raise UserError("The tags protocol does not support guided tool calls.", GUIDES_EXIST)

    def parse(
        self, tokens: Sequence[int], turn: int, finish_reason: FinishReason, tools: Sequence[Tool] = ()
    ) -> Action:
        """Parse the first call or answer after the thinking."""
        del tools
        text = decode_exactly(self.tokenizer, tokens, skip_special=True)
        parsed = TagsParser(self.protocol).parse(text, turn=turn)
        return Action(parsed.message, parsed.calls, parsed.errors, finish_reason)

    def observation(self, messages: Sequence[Message], last: int | None = None) -> tuple[int, ...]:
        """Render tool output in result tags, and user messages unchanged."""
        del last
        result = self.protocol.result
        texts = [
            f"<{result}>{message['content']}</{result}>" if message["role"] == "tool" else message["content"]
            for message in map(self.guard.message, messages)
        ]
        return tuple(self.tokenizer.encode("\n" + "\n".join(texts) + "\n", add_special_tokens=False))

    def action(self, history: Sequence[Message], message: Message, tools: Sequence[Tool]) -> tuple[int, ...]:
        """Render thinking and call, or the answer. Only the protocol's argument of the call is rendered.

        Raises `UserError` for several calls in one turn, and for a call that contains its closing tag.
        """
        del history, tools
        thought = message.get("reasoning_content", "")
        calls = message.get("tool_calls", [])
        if len(calls) > 1:
            raise UserError(
                f"The tags protocol allows one {self.protocol.call} per turn; this turn has several.",
                "Set env.rendering to 'chat', or split the turn.",
            )
        if calls:
            before = f"{message['content']}\n" if message["content"] else ""
            text = before + self._call(json.loads(calls[0]["function"]["arguments"]))
        else:
            text = f"<{ANSWER}>{message['content']}</{ANSWER}>"
        opening = f"<think>{thought}</think>\n" if thought else ""
        return tuple(self.tokenizer.encode(opening + text, add_special_tokens=False))

    def _call(self, arguments: Mapping[str, JSON]) -> str:
        tag, argument = self.protocol.call, str(arguments[self.protocol.argument])
        if f"</{tag}>" in argument:
            raise UserError(
                f"A call contains </{tag}>, which ends it in the tags protocol.",
                "Set env.rendering to 'chat', or remove the dialogue.",
            )
        around = "\n" if self.protocol.is_program else ""
        return f"<{tag}>{around}{argument}{around}</{tag}>"
