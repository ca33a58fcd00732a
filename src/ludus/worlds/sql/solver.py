"""Demonstrations: look at the tables, run a query, answer with the query or its value.

The mistakes are systematic, because random noise averages out in training: the fine-tuned model learns an error
pattern that reinforcement learning can correct.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ludus.envs.messages import assistant, tool_turn
from ludus.envs.tool_env import describe_error
from ludus.tools.base import Tool
from ludus.tools.sql import SqlError
from ludus.types import JSON, Message
from ludus.worlds.sql.questions import SqlQuestion


@dataclass(frozen=True, slots=True)
class SqlFlaws:
    """Probabilities of the mistakes of the solver."""

    omit_condition: float = 0.4
    """Omit a condition or the order from the query."""
    skip_schema: float = 0.15
    """If the answer is a query: write it without reading the schema, with the names in the question."""
    misspell_name: float = 0.15
    """First misspell a name, then correct the query after the error. The wrong call is excluded from the loss."""


@dataclass(frozen=True)
class SqlSolver:
    """Scripted policy that solves a question with the tools of its database."""

    schema: Tool
    sql: Tool
    flaws: SqlFlaws

    def messages(self, question: SqlQuestion, rng: random.Random) -> list[Message]:
        """Return the messages after the question, mistakes included."""
        query, plain = question.data["queries"]
        if rng.random() < self.flaws.omit_condition and question.data["forgetful"]:
            query, plain = rng.choice(question.data["forgetful"])
        if question.kind == "query" and rng.random() < self.flaws.skip_schema:
            return [assistant(plain)]
        messages = list(self._call(self.schema, {}, "Look at the tables.", 0))
        if rng.random() < self.flaws.misspell_name:
            wrong = _misspelled(query, question, rng)
            call, output = self._call(self.sql, {"query": wrong}, "Run the query.", 1)
            messages += [Message({**call, "train": False}), output]
        messages += self._call(self.sql, {"query": query}, "Run the query.", len(messages))
        if question.kind == "query":
            return [*messages, assistant(query)]
        return [*messages, assistant(messages[-1]["content"].split("\n")[1])]

    def _call(self, tool: Tool, arguments: Mapping[str, JSON], thought: str, turn: int) -> tuple[Message, Message]:
        try:
            output = str(tool.function(**arguments))
        except SqlError as error:
            output = f"Error: {describe_error(error)}"
        return tool_turn(turn, tool.name, arguments, output, reasoning=thought)


def _misspelled(query: str, question: SqlQuestion, rng: random.Random) -> str:
    """Return the query with the last letter of a column doubled, or with SELECT misspelled if it names none."""
    columns = sorted(set(re.findall(r"\w+", query)) & question.pair.columns)
    if not columns:
        return query.replace("SELECT", "SELEC", 1)
    name = rng.choice(columns)
    return re.sub(rf"\b{name}\b", name + name[-1], query)
