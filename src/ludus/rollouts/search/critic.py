"""Self-critique: the model ranks candidates, in two opposite orders whose ranks are averaged.

Averaging over both orders removes a preference for the first or last place. An answer without numbers, or a question
that does not fit into the context, counts as no ranking.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ludus.rollouts.episode import ChatSession, EngineChatSession
from ludus.rollouts.search.tree import rank_scores
from ludus.types import Message, StopReason

QUESTION = """A dialogue with an assistant:

{context}

Candidates for {what}:

{candidates}

Rank the candidates from the best to the worst for solving the task. Answer only with their numbers, the best first, \
for example: 2 1"""


def parse_ranking(text: str, num: int) -> list[int]:
    """Return the candidates (from 0) in the order of the numbers from 1 to `num` in the last line that has any."""
    for line in reversed(text.splitlines()):
        numbers = [int(found) - 1 for found in re.findall(r"(?<!\d)\d{1,3}(?!\d)", line)]
        if ranking := list(dict.fromkeys(number for number in numbers if 0 <= number < num)):
            return ranking
    return []


def token_session(session: ChatSession) -> EngineChatSession:
    """Return a session with tokens, which a search needs."""
    assert isinstance(session, EngineChatSession)  # `check_search` rejects other ones
    return session


@dataclass
class SelfCritique:
    """Rankings by the model with sessions of `make_chat`, greedily, with at most `max_tokens` tokens each."""

    make_chat: Callable[[], ChatSession]
    max_tokens: int
    num_tokens: int = field(default=0, init=False)
    num_rankings: int = field(default=0, init=False)
    num_unparsed: int = field(default=0, init=False)

    async def scores(self, context: str, what: str, candidates: Sequence[str]) -> list[float]:
        """Return the `rank_scores` of candidates for `what` (such as "its next turn") after a dialogue."""
        if len(candidates) < 2:
            return [0.5] * len(candidates)
        order = list(range(len(candidates)))
        rankings = [
            [shown[place] for place in await self._rank(context, what, [candidates[i] for i in shown])]
            for shown in (order, order[::-1])
        ]
        self.num_rankings += len(rankings)
        self.num_unparsed += sum(not ranking for ranking in rankings)
        return rank_scores([ranking for ranking in rankings if ranking], len(candidates))

    async def _rank(self, context: str, what: str, candidates: Sequence[str]) -> list[int]:
        listed = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(candidates, start=1))
        question = QUESTION.format(context=context, what=what, candidates=listed)
        session = token_session(self.make_chat())
        params = replace(session.params, temperature=0.0, max_new_tokens=self.max_tokens)
        session = replace(session, params=params, guided=False, episode=f"{session.episode}~critic")
        try:
            if session.open([Message(role="user", content=question)], ()) is not None:
                return []
            reply = await session.act()
            self.num_tokens += sum(len(one.tokens) for one in session.segments if one.kind == "action")
            return [] if isinstance(reply, StopReason) else parse_ranking(reply.message["content"], len(candidates))
        finally:
            session.close()
