"""Messages to tokens: the renderer protocol, and the renderer of a model's own chat template.

Only three things are ever turned from text into tokens: the prompt, what the environment says, and (for
supervised training) demonstrations. What the model sampled is kept as it was sampled and never rendered
again; observations are appended after it as *deltas*, the exact tokens that the template puts between the
end of one assistant turn and the beginning of the next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from ludus.chat.parse import PARSERS, ToolCallParser, detect
from ludus.errors import UserError
from ludus.tools.base import Tool, ToolSchema
from ludus.types import Action, FinishReason, Message, Segment

_MARK = "zqxMARKxqz"


class Tokenizer(Protocol):
    """What the chat layer needs of a Hugging Face tokenizer."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: Sequence[Any], **kwargs: Any) -> Any: ...  # noqa: ANN401


class Renderer(Protocol):
    """How one kind of rendering turns messages into tokens and sampled tokens into an action."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an action."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an action; a sampled one belongs to it."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        """The tokens that open the episode, up to where the model begins to write."""
        ...

    def parse(self, tokens: Sequence[int], turn: int, finish_reason: FinishReason) -> Action:
        """Read an action. Never raises, whatever was sampled."""
        ...

    def observation(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens between the end of a sampled action and the beginning of the next."""
        ...

    def action(self, history: Sequence[Message], message: Message, tools: Sequence[Tool]) -> tuple[int, ...]:
        """The tokens that the model should have sampled to say `message` (demonstrations only)."""
        ...


def render_dialogue(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Tool]
) -> tuple[Segment, ...]:
    """A whole dialogue as segments, by the same steps as a rollout takes. For demonstrations.

    Raises ValueError where the dialogue has no assistant message.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError("a dialogue needs an assistant message")
    segments = [Segment("prompt", renderer.prompt(messages[: turns[0]], tools))]
    for turn, at in enumerate(turns):
        segments.append(Segment("action", renderer.action(messages[:at], messages[at], tools), turn))
        following = turns[turn + 1] if turn + 1 < len(turns) else None
        if following is not None:
            between = renderer.observation(messages[at + 1 : following])
            segments.append(Segment("observation", between, turn))
    return tuple(segments)


@dataclass(frozen=True)
class TemplateRenderer:
    """Renders with the model's own chat template.

    `parser` names how tool calls are written; `auto` reads it off the template. A template that leaves tools
    out gets their description, and the way to call them, in the system message.
    """

    tokenizer: Tokenizer
    parser: str = "auto"
    native_tools: bool = field(init=False)
    _parse: ToolCallParser = field(init=False, repr=False)
    _end: tuple[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        template = self.tokenizer.chat_template
        if not template:
            raise UserError(
                "The model's tokenizer has no chat template.",
                "Use a chat model, or set env.rendering to 'tags' for a base model.",
            )
        name = detect(str(template)) if self.parser == "auto" else self.parser
        object.__setattr__(self, "native_tools", self._renders_tools())
        object.__setattr__(self, "_parse", PARSERS[name if self.native_tools else "hermes"])
        object.__setattr__(self, "_end", self._find_end())

    @property
    def stop(self) -> tuple[str, ...]:
        """No stop strings: the end-of-turn token ends an action."""
        return ()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The template's end-of-turn token."""
        return (self._end[1],)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        """The template's tokens with the generation prompt."""
        return self._encode(self.text(messages, tools, generate=True))

    def parse(self, tokens: Sequence[int], turn: int, finish_reason: FinishReason) -> Action:
        """Read text, thinking and calls of an action."""
        ids = list(tokens)
        if ids and ids[-1] == self._end[1]:
            ids.pop()
        parsed = self._parse.parse(self.tokenizer.decode(ids, skip_special_tokens=False), turn=turn)
        return Action(parsed.message, parsed.calls, parsed.errors, finish_reason)

    def observation(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """What the template puts after an assistant turn: its tail, the messages, the generation prompt."""
        opening: list[Message] = [Message(role="user", content="q")]
        said = Message(role="assistant", content=_MARK)
        text = self.text([*opening, said, *messages], (), generate=True)
        return self._encode(self._after_turn(text))

    def action(self, history: Sequence[Message], message: Message, tools: Sequence[Tool]) -> tuple[int, ...]:
        """The assistant turn as the template writes it after `history`, with the end-of-turn token."""
        before = self.text(history, tools, generate=True)
        whole = self.text([*history, message], tools, generate=False)
        if not whole.startswith(before):
            raise UserError(
                "The chat template does not continue its own generation prompt: the assistant turn it "
                "renders begins differently.",
                "Choose another template, or train without demonstrations.",
            )
        said = whole[len(before) :]
        end = said.find(self._end[0])
        return self._encode(said[: end + len(self._end[0])] if end >= 0 else said)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, generate: bool) -> str:
        """The template's text for a whole dialogue."""
        native = self.native_tools
        prepared = [_for_template(m) for m in (messages if native else _tools_in_text(messages, tools))]
        return str(
            self.tokenizer.apply_chat_template(
                prepared,
                tools=[tool.schema for tool in tools] or None if native else None,
                add_generation_prompt=generate,
                tokenize=False,
            )
        )

    def _renders_tools(self) -> bool:
        probe: ToolSchema = {
            "type": "function",
            "function": {
                "name": _MARK,
                "description": "d",
                "parameters": {"type": "object", "properties": {}, "required": []},
            },
        }
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": "q"}], tools=[probe], add_generation_prompt=True, tokenize=False
        )
        return _MARK in str(text)

    def _find_end(self) -> tuple[str, int]:
        """Text and id of the token that ends an assistant turn."""
        text = self.text(
            [Message(role="user", content="q"), Message(role="assistant", content=_MARK)], (), generate=False
        )
        tail = text[text.rindex(_MARK) + len(_MARK) :]
        ids = self._encode(tail)
        if not ids:
            raise UserError(
                "The chat template puts nothing after an assistant message, so a turn has no end.",
                "Set env.rendering to 'tags', or mend the template.",
            )
        return self.tokenizer.decode([ids[0]], skip_special_tokens=False), ids[0]

    def _after_turn(self, text: str) -> str:
        tail = text[text.rindex(_MARK) + len(_MARK) :]
        return tail[tail.index(self._end[0]) + len(self._end[0]) :]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


def _for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates take it: the arguments of tool calls as objects."""
    prepared: dict[str, Any] = dict(message)
    if message.get("tool_calls"):
        prepared["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.loads(call["function"]["arguments"]),
                },
            }
            for call in message["tool_calls"]
        ]
    return prepared


def _tools_in_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Messages for a template without tools: what it leaves out is written as text."""
    prepared = [_plain(message) for message in messages]
    if not tools:
        return prepared
    told = _instructions(tuple(json.dumps(tool.schema["function"]) for tool in tools))
    if prepared and prepared[0]["role"] == "system":
        first = Message(role="system", content=f"{prepared[0]['content']}\n\n{told}")
        return [first, *prepared[1:]]
    return [Message(role="system", content=told), *prepared]


def _plain(message: Message) -> Message:
    if message["role"] == "tool":
        return Message(role="user", content=f"<tool_response>\n{message['content']}\n</tool_response>")
    calls = "\n".join(
        f'<tool_call>\n{{"name": "{call["function"]["name"]}", '
        f'"arguments": {call["function"]["arguments"]}}}\n</tool_call>'
        for call in message.get("tool_calls", [])
    )
    thought = message.get("reasoning_content", "")
    parts = [f"<think>\n{thought}\n</think>" if thought else "", message["content"], calls]
    return Message(role=message["role"], content="\n".join(part for part in parts if part))


@lru_cache(maxsize=64)
def _instructions(schemas: tuple[str, ...]) -> str:
    return (
        "You can call these tools:\n"
        + "\n".join(schemas)
        + '\n\nTo call one, write\n<tool_call>\n{"name": "TOOL", "arguments": {"ARGUMENT": "VALUE"}}\n'
        "</tool_call>\nand wait for its result. When you know the answer, write the answer alone."
    )
