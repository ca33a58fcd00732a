"""Simulated users: scripted, or a language model at an endpoint or in training.

A user sees only what the agent writes to him, his script, and his phone. What he says never decides the outcome.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel

from ludus.chat.parse_json import tool_call
from ludus.engines.remote.http_client import RemoteEngineSettings, Replica
from ludus.envs.tool_env import ToolExecutor, tool_message
from ludus.errors import UserError
from ludus.tools.base import Tool
from ludus.types import Action, CallError, Message, ToolCall
from ludus.worlds.service.desk import MAX_READ, Desk, mentions, mentions_all, phone_tools
from ludus.worlds.service.domain import Cell, UserToolSpec, user_texts
from ludus.worlds.service.grader import REFUSAL, Goal, Script

UserKind = Literal["scripted", "endpoint", "policy"]
"""Who plays the user: the script, a model at an endpoint, or the policy itself."""
STOP = "###STOP###"
"""Text with which a language model ends the episode as the user; the agent never sees it."""
MAX_PHONE_TURNS = 4
"""Maximum number of consecutive turns of a language model with calls of the phone."""

_PROPOSAL = re.compile(
    r"\bconfirm\b|\b(shall|should) i\b|\bdo you want me\b|\bwould you like me\b|\bproceed\b"
    r"|\bis that (right|correct|ok)\b|\byes or no\b"
)
_IDENTITY = re.compile(r"\byour (full )?name\b|\bzip\b|\be-?mail\b|\bidentity\b|\bverify\b")
_MORE = re.compile(r"\banything (else|more)\b")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_DONE = re.compile(
    r"\banything (else|more)\b|\bdone\b|\b(has|have) been\b|\bcompleted?\b|\ball set\b|\btaken care of\b"
)
_WAIT = re.compile(r"\bmoment\b|\bwait\b|\blet me\b|\blooking\b")
_NUMBER = re.compile(r"\b(id|number)\b")
_SWITCHES = {
    "off": re.compile(r"\b(off|disable|deactivate)\b"),
    "on": re.compile(r"\b(turn|switch|set)\b[^.?!]*\bon\b|\b(enable|activate)\b"),
}
_ANY = re.compile("")
_REQUESTS_ACTION = re.compile(r"\b(please|can you|could you|try|turn|switch|what|is your|does|check)\b")


class User(Protocol):
    """A simulated user."""

    async def opening(self) -> str:
        """Return the first message."""

    async def reply(self, text: str) -> str | None:
        """Return the reply to a message of the agent; None ends the episode."""


@dataclass
class ScriptedUser:
    """A user that recognizes by keywords what the agent asks for, and closes a request when told that it is done.

    `place` is the number of the current request. `zip` is the code that the user stated last.
    """

    script: Script
    desk: Desk
    place: int = 0
    zip: int = 0
    is_over: bool = False
    _num_replies: int = 0
    _num_unhelpful: int = 0
    _revealed: dict[str, None] = field(default_factory=dict)
    _decided: bool = False
    _insisted: bool = False

    async def opening(self) -> str:
        return self.first()

    async def reply(self, text: str) -> str | None:
        return self.answer(text)

    def first(self) -> str:
        """Return the first message: who the user is, if he introduces himself, and the first request."""
        phrases, script = user_texts().phrases, self.script
        parts = [phrases["introduction"].format(email=script.email)] if script.introduces else []
        return self._spoken(" ".join([*parts, self._goal.say]))

    def answer(self, text: str) -> str | None:
        """Return the reply to a message; None, and `is_over`, ends the episode."""
        said = self._respond(text[:MAX_READ].casefold())
        if said is None:
            self.is_over = True
            return None
        self._num_replies += 1
        return self._spoken(said)

    @property
    def _goal(self) -> Goal:
        return self.script.goals[self.place]

    def _spoken(self, text: str) -> str:
        forms = user_texts().personas[self.script.persona]
        return forms[self._num_replies % len(forms)].format(text=text)

    def _respond(self, text: str) -> str | None:
        phrases = user_texts().phrases
        if _PROPOSAL.search(text) and self._proposed(text):
            return self._on_proposal(text)
        if _IDENTITY.search(text):
            wrong = self.script.mistakes and not self.zip
            self.zip = self.script.zip + (1 if self.script.zip % 10 < 9 else -1) * wrong
            return phrases["identity"].format(name=self.script.name, zip=self.zip)
        rest = " ".join(one for one in _SENTENCE.split(text) if not _MORE.search(one))
        if self._goal.device and (found := instructed(self.desk.domain.spec.user_tools, rest)) is not None:
            return self._use_phone(*found)
        asked = self._asked(rest)
        if asked and not (_DONE.search(text) and asked in self._revealed):
            self._revealed[asked] = None
            return self._fact(asked)
        if REFUSAL.search(rest):
            return self._on_refusal()
        if "?" in rest and _NUMBER.search(rest):
            return phrases["forgotten"] if self.script.forgets else self._goal.say
        return self._on_statement(text)

    def _proposed(self, text: str) -> bool:
        """Return whether a text with a word of a proposal names a value of a change."""
        calls = [*self._goal.writes, *self._goal.wanted]
        return any(mentions(text, value) for _, args in calls for value in (*args.values(), *self._goal.first.values()))

    def _on_proposal(self, text: str) -> str | None:
        phrases, goal = user_texts().phrases, self._goal
        if goal.first and not self._decided:
            self._decided = True
            self._revealed |= dict.fromkeys(goal.first)
            if any(mentions(text, value) for value in goal.first.values()):
                corrected = " ".join(self._fact(name) for name in goal.first)
                return phrases["decline"].format(answer=corrected)
        if any(mentions_all(text, args) for _, args in (*goal.writes, *goal.wanted)):
            return phrases["yes"]
        return self._unhelped(phrases["wrong"].format(say=goal.say))

    def _on_refusal(self) -> str | None:
        phrases = user_texts().phrases
        if not self._goal.why:
            reply = self._unhelped(phrases["protest"])
            return reply if self._num_unhelpful < 2 else self._close()
        if self.script.insists and not self._insisted:
            self._insisted = True
            return phrases["insist"]
        return self._close()

    def _on_statement(self, text: str) -> str | None:
        phrases, goal = user_texts().phrases, self._goal
        if _DONE.search(text) or (goal.tell and "?" not in text and not _WAIT.search(text)):
            if goal.device and self.desk.signal() != "full signal":
                return self._unhelped(phrases["still"].format(signal=self.desk.signal()))
            return self._close()
        return self._unhelped(phrases["unclear"].format(say=goal.say))

    def _asked(self, text: str) -> str:
        """Return the fact that a question asks for, one that was not told first; empty if there is none."""
        facts = self.desk.domain.spec.facts
        if "?" not in text:
            return ""
        found = [name for name in self._goal.facts if any(word in text for word in facts[name].keywords)]
        return min(found, key=lambda name: name in self._revealed, default="")

    def _fact(self, name: str) -> str:
        goal = self._goal
        value = goal.facts[name] if self._decided else goal.first.get(name, goal.facts[name])
        return self.desk.domain.spec.facts[name].answer.format(value=value)

    def _use_phone(self, tool: str, value: str) -> str:
        phrases = user_texts().phrases
        if tool == "check_settings":
            return phrases["settings"].format(settings=self.desk.settings(), signal=self.desk.signal())
        if tool == "check_signal":
            return phrases["signal"].format(signal=self.desk.signal())
        self.desk.use_phone(tool, value)
        return phrases["did"].format(signal=self.desk.signal())

    def _unhelped(self, text: str) -> str | None:
        self._num_unhelpful += 1
        return text if self._num_unhelpful < self.script.patience else None

    def _close(self) -> str | None:
        self.place += 1
        self._revealed, self._decided, self._insisted, self._num_unhelpful = {}, False, False, 0
        if self.place == len(self.script.goals):
            self.place -= 1
            return None
        return user_texts().phrases["next"].format(say=self._goal.say)


def instructed(tools: Mapping[str, UserToolSpec], text: str) -> tuple[str, str] | None:
    """Return the tool of the user that the agent asks for first, and the value to set; None if it asks for none.

    A question about a setting that names no new value asks for the settings.
    """
    if not _REQUESTS_ACTION.search(text):
        return None
    places = [(text.find(word), name) for name, spec in tools.items() for word in spec.keywords if word in text]
    if not places:
        return None
    name = min(places)[1]
    values = tools[name].values
    value = next((value for value in values if _SWITCHES.get(value, _ANY).search(text)), "")
    return (name, value) if value or not values else ("check_settings", "")


Speaker = Callable[[Sequence[Message], Sequence[Tool]], Awaitable[Message]]
"""A language model: returns the next message of a dialogue with tools."""


class ChatUser:
    """A user that is a language model, which has the phone's tools."""

    def __init__(self, speak: Speaker, script: Script, desk: Desk) -> None:
        self.texts: list[str] = []
        self._speak, self._tools = speak, phone_tools(desk.domain.name) if desk.phone else ()
        self.brief = brief_of(script, has_phone=bool(self._tools))
        start = user_texts().briefs["start"]
        self._messages = [Message(role="system", content=self.brief), Message(role="user", content=start)]

    async def opening(self) -> str:
        return await self._next() or user_texts().phrases["give_up"]

    async def reply(self, text: str) -> str | None:
        self._messages.append(Message(role="user", content=text))
        return await self._next()

    async def _next(self) -> str | None:
        for _ in range(MAX_PHONE_TURNS):
            message = await self._speak(self._messages, self._tools)
            self._messages.append(message)
            action = action_of_message(message)
            if not (action.calls or action.errors):
                text = message["content"].strip()
                self.texts.append(text)
                return text if text and STOP not in text else None
            outcomes = await ToolExecutor(self._tools).run(action)
            self._messages += map(tool_message, outcomes)
        return None


def brief_of(script: Script, *, has_phone: bool) -> str:
    """Return the instructions of a language model that plays the user."""
    briefs = user_texts().briefs
    facts: dict[str, Cell] = {name: value for goal in script.goals for name, value in goal.facts.items()}
    text = (
        briefs["customer"]
        .strip()
        .format(
            name=script.name,
            zip=script.zip,
            email=script.email,
            goals=" ".join(goal.say for goal in script.goals),
            facts=", ".join(f"{name}: {value}" for name, value in facts.items()) + ".",
            stop=STOP,
        )
    )
    return text + briefs["phone"] * has_phone


def action_of_message(message: Message) -> Action:
    """Return a message as an action; calls with invalid arguments are malformed calls."""
    calls, errors = list[ToolCall](), list[CallError]()
    for one in message.get("tool_calls", ()):
        given = one["function"]["arguments"]
        try:
            arguments = json.loads(given)
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            calls.append(ToolCall(one["id"], one["function"]["name"], arguments))
        else:
            errors.append(CallError(one["id"], given, "the arguments are not a JSON object"))
    return Action(message, tuple(calls), tuple(errors))


class _ReplyFunction(BaseModel):
    name: str
    arguments: str


class _ReplyCall(BaseModel):
    id: str
    function: _ReplyFunction


class _ReplyMessage(BaseModel):
    content: str | None = None
    tool_calls: list[_ReplyCall] | None = None


class _ReplyChoice(BaseModel):
    message: _ReplyMessage


class _ChatReply(BaseModel):
    choices: list[_ReplyChoice]


class EndpointUser:
    """A model at an OpenAI-compatible endpoint that plays users.

    `url` ends before `/chat/completions`. Raises UserError if the file of the API key cannot be read.
    """

    def __init__(self, url: str, model: str, key_file: str = "") -> None:
        token = ""
        if key_file:
            try:
                token = Path(key_file).read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"The key cannot be read from {key_file}: {error}.") from error
        self._replica = Replica(url.rstrip("/"), RemoteEngineSettings(timeout_s=120.0, token=token))
        self._model = model

    async def speak(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Message:
        """Return the next message. Raises EngineError if the endpoint fails."""
        body: dict[str, object] = {"model": self._model, "messages": list(messages), "temperature": 0.0}
        if tools:
            body["tools"] = [tool.schema for tool in tools]
        reply = await self._replica.post("/chat/completions", body, _ChatReply)
        found = reply.choices[0].message if reply.choices else _ReplyMessage()
        message = Message(role="assistant", content=found.content or "")
        if found.tool_calls:
            calls = ((one.id, one.function) for one in found.tool_calls)
            message["tool_calls"] = [tool_call(name, made.name, made.arguments) for name, made in calls]
        return message

    async def close(self) -> None:
        """Close the connections."""
        await self._replica.close()
