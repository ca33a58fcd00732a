"""The SQL world: tasks, environment, demonstrations.

The mistakes in demonstrations are systematic, because random noise averages out in training: the fine-tuned model
learns an error pattern that reinforcement learning can correct.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice
from typing import Literal

from pydantic import Field

from ludus.envs.base import World, shipped_report
from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.task_archive import SPLITS
from ludus.envs.tool_env import ToolEnv, ToolLimits, describe_error
from ludus.envs.tool_world import Dialogue, assistant, split_of, tool_turn
from ludus.rewards.base import Reward, truth_of
from ludus.rewards.code.turns import TurnVerifier
from ludus.rewards.exact_match import well_formed
from ludus.rewards.shaping import citation_support, either, only_if
from ludus.tools.base import Tool
from ludus.tools.sql import Database, SqlError, SqlLimits, schema_tool, sql_tool
from ludus.types import JSON, Message, Task
from ludus.worlds.sql.grader import SqlTruth, gold_rows_found, make_truth, paraphrases, result_set, shown_rows, was_run
from ludus.worlds.sql.questions import DOMAINS, NUM_DATABASES, DatabasePair, Domain, SqlQuestion, pairs, questions

SYSTEM = {
    "tool": "Answer the question about the database. See its tables with schema, try queries with sql.",
    "none": "Answer the question about the database without looking at it.",
}
ANSWER_PROMPTS = {
    "query": "Answer with one SQLite query that gives this, columns in this order, nothing rounded.",
    "value": "Answer with the value alone, numbers to two decimals.",
}


class SqlSettings(WorldSettings):
    """Settings of the SQL world (`env.settings`)."""

    levels: tuple[Literal[1, 2, 3, 4, 5], ...] = Field((1, 2, 3, 4, 5), min_length=1)
    """Levels of the questions: 1 is one table and one condition, 5 joins, nested queries, ranks."""
    domains: tuple[Domain, ...] = Field(DOMAINS, min_length=1)
    """Domains of the databases."""
    databases: int = Field(2, ge=1, le=NUM_DATABASES)
    """Number of databases of each domain, which differ in names and rows."""
    vary_names: bool = True
    """Whether databases name their tables and columns differently from the questions."""
    tasks: int = Field(600, ge=10)
    """Number of tasks of all splits together; fewer if the data has no more that fit."""
    per_shape: int = Field(1, ge=1)
    """Maximum number of tasks whose gold queries differ only in identifiers, texts and numbers."""
    unseen: Literal["shapes", "questions"] = "shapes"
    """Part of a task that is new in validation and test; the shapes of `composition` are always unseen."""
    answers: Literal["query", "value", "both"] = "both"
    """Form of the answers: a query, a value (only questions that have one), or either by task."""
    access: Literal["tool", "none"] = "tool"
    """`none`: no tools."""
    rows: int = Field(20, ge=1, le=200)
    """Maximum number of rows in an output of `sql`."""
    omit_condition: float = Field(0.4, ge=0, le=1)
    """Fraction of demonstrations that omit a condition or the order from the query."""
    well_formed_weight: float = Field(0.1, ge=0, lt=0.5)
    """Weight of an episode without a failed call whose answer is right, was run, or is the output of a call.
    `result_set` has 1."""
    seed: int = 0
    """Seed of the selection (other than 0: shuffled questions) and of the demonstrations."""


@dataclass(frozen=True, slots=True)
class SqlFlaws:
    """Probabilities of the mistakes of the solver."""

    omit_condition: float = 0.4
    """Omit a condition or the order from the query."""
    skip_schema: float = 0.15
    """If the answer is a query: write it without reading the schema, with the names in the question."""
    misspell_name: float = 0.15
    """First misspell a name, then correct the query after the error. The wrong call is excluded from the loss."""


def solve(question: SqlQuestion, tools: tuple[Tool, Tool], flaws: SqlFlaws, rng: random.Random) -> list[Message]:
    """Return the messages after the question of a solution with `schema` and `sql`, mistakes included."""
    schema, sql = tools
    query, plain = question.data["queries"]
    if rng.random() < flaws.omit_condition and question.data["forgetful"]:
        query, plain = rng.choice(question.data["forgetful"])
    if question.kind == "query" and rng.random() < flaws.skip_schema:
        return [assistant(plain)]
    messages = list(_call(schema, {}, "Look at the tables.", 0))
    if rng.random() < flaws.misspell_name:
        call, output = _call(sql, {"query": _misspelled(query, question, rng)}, "Run the query.", 1)
        messages += [Message({**call, "train": False}), output]
    messages += _call(sql, {"query": query}, "Run the query.", len(messages))
    return [*messages, assistant(query if question.kind == "query" else messages[-1]["content"].split("\n")[1])]


def _call(tool: Tool, arguments: Mapping[str, JSON], thought: str, turn: int) -> tuple[Message, Message]:
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


@dataclass(frozen=True)
class SqlWorld(World):
    """Questions about small databases."""

    settings: SqlSettings = field(default_factory=SqlSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    name: str = "sql"
    splits: Sequence[str] = SPLITS

    @cached_property
    def questions(self) -> Mapping[str, Sequence[SqlQuestion]]:
        """The questions of each split. They contain the truth and must not reach an environment."""
        return questions(self.settings)

    @property
    def pairs(self) -> Mapping[str, DatabasePair]:
        """The databases by key."""
        return pairs(tuple(dict.fromkeys(self.settings.domains)), self.settings.databases, not self.settings.vary_names)

    @cached_property
    def rewards(self) -> tuple[Reward, ...]:
        """The outcome compares the rows on both databases; the comparison on the shown one is reported only."""
        form = only_if(well_formed, either(was_run, citation_support, result_set))
        return (
            Reward("result_set", result_set, weight=1.0, outcome=True),
            Reward("shown_rows", shown_rows, weight=0.0),
            Reward("well_formed", form, weight=self.settings.well_formed_weight),
        )

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        """Verifier of the milestone, a query with the gold rows; None without tools."""
        return gold_rows_found if self.settings.access == "tool" else None

    @cached_property
    def _task_lists(self) -> Mapping[str, Sequence[Task]]:
        return {split: [self._task(q, split) for q in found] for split, found in self.questions.items()}

    def tasks(self, split: str) -> Sequence[Task]:
        return split_of(self._task_lists, split, self.name)

    def environment(self, task: Task) -> ToolEnv:
        tools = self.tools(task.tags["database"]) if self.settings.access == "tool" else ()
        return ToolEnv(tools, self.rewards, self.limits)

    def tools(self, database: str) -> tuple[Tool, Tool]:
        """Return the stateless tools `schema` and `sql` of a database."""
        return _tools(self.pairs[database].image, self.settings.rows)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        rng = random.Random(f"demonstrations:{self.settings.seed}:{seed}")
        flaws = SqlFlaws(omit_condition=self.settings.omit_condition)
        while True:
            yield self._dialogue(rng.choice(self.questions["train"]), flaws, rng)

    def expert(self, task: Task) -> Dialogue | None:
        """Return a dialogue of the expert without flaws; None for a task of another world, or without tools."""
        found = self.questions.get(task.tags.get("split", ""), ())
        question = next((one for one in found if one.id == task.id), None)
        if question is None or self.settings.access != "tool":
            return None
        return self._dialogue(question, SqlFlaws(0.0, 0.0, 0.0), random.Random(task.id))

    def difficulty_report(self) -> str:
        return shipped_report(self, self.settings == SqlSettings())

    def paraphrases(self, task: Task) -> Sequence[str]:
        """Return other queries with the same rows, or the value in other notations."""
        return paraphrases(truth_of(task, SqlTruth))

    def texts(self) -> Iterator[str]:
        """Yield descriptions of the databases, then dialogues as text, to train a tokenizer on."""
        for pair in self.pairs.values():
            yield Database(pair.image).describe()
        for dialogue in islice(self.demonstrations(seed=0), self.num_text_dialogues):
            yield from dialogue.texts()

    def _dialogue(self, question: SqlQuestion, flaws: SqlFlaws, rng: random.Random) -> Dialogue:
        tools = self.tools(question.pair.key)
        return Dialogue((*self._opening(question), *solve(question, tools, flaws, rng)), tools)

    def _task(self, question: SqlQuestion, split: str) -> Task:
        tags = {"split": split, "family": f"level {question.level}"}
        tags |= {"answer": question.kind, "database": question.pair.key}
        return Task(question.id, self._opening(question), make_truth(question), tags)

    def _opening(self, question: SqlQuestion) -> tuple[Message, ...]:
        asked = f"{question.data['text']}\n{ANSWER_PROMPTS[question.kind]}"
        system = SYSTEM[self.settings.access]
        return Message(role="system", content=system), Message(role="user", content=asked)


@cache
def _tools(image: bytes, rows: int) -> tuple[Tool, Tool]:
    shown = Database(image, limits=SqlLimits(rows=rows))
    return schema_tool(shown), sql_tool(shown)


def make_sql_world(settings: Mapping[str, object], limits: ToolLimits) -> SqlWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    return SqlWorld(read_settings(SqlSettings, settings), limits)
