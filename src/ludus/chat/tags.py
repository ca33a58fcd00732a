"""Tag protocols for base models, without a chat template: Search-R1 (`env.rendering` is `tags`) and ReTool (`code`).

A world needs a tool whose only required argument is the text of the call, `search(query)` or `python(code)`. Special
tokens in user and tool messages, and result tags in tool output, are broken (`ludus.chat.render`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ludus.chat.parse import ANSWER, PARSERS, RETOOL, SEARCH_R1, TO_ANSWER, TagProtocol
from ludus.chat.parse_json import GUIDES_EXIST
from ludus.chat.render import ControlGuard, Tokenizer, decode_exactly
from ludus.errors import ConfigError, UserError
from ludus.tools.base import Tool
from ludus.types import JSON, Action, FinishReason, Guide, Message

PROTOCOLS: Mapping[str, TagProtocol] = {"tags": SEARCH_R1, "code": RETOOL}
"""The protocols by `env.rendering` value."""


class TagsRenderer:
    """Renderer of a tag protocol; the closing tags of a call and of the answer end an action."""

    stop_token_ids: tuple[int, ...] = ()
    call_end = ""
    streams_text = False

    def __init__(self, tokenizer: Tokenizer, protocol: TagProtocol = SEARCH_R1) -> None:
        self.tokenizer, self.protocol = tokenizer, protocol
        self.stop: tuple[str, ...] = (f"</{protocol.call}>", f"</{ANSWER}>")
        self.guard = ControlGuard(tokenizer, wrappers=(f"<{protocol.result}>", f"</{protocol.result}>"))

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        supported = self.protocol.tool
        if tools and supported not in {tool.name for tool in tools}:
            raise ConfigError(
                f"The tags protocol supports only the tool {supported}, which this world does not have.",
                "Set env.rendering to 'chat'.",
            )
        instructions = self.protocol.instructions if tools else TO_ANSWER
        text = "\n".join(self.guard.message(message)["content"] for message in messages)
        return tuple(self.tokenizer.encode(f"{instructions}\n{text}\n", add_special_tokens=True))

    def guide(self, tools: Sequence[Tool], *, required: bool = False, single: bool = False) -> Guide:
        raise UserError("The tags protocol does not support guided tool calls.", GUIDES_EXIST)

    def parse(
        self, tokens: Sequence[int], turn: int, finish_reason: FinishReason, tools: Sequence[Tool] = ()
    ) -> Action:
        text = decode_exactly(self.tokenizer, tokens, skip_special=True)
        parsed = PARSERS[self.protocol.name].parse(text, turn=turn)
        return Action(parsed.message, parsed.calls, parsed.errors, finish_reason)

    def observation(self, messages: Sequence[Message], last: int | None = None) -> tuple[int, ...]:
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
        thought, calls = message.get("reasoning_content", ""), message.get("tool_calls", [])
        if len(calls) > 1:
            raise UserError(
                f"The tags protocol allows one {self.protocol.call} per turn; this turn has several.",
                "Set env.rendering to 'chat', or split the turn.",
            )
        if calls:
            arguments: Mapping[str, JSON] = json.loads(calls[0]["function"]["arguments"])
            tag, argument = self.protocol.call, str(arguments[self.protocol.argument])
            if f"</{tag}>" in argument:
                raise UserError(
                    f"A call contains </{tag}>, which ends it in the tags protocol.",
                    "Set env.rendering to 'chat', or remove the dialogue.",
                )
            before = f"{message['content']}\n" if message["content"] else ""
            around = "\n" if self.protocol.is_program else ""
            text = f"{before}<{tag}>{around}{argument}{around}</{tag}>"
        else:
            text = f"<{ANSWER}>{message['content']}</{ANSWER}>"
        opening = f"<think>{thought}</think>\n" if thought else ""
        return tuple(self.tokenizer.encode(opening + text, add_special_tokens=False))
