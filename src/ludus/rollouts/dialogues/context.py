"""Context management of an episode: when the dialogue exceeds a budget, it is rewritten and continues in a new row.

Old tool outputs are dropped, or the policy writes a summary that replaces the messages, or both. A summary is an
action, which is trained unless `train_summary` is off. The rows of an episode are one attempt
(`Trajectory.shared_reward`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ludus.config.sections.rollout import ContextConfig
from ludus.engines.base import seed_for
from ludus.envs.tool_world import summary_message
from ludus.rollouts.episode import EngineChatSession
from ludus.rollouts.trees import join_rows
from ludus.tools.base import Tool
from ludus.types import Action, Message, Segment, StopReason

DROPPED = "[output dropped]"
"""Text of a dropped tool output."""


@dataclass
class ManagedChatSession:
    """A dialogue whose context is bounded by `settings.max_tokens`; `first` is the session of the first row.

    The summary and the action after it have the same turn, so that turns remain those of the environment.
    """

    first: EngineChatSession
    settings: ContextConfig
    _chat: EngineChatSession = field(init=False)
    _rows: list[tuple[Segment, ...]] = field(init=False, default_factory=list)
    _messages: list[Message] = field(init=False, default_factory=list)
    _num_first: int = field(init=False, default=0)
    _tools: Sequence[Tool] = field(init=False, default=())
    _waiting: Sequence[Message] = field(init=False, default=())
    _turn: int = field(init=False, default=0)
    """Turn of the first action of the current row."""

    def __post_init__(self) -> None:
        self._chat = self.first

    @property
    def segments(self) -> tuple[Segment, ...]:
        rows = [*self._rows, self._numbered()]
        return tuple(join_rows([(row, 0, 0) for row in rows if row])[0])

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        self._messages, self._num_first, self._tools = list(messages), len(messages), tools
        return self._chat.open(messages, tools)

    async def act(self) -> Action | StopReason:
        """Sample a turn, after rewriting the context if the last messages exceed the budget."""
        if self._waiting:
            waiting, self._waiting = self._waiting, ()
            if (stop := await self._rewrite(waiting)) is not None:
                return stop
        action = await self._chat.act()
        if not isinstance(action, StopReason):
            self._messages.append(action.message)
        return action

    def observe(self, messages: Sequence[Message]) -> StopReason | None:
        """Append messages. If the dialogue exceeds the budget, the next turn begins with a rewritten context."""
        self._messages += messages
        if self._num_tokens(messages) <= self.settings.max_tokens:
            return self._chat.observe(messages)
        self._waiting = messages
        return None

    def close(self) -> None:
        self._chat.close()

    def _num_tokens(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens of the row with more messages."""
        before = [token for segment in self._chat.segments for token in segment.tokens]
        return len(before) + len(self._chat.renderer.observation(messages, before[-1]))

    async def _rewrite(self, waiting: Sequence[Message]) -> StopReason | None:
        """Start a row with shorter messages. Returns a stop reason if that is impossible."""
        kind = self.settings.strategy
        if kind != "summarize":
            shorter = drop_outputs(self._messages, self.settings.keep_turns)
            if kind == "drop" and shorter == self._messages:
                return self._chat.observe(waiting)
            if kind == "drop" or self._fits(shorter):
                return self._next_row(shorter)
        if (stop := self._chat.observe([*waiting, Message(role="user", content=self.settings.prompt)])) is not None:
            return stop
        summary = await self._chat.act()
        if isinstance(summary, StopReason):
            return summary
        told = summary_message(summary.message["content"])
        kept = last_turns(self._messages[self._num_first :], self.settings.keep_turns)
        return self._next_row([*self._messages[: self._num_first], told, *kept], summarized=True)

    def _fits(self, messages: Sequence[Message]) -> bool:
        return len(self._chat.renderer.prompt(messages, self._tools)) <= self.settings.max_tokens

    def _next_row(self, messages: list[Message], *, summarized: bool = False) -> StopReason | None:
        row = self._numbered()
        if summarized and not self.settings.train_summary:
            row = (*row[:-1], Segment("observation", row[-1].tokens, row[-1].turn))
        self._turn += sum(segment.kind == "action" for segment in self._chat.segments) - summarized
        self._rows.append(row)
        self._chat.close()
        number = len(self._rows)
        name, seed = f"{self.first.episode}~{number}", seed_for(self.first.seed, "context", number)
        self._chat, self._messages = replace(self.first, episode=name, seed=seed), messages
        return self._chat.open(messages, self._tools)

    def _numbered(self) -> tuple[Segment, ...]:
        return tuple(replace(segment, turn=segment.turn + self._turn) for segment in self._chat.segments)


def drop_outputs(messages: Sequence[Message], keep_turns: int) -> list[Message]:
    """Return the messages without the outputs of tools, except those of the last turns."""
    kept = len(messages) - len(last_turns(messages, keep_turns))
    shorter = []
    for i, message in enumerate(messages):
        if i < kept and message["role"] == "tool":
            message = message.copy()
            message["content"] = DROPPED
        shorter.append(message)
    return shorter


def last_turns(messages: Sequence[Message], num: int) -> list[Message]:
    """Return the last `num` assistant messages with what follows each of them."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return list(messages[turns[-num] :]) if 0 < num <= len(turns) else list(messages) if num else []
