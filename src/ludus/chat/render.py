"""Render messages to tokens: the renderer protocol, and the renderer of chat templates.

Sampled tokens are never rendered again; observations are appended as *deltas*, the exact tokens that the
template inserts between the end of one assistant turn and the beginning of the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

from jinja2 import TemplateError

from ludus.chat.parse import PARSERS, detect
from ludus.chat.parse_json import CALL_CLOSE, CALL_OPEN, GUIDES_EXIST, THINK_CLOSE, THINK_OPEN, hermes_guide, tool_call
from ludus.errors import UserError
from ludus.images import IMAGE_IDS, Image, content_parts, read_image
from ludus.tools.base import Tool, ToolSchema
from ludus.types import Action, FinishReason, Guide, Message, Segment

_FIX_TEMPLATE = "Set env.rendering to 'tags', or fix the template."
_MARKER = "zqxMARKxqz"
_USER: list[dict[str, object]] = [{"role": "user", "content": "q"}]
_USER_MARK: list[dict[str, object]] = [{"role": "user", "content": _MARKER}]
_IMAGE_PARTS: list[dict[str, str]] = [{"type": "image"}, {"type": "text", "text": _MARKER}]
_ASSISTANT: dict[str, object] = {"role": "assistant", "content": "s"}
_CALL: dict[str, object] = {"id": "c", "type": "function", "function": {"name": "t", "arguments": {"a": _MARKER}}}
_PLAIN_CALL: dict[str, object] = {**_CALL, "function": {"name": "t", "arguments": {"a": "s"}}}
_RESULT: dict[str, object] = {"role": "tool", "content": _MARKER, "tool_call_id": "c", "name": "t"}
_ENDS_IN_HISTORY: Mapping[str, str] = {"harmony": "<|end|>"}
"""End of a turn without calls that is followed by other messages, by format, if it is not the sampled one."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "required": []}
_TOOL_PROBE: ToolSchema = {
    "type": "function",
    "function": {"name": _MARKER, "description": "d", "parameters": _NO_PARAMETERS},
}


class AddedToken(Protocol):
    """Added token of a tokenizer; `str` returns its text."""

    special: bool


class Tokenizer(Protocol):
    """Methods of Hugging Face tokenizers used by the chat layer."""

    chat_template: Any
    added_tokens_decoder: Mapping[int, AddedToken]
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool = ...
    ) -> str: ...

    def get_added_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(self, conversation: Sequence[Any], **kwargs: Any) -> Any: ...  # noqa: ANN401


def decode_exactly(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special: bool = False) -> str:
    """Return the text of tokens, without cleaning up spaces. Image tokens are left out."""
    shown = [token for token in ids if token < IMAGE_IDS]
    return tokenizer.decode(shown, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)


class ImageExpander(Protocol):
    """The tokens of images for one model."""

    text: str
    """Placeholder of an image, which the chat template writes."""
    token_id: int
    """Token of the placeholder."""

    def expand(self, image: Image) -> tuple[int, ...]:
        """Return the tokens of an image: image tokens and the markers around them."""


class Renderer(Protocol):
    """Converts messages to tokens, and sampled tokens to an action."""

    tokenizer: Tokenizer
    stop: tuple[str, ...]
    """Strings that end an action."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end an action and belong to it."""
    call_end: str
    """The string that ends a call; empty if nothing marks its end."""
    streams_text: bool
    """Whether the text before the first call or thought, which begin with a tag, begins the content of the message."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        """Return the tokens of the prompt, including the generation prompt."""

    def parse(
        self, tokens: Sequence[int], turn: int, finish_reason: FinishReason, tools: Sequence[Tool] = ()
    ) -> Action:
        """Parse an action. Formats without types take those of the tools' arguments. Never raises."""

    def observation(self, messages: Sequence[Message], last: int | None = None) -> tuple[int, ...]:
        """Return the tokens between a sampled action, whose last token is `last`, and the next one."""

    def action(self, history: Sequence[Message], message: Message, tools: Sequence[Tool]) -> tuple[int, ...]:
        """Return the tokens that represent `message` as a sampled action (demonstrations only)."""

    def guide(self, tools: Sequence[Tool], *, required: bool = False, single: bool = False) -> Guide:
        """Return a guide that permits only valid calls; `required`: at least one and no text, `single`: at most one.
        UserError if unsupported."""


_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
"""End-of-text tokens of models whose `eos_token` ends a turn of the chat template."""


def document_tokens(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the tokens of a plain text with the special tokens that the tokenizer adds and an end-of-text token.

    Control strings in the text become control tokens. Raises UserError if the tokenizer has no end-of-text token.
    """
    ids = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
    end = next((ids[name] for name in _END_OF_TEXT if name in ids), tokenizer.eos_token_id)
    if end is None:
        raise UserError("The model's tokenizer has no end-of-text token.", "Set eos_token in tokenizer_config.json.")
    tokens = tuple(tokenizer.encode(text, add_special_tokens=True))
    return tokens if tokens[-1:] == (end,) else (*tokens, end)


def render_dialogue(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Segment, ...]:
    """Render a whole dialogue as segments, in the same steps as a rollout. For demonstrations.

    Raises ValueError without an assistant message.
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


class TemplateRenderer:
    """Renders with the model's chat template.

    `parser` names the tool-call format; `auto` detects it from the template. Features that the template
    does not support are rendered as text: tools and call instructions in the system message, thinking in the
    content, the system message in the first user message. Without support for them, later system messages are the
    user's, and user messages in a row are one. `images` are the image tokens of a vision-language model.

    Raises `UserError` without a template, if it rejects a dialogue, or if turns have no end token.
    """

    stop: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer, parser: str = "auto", images: ImageExpander | None = None) -> None:
        self.tokenizer, template, self._images = tokenizer, tokenizer.chat_template, images
        if not template:
            raise UserError(
                "The model's tokenizer has no chat template.",
                "Use a chat model, or set env.rendering to 'tags' for a base model.",
            )
        name = detect(str(template)) if parser == "auto" else parser
        self._in_parts = self._image_in_parts = False
        text_parts = [{"type": "text", "text": _MARKER}]
        self._in_parts = not self._renders(_USER_MARK) and self._renders([{"role": "user", "content": text_parts}])
        self._image_in_parts = images is not None and self._renders([{"role": "user", "content": _IMAGE_PARTS}])
        self.native_tools = self._renders(_USER, tools=[_TOOL_PROBE])
        keys = ("reasoning_content", "thinking")
        read = [key for key in keys if self._renders([*_USER, {**_ASSISTANT, key: _MARKER}])]
        self.native_thinking, self._thinking_key = bool(read), next(iter(read), keys[0])
        system = {"role": "system", "content": _MARKER}
        self.native_system = self._renders([system, *_USER])
        self._later_system = self._renders([{**system, "content": "s"}, *_USER, system, *_USER])
        self._user_runs = self._renders([*_USER, {"role": "user", "content": _MARKER}])
        self.guard = ControlGuard(tokenizer, str(template))
        self._parse = PARSERS[name if self.native_tools else "hermes"]
        self._starts_thinking = self._apply(_USER, generate=True).rstrip().endswith(THINK_OPEN)
        self.call_end = CALL_CLOSE if self._parse.name == "hermes" else ""
        self.streams_text = self._parse.name == "hermes" and not self._starts_thinking
        self._end, self._ends_at_role = self._find_end()
        self._call_end = self._find_call_end() if self.native_tools else self._end
        self.stop_token_ids = tuple(dict.fromkeys((self._end[1], self._call_end[1])))
        with_calls = [*_USER, {**_ASSISTANT, "content": "", "tool_calls": [_PLAIN_CALL]}, _RESULT]
        needs_calls = self._renders(with_calls) and not self._renders([*_USER, _ASSISTANT, _RESULT])
        self._results_need_calls = self.native_tools and needs_calls
        bare = self._encode("q")
        self._needs_context = any(self._encode_after(before, "q") != bare for before in (self._end[0], "q\n"))

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        return self._with_images(self._encode(self.text(messages, tools, generate=True)), messages)

    def guide(self, tools: Sequence[Tool], *, required: bool = False, single: bool = False) -> Guide:
        if self._parse.name != "hermes":
            raise UserError(f"The format {self._parse.name} does not support guided tool calls.", GUIDES_EXIST)
        added = self.tokenizer.get_added_vocab()
        return hermes_guide([tool.schema for tool in tools], added, required=required, single=single)

    def parse(
        self, tokens: Sequence[int], turn: int, finish_reason: FinishReason, tools: Sequence[Tool] = ()
    ) -> Action:
        ids = list(tokens)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = decode_exactly(self.tokenizer, ids)
        if self._starts_thinking and THINK_CLOSE not in text:
            text = THINK_OPEN + text.replace(CALL_OPEN, THINK_CLOSE + CALL_OPEN, 1)
        parsed = self._parse.parse(text, turn=turn, schemas=[tool.schema for tool in tools])
        return Action(parsed.message, parsed.calls, parsed.errors, finish_reason)

    def observation(self, messages: Sequence[Message], last: int | None = None) -> tuple[int, ...]:
        """Return the tokens after an assistant turn: its tail, the messages, the generation prompt.

        The end-of-turn token that these messages follow precedes them if `last`, the last token of the turn, is
        another one: the turn was cut off, or the format has several.
        """
        marked = Message(role="assistant", content=_MARKER)
        own = takewhile(lambda message: message["role"] != "assistant", messages)  # messages that answer the turn
        results = [message for message in own if message["role"] == "tool"] if self.native_tools else []
        if results and self._results_need_calls:
            arguments = json.dumps({"a": _MARKER})
            calls = [tool_call(one.get("tool_call_id", ""), one.get("name", ""), arguments) for one in results]
            marked = Message(role="assistant", content="", tool_calls=calls)
        text, number = self._call_end if results else self._end
        in_history = text if results else _ENDS_IN_HISTORY.get(self._parse.name, text)
        history = self.text([Message(role="user", content="q"), marked, *messages], (), generate=True)
        _, found, delta = _cut_after_mark(history).partition(in_history)
        if not found:
            raise UserError(
                f"The chat template does not write {in_history!r} after an assistant turn that is followed by other "
                "messages.",
                _FIX_TEMPLATE,
            )
        tokens = self._encode_after(text, delta) if self._needs_context else self._encode(delta)
        tokens = self._with_images(tokens, messages)
        return tokens if last in (None, number) else (number, *tokens)

    def action(self, history: Sequence[Message], message: Message, tools: Sequence[Tool]) -> tuple[int, ...]:
        """Render the assistant turn that follows `history`, with the end-of-turn token."""
        before = self.text(history, tools, generate=True)
        whole = self.text([*history, message], tools, generate=False)
        if not whole.startswith(before):
            appends = whole.startswith(self.text(history, tools, generate=False))
            part = "the generation prompt" if appends else "the dialogue so far, but rewrites it"
            raise UserError(
                f"The chat template does not continue {part} when it renders an assistant turn.",
                "Choose another template, or train without demonstrations.",
            )
        added = whole[len(before) :]
        calls = message.get("tool_calls", [])
        parts = (message["content"], message.get("reasoning_content", ""), json.dumps(calls, ensure_ascii=False))
        for end in dict.fromkeys((self._end[0], self._call_end[0])):
            if end.strip() and any(end in part for part in parts):
                raise UserError(
                    f"A demonstration's assistant message contains {end!r}, the end-of-turn token.",
                    "Remove it from the text.",
                )
        end = self._call_end[0] if calls else self._end[0]
        at = added.find(end)
        added = added[: at + len(end)] if at >= 0 else added + end * self._ends_at_role
        return self._encode_after(before, added) if self._needs_context else self._encode(added)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, generate: bool) -> str:
        """Return the template's text of a whole dialogue."""
        prepared = list(map(self._guarded, messages))
        if not self.native_tools:
            prepared = _write_tools(prepared, tools)
        elif not self.native_thinking:
            prepared = [_write_thinking(message) for message in prepared]
        prepared = self._fit_roles(prepared)
        if not self.native_system and prepared and prepared[0]["role"] == "system":
            system, *prepared = prepared
            content = system["content"]
            if prepared and prepared[0]["role"] == "user":
                content += f"\n\n{prepared.pop(0)['content']}"
            prepared.insert(0, Message(role="user", content=content))
        shown = [tool.schema for tool in tools] if self.native_tools else []
        if self._parse.name == "kimi_k2":
            prepared = [_number_calls(message) for message in prepared]
        return self._apply([self._to_template(message) for message in prepared], shown, generate=generate)

    def _guarded(self, message: Message) -> Message:
        """Return the message with control strings broken, and the model's placeholders in the places of its images."""
        if self._images is None:
            return self.guard.message(message)
        mark, guarded = self._images.text, message.copy()
        guarded.pop("images", None)
        guarded["content"] = ""
        for part in content_parts(message):
            if isinstance(part, str):
                text = self.guard.message(Message(role=message["role"], content=part))["content"]
                guarded["content"] += text.replace(mark, self.guard.broken(mark))
            else:
                guarded["content"] += mark
        return guarded

    def _with_images(self, tokens: tuple[int, ...], messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens with the placeholders replaced by the tokens of the messages' images, in order."""
        if self._images is None:
            return tokens
        images = [read_image(url) for message in messages for url in message.get("images", ())]
        places = [i for i, token in enumerate(tokens) if token == self._images.token_id]
        if len(places) != len(images):
            raise UserError(
                f"The chat template writes {len(places)} image placeholders for {len(images)} images.",
                "Use the chat template of the vision-language model.",
            )
        found = dict(zip(places, map(self._images.expand, images), strict=True))
        return tuple(one for i, token in enumerate(tokens) for one in found.get(i, (token,)))

    def _fit_roles(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose roles follow each other as the template allows."""
        fitted: list[Message] = []
        for message in messages:
            role, last = message["role"], fitted[-1]["role"] if fitted else ""
            if role == "system" and last not in ("", "system") and not self._later_system:
                role = "user"
            native = {"user": self._user_runs, "system": self._later_system}.get(role, True)
            if role == last and not native:
                message = Message(role=role, content=f"{fitted.pop()['content']}\n\n{message['content']}")
            fitted.append(message if role == message["role"] else Message(role=role, content=message["content"]))
        return fitted

    def _to_template(self, message: Message) -> dict[str, Any]:
        prepared: dict[str, Any] = dict(message)
        if "reasoning_content" in prepared:
            prepared[self._thinking_key] = prepared.pop("reasoning_content")
        if message.get("tool_calls"):
            prepared["tool_calls"] = [
                tool_call(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in message["tool_calls"]
            ]
        return prepared

    def _apply(
        self, conversation: Sequence[Mapping[str, object]], tools: Sequence[ToolSchema] = (), *, generate: bool
    ) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(map(self._shown, conversation)),
                tools=list(tools) or None,
                add_generation_prompt=generate,
                tokenize=False,
            )
            return text
        except (TemplateError, TypeError) as error:
            raise UserError(f"The chat template rejects the dialogue: {error}", _FIX_TEMPLATE) from error

    def _shown(self, message: Mapping[str, object]) -> Mapping[str, object]:
        """Return a message in the form of the template: content as a text, or as a list of texts and images."""
        content, mark = message["content"], "" if self._images is None else self._images.text
        has_image = bool(mark) and isinstance(content, str) and mark in content
        if not isinstance(content, str) or not (self._in_parts or (has_image and self._image_in_parts)):
            return message
        texts = content.split(mark) if mark else [content]
        parts: list[dict[str, str]] = []
        for number, text in enumerate(texts):
            parts += [{"type": "image"}] * bool(number) + [{"type": "text", "text": text}] * bool(text)
        return {**message, "content": parts or [{"type": "text", "text": ""}]}

    def _renders(self, conversation: Sequence[Mapping[str, object]], tools: Sequence[ToolSchema] = ()) -> bool:
        try:
            return _MARKER in self._apply(conversation, tools, generate=conversation[-1]["role"] == "user")
        except UserError:
            return False

    def _find_end(self) -> tuple[tuple[str, int], bool]:
        """Return text and id of the end-of-turn token, and whether it is the role token of the next message.

        It is the first special token after an assistant's text. If the template appends nothing, the model ends
        its turn with the role token of the next message (GLM).
        """
        special = control_ids(self.tokenizer)
        turn = [*_USER, {**_ASSISTANT, "content": _MARKER}]
        ids = self._encode(_cut_after_mark(self._apply(turn, generate=False)))
        following = ids or self._encode(_cut_after_mark(self._apply([*turn, *_USER], generate=False)))
        end = next((i for i in ids if i in special), following[0] if following else -1)
        if not ids and end not in special:
            raise UserError(
                "The chat template appends nothing to an assistant message, so turns have no end token.", _FIX_TEMPLATE
            )
        return (decode_exactly(self.tokenizer, [end]), end), not ids

    def _find_call_end(self) -> tuple[str, int]:
        """Return text and id of the token that ends a turn with calls, usually the end-of-turn token.

        It is the last special token of such a turn, or the first one of the result if turns end at role tokens.
        """
        special = control_ids(self.tokenizer)
        turn = [*_USER, {**_ASSISTANT, "content": "", "tool_calls": [_CALL]}]
        try:
            text = self._apply(turn, generate=False)
            if self._ends_at_role:
                followed = self._apply([*turn, _RESULT], generate=False)
                ends = [i for i in self._encode(followed.removeprefix(text)) if i in special][:1]
            else:
                ends = [i for i in self._encode(_cut_after_mark(text)) if i in special]
        except UserError:
            ends = []
        return (decode_exactly(self.tokenizer, ends[-1:]), ends[-1]) if ends else self._end

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _encode_after(self, context: str, text: str) -> tuple[int, ...]:
        head, both = self._encode(context), self._encode(context + text)
        return both[len(head) :] if both[: len(head)] == head else self._encode(text)


def _cut_after_mark(text: str) -> str:
    _, mark, after = text.partition(_MARKER)
    if not mark:
        raise UserError("The chat template omits the text of an assistant message.", _FIX_TEMPLATE)
    return after


def _number_calls(message: Message) -> Message:
    """Return the message with call ids in the form of Kimi K2, `functions.NAME:INDEX`."""
    numbered = message.copy()
    if message.get("tool_calls"):
        numbered["tool_calls"] = [
            {**call, "id": _kimi_id(call["id"], call["function"]["name"])} for call in message["tool_calls"]
        ]
    elif message["role"] == "tool":
        numbered["tool_call_id"] = _kimi_id(message.get("tool_call_id", ""), message.get("name", ""))
    return numbered


def _kimi_id(call_id: str, name: str) -> str:
    return call_id if call_id.startswith("functions.") else f"functions.{name}:{call_id.rpartition('_')[2] or 0}"


def _write_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return the messages with tools and calls as text, for templates without tool support."""
    prepared: list[Message] = []
    for i, message in enumerate(messages):
        if message["role"] == "tool" and i and messages[i - 1]["role"] == "tool":
            prepared[-1]["content"] += f"\n{_write_calls(message)['content']}"
        else:
            prepared.append(_write_calls(message))
    if not tools:
        return prepared
    schemas = "\n".join(json.dumps(tool.schema["function"]) for tool in tools)
    instructions = (
        f"You can call these tools:\n{schemas}\n\n"
        'To call one, write\n<tool_call>\n{"name": "TOOL", "arguments": {"ARGUMENT": "VALUE"}}\n'
        "</tool_call>\nand wait for its result. When you know the answer, write the answer alone."
    )
    if prepared and prepared[0]["role"] == "system":
        first = Message(role="system", content=f"{prepared[0]['content']}\n\n{instructions}")
        return [first, *prepared[1:]]
    return [Message(role="system", content=instructions), *prepared]


def _write_calls(message: Message) -> Message:
    if message["role"] == "tool":
        return Message(role="user", content=f"<tool_response>\n{message['content']}\n</tool_response>")
    calls = "\n".join(
        f'<tool_call>\n{{"name": "{call["function"]["name"]}", '
        f'"arguments": {call["function"]["arguments"]}}}\n</tool_call>'
        for call in message.get("tool_calls", [])
    )
    text = _write_thinking(message)["content"]
    return Message(role=message["role"], content="\n".join(part for part in (text, calls) if part))


def _write_thinking(message: Message) -> Message:
    if not message.get("reasoning_content"):
        return message
    merged = message.copy()
    thought = f"<think>\n{merged.pop('reasoning_content')}\n</think>"
    merged["content"] = f"{thought}\n{message['content']}" if message["content"] else thought
    return merged


WRAPPERS = ("<tool_response>", "</tool_response>")
_BREAKS = ("\u200b", "\u2060", " ", "\ufffd")


class ControlGuard:
    """Breaks strings in user and tool messages that the tokenizer would encode as control tokens.

    `template` is the Jinja chat template, `wrappers` the tags around tool output.

    A tokenizer encodes the string `<|im_end|>` as the end-of-turn token anywhere, also in tool output, so a
    fetched page could end the tool's turn and inject a user message. A zero-width character inside such strings
    makes them ordinary text with the same appearance. The prompt, the deltas and whole dialogues use the same
    broken messages, so that they agree.

    - In `user` and `tool` messages every special token of the tokenizer is broken.
    - In `tool` messages also protocol marks are broken: non-special tokens that occur in the template
      (`<tool_call>`, `<think>`), and the tags around tool output. Users may write these, for example in instructions.
    - `system` and `assistant` messages are unchanged: the former are trusted, and the latter are sampled tokens.

    Raises `UserError` if no break prevents the tokenizer from encoding text as special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, template: str = "", wrappers: Sequence[str] = WRAPPERS) -> None:
        added = list(tokenizer.added_tokens_decoder.values())
        special = [str(token) for token in added if token.special]
        in_template = (str(token) for token in added if not token.special and str(token) in template)
        self.strings = every = [*special, *wrappers, *(mark for mark in in_template if mark.strip())]
        """The strings broken in tool output."""
        self._special, self._all = _compile_pattern(special), _compile_pattern(every)
        control = control_ids(tokenizer)
        for self._breaker in _BREAKS:
            text = "\n".join(map(self.broken, every))
            contained = any(self._breaker in string for string in every)
            if not contained and control.isdisjoint(tokenizer.encode(text, add_special_tokens=False)):
                return
        raise UserError(
            "The tokenizer encodes ordinary text as special tokens, so tool output could end a turn.",
            "Check the special tokens in its tokenizer_config.json.",
        )

    def message(self, message: Message) -> Message:
        """Return the message with control strings broken. Raises UserError if it has images."""
        if message.get("images"):
            raise UserError(
                "A message has images, but the model or env.rendering supports only text.",
                "Use a vision-language model with env.rendering = 'chat'.",
            )
        if message["role"] not in ("user", "tool"):
            return message
        safe = message.copy()
        safe["content"] = self.text(message["content"], from_tool=message["role"] == "tool")
        return safe

    def text(self, text: str, *, from_tool: bool) -> str:
        """Return the text with broken control strings. Repeated, since a break may form another one."""
        pattern = self._all if from_tool else self._special
        while pattern.search(text):
            text = pattern.sub(lambda match: self.broken(match.group()), text)
        return text

    def broken(self, token: str) -> str:
        """Return a control string as ordinary text."""
        return token[0] + self._breaker + token[1:] if len(token) > 1 else self._breaker


def control_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of the special tokens."""
    return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)


def _compile_pattern(strings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of all strings, longest first; it matches nothing if there are none."""
    ordered = sorted({string for string in strings if string}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
