"""A person and a model in dialogue, with the world's tools: the engine of `ludus chat`.

Takes questions, one at a time. Gives the model's turns and the tools' answers to `on_part` as they happen.
Waits for the model at most `rollout.max_turns` turns a question. The exact tokens are kept from question to
question, as in an episode. Where no room is left, or an action was cut off, the next question begins a new
dialogue.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from ludus.cli.ui.load_run import LoadedRun
from ludus.cli.ui.transcripts import calls, outcome_text
from ludus.envs.base import Environment
from ludus.envs.toolbox import describe_error
from ludus.errors import LudusError, WorldError
from ludus.rollout.chat_session import EngineChatSession
from ludus.rollout.scheduler import sampling_params
from ludus.types import Action, Message, StopReason, Task, ToolOutcome

Result = TypeVar("Result")
PartKind = Literal["thinking", "call", "malformed call", "tool", "answer", "text", "end"]


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """Something to show: what kind it is, and its text."""

    kind: PartKind
    text: str


OnPart = Callable[[ReplyPart], None]

_ENDS = {
    StopReason.PROMPT_TOO_LONG: "The question does not fit into the model's context.",
    StopReason.MAX_TOKENS: "The dialogue is full (rollout.max_seq_len).",
    StopReason.TRUNCATED: "The model was cut off (rollout.max_tokens_per_turn).",
    StopReason.MAX_TURNS: "No answer after as many turns as rollout.max_turns allows.",
    StopReason.EMPTY_ANSWER: "The model said nothing.",
}
_FINAL = (StopReason.PROMPT_TOO_LONG, StopReason.MAX_TOKENS, StopReason.TRUNCATED)
"""After these the tokens so far cannot be continued."""


@dataclass
class ChatRepl:
    """One dialogue after another with one engine. `temperature` 0 is greedy."""

    opened: LoadedRun
    temperature: float
    _number: int = field(init=False, default=0)
    _conversation: EngineChatSession | None = field(init=False, default=None)
    _unseen: list[Message] = field(init=False, default_factory=list)

    @property
    def is_new(self) -> bool:
        """Whether the next question begins a dialogue."""
        return self._conversation is None

    def restart(self) -> None:
        """Forget the dialogue; the next question begins another."""
        if self._conversation is not None:
            self._conversation.close()
        self._conversation = None
        self._unseen = []

    async def ask(self, question: str, on_part: OnPart) -> None:
        """Put a question and play until the answer. Raises EngineError and WorldError as an episode does."""
        session = self.opened.session
        opening = session.world.opening(question)
        task = Task("chat", tuple(opening), None)
        environment = session.world.environment(task)
        try:
            messages = await _world("start", environment.start(task))
            conversation = self._conversation or self._begin()
            stop = self._show(conversation, messages, environment)
            stop = stop or await self._play(conversation, environment, on_part)
        finally:
            await _world("close", environment.close())
        if stop is not StopReason.ANSWERED:
            on_part(ReplyPart("end", _ENDS[stop]))
        if stop in _FINAL:
            self.restart()

    def _show(
        self, conversation: EngineChatSession, messages: Sequence[Message], environment: Environment
    ) -> StopReason | None:
        """Show a question: the whole opening in a new dialogue, what the user says in one that goes on."""
        if self._conversation is None:
            self._conversation = conversation
            return conversation.open(messages, environment.tools)
        said = [message for message in messages if message["role"] != "system"]
        unseen, self._unseen = self._unseen, []
        return conversation.observe([*unseen, *said])

    def _begin(self) -> EngineChatSession:
        self._number += 1
        session = self.opened.session
        rollout = session.config.rollout
        return EngineChatSession(
            engine=self.opened.engine,
            renderer=session.renderer,
            params=sampling_params(rollout, self.temperature),
            max_tokens=rollout.max_seq_len,
            episode=f"chat/{self._number}",
            seed=session.config.run.seed + self._number,
        )

    async def _play(self, conversation: EngineChatSession, environment: Environment, on_part: OnPart) -> StopReason:
        """Turns of the model and answers of the tools."""
        turns = self.opened.session.config.rollout.max_turns
        for turn in range(1, turns + 1):
            action = await conversation.act()
            if isinstance(action, StopReason):
                return action
            for part in parts_of(action):
                on_part(part)
            if action.finish_reason == "length":
                return StopReason.TRUNCATED
            if not (action.calls or action.errors or action.message["content"].strip()):
                return StopReason.EMPTY_ANSWER
            result = await _world("step", environment.step(action))
            for part in map(tool_part, result.outcomes):
                on_part(part)
            if result.done:
                return StopReason.ANSWERED
            if turn == turns:
                self._unseen = list(result.messages)
            elif (stop := conversation.observe(result.messages)) is not None:
                return stop
        return StopReason.MAX_TURNS


async def _world(what: str, work: Awaitable[Result]) -> Result:
    """Wait for the environment; whatever it raises is a WorldError with its own words."""
    try:
        return await work
    except LudusError:
        raise
    except Exception as error:  # boundary: foreign code; the cause travels in the message
        raise WorldError(f"The environment's {what} raised {describe_error(error)}") from error


def parts_of(action: Action) -> Iterator[ReplyPart]:
    """What the model did in one turn."""
    thought = action.message.get("reasoning_content", "")
    if thought:
        yield ReplyPart("thinking", thought)
    said = action.message["content"]
    for error in action.errors:
        said = said.replace(error.text, "")
    if said := said.strip():
        unfinished = action.calls or action.errors or action.finish_reason == "length"
        yield ReplyPart("text" if unfinished else "answer", said)
    for call in calls(action.message):
        yield ReplyPart("call", call)
    for error in action.errors:
        yield ReplyPart("malformed call", error.text)


def tool_part(outcome: ToolOutcome) -> ReplyPart:
    """A tool's answer."""
    return ReplyPart("tool", outcome_text(outcome))
