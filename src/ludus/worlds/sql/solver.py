"""Demonstrations: look at the tables, run a query, give it or its value as the answer.

The flaws are systematic, because noise averages out in training: the model is to learn a habit that falls
short, so that reinforcement has something to mend.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ludus.envs.toolbox import describe_error
from ludus.tools.base import Tool
from ludus.tools.sql import SqlError
from ludus.types import JSON, FunctionCall, Message, MessageToolCall
from ludus.worlds.sql.data import make_naming
from ludus.worlds.sql.query import QueryPlan
from ludus.worlds.sql.render import to_sql
from ludus.worlds.sql.tasks import SqlQuestion


@dataclass(frozen=True, slots=True)
class SqlFlaws:
    """How often the expert goes wrong, as probabilities."""

    forget: float = 0.4
    """Leave a condition or the order out of the query."""
    blind: float = 0.15
    """Where a query is asked for: write it without a look at the tables, with the names of the question."""
    slip: float = 0.15
    """First misspell a name, read the error, and mend the query. The wrong call does not train."""


@dataclass(frozen=True)
class SqlSolver:
    """Writes the messages that follow a question, with the tools of its database."""

    schema: Tool
    sql: Tool
    flaws: SqlFlaws

    def messages(self, question: SqlQuestion, rng: random.Random) -> list[Message]:
        """One dialogue."""
        plan = question.plan
        if rng.random() < self.flaws.forget:
            plan = forgetful(plan, rng)
        if question.kind == "query" and rng.random() < self.flaws.blind:
            return [_answer(blind_query(plan))]
        query = to_sql(plan, question.pair.naming)
        played = list(self._call(self.schema, {}, "Look at the tables.", 0))
        if rng.random() < self.flaws.slip:
            wrong = self._misspelt(query, question, rng)
            said, told = self._call(self.sql, {"query": wrong}, "Run the query.", 1)
            played += [Message({**said, "train": False}), told]
        played += self._call(self.sql, {"query": query}, "Run the query.", len(played))
        if question.kind == "query":
            return [*played, _answer(query)]
        return [*played, _answer(played[-1]["content"].split("\n")[1])]

    def _misspelt(self, query: str, question: SqlQuestion, rng: random.Random) -> str:
        """The query with the last letter of a column doubled, or of its first word missing."""
        words = set(re.findall(r"\w+", query))
        columns = sorted(words & set(question.pair.naming.columns.values()))
        if not columns:
            return query.replace("SELECT", "SELEC", 1)
        name = rng.choice(columns)
        return re.sub(rf"\b{name}\b", name + name[-1], query)

    def _call(self, tool: Tool, arguments: Mapping[str, JSON], thought: str, turn: int) -> Iterator[Message]:
        function = FunctionCall(name=tool.name, arguments=json.dumps(dict(arguments), ensure_ascii=False))
        call = MessageToolCall(id=f"call_{turn}_0", type="function", function=function)
        yield Message(role="assistant", content="", reasoning_content=thought, tool_calls=[call])
        try:
            told = str(tool.function(**arguments))
        except SqlError as error:
            told = f"Error: {describe_error(error)}"
        yield Message(role="tool", content=told, tool_call_id=call["id"], name=tool.name)


def _answer(text: str) -> Message:
    return Message(role="assistant", content=text)


def forgetful(plan: QueryPlan, rng: random.Random) -> QueryPlan:
    """The plan without one of its conditions, or without its order; as it is where it has neither."""
    parts = [*range(len(plan.conditions)), *([-1] if plan.order else [])]
    if not parts:
        return plan
    part = rng.choice(parts)
    if part < 0:
        return replace(plan, order=None)
    return replace(plan, conditions=plan.conditions[:part] + plan.conditions[part + 1 :])


def blind_query(plan: QueryPlan) -> str:
    """The query of somebody who understands the question and has not looked at the database."""
    return to_sql(plan, make_naming(plan.domain))
