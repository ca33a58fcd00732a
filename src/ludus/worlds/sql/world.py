"""The SQL world: tasks, environment, demonstrations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ludus.envs.base import World
from ludus.envs.settings import read_settings
from ludus.envs.tool_env import ToolEnv
from ludus.envs.tool_world import Dialogue, split_of
from ludus.envs.toolbox import ToolLimits
from ludus.rewards.base import Reward, truth_of
from ludus.rewards.code.turns import TurnVerifier
from ludus.rewards.exact_match import well_formed
from ludus.rewards.shaping import citation_support, either, only_if
from ludus.tools.base import Tool
from ludus.tools.sql import Database, SqlLimits, schema_tool, sql_tool
from ludus.types import Message, Task
from ludus.worlds.sql.data import DataPair, make_pair
from ludus.worlds.sql.domains import domain
from ludus.worlds.sql.grader import SqlTruth, gold_rows_found, make_truth, other_words, result_set, shown_rows, was_run
from ludus.worlds.sql.solver import SqlFlaws, SqlSolver
from ludus.worlds.sql.tasks import SPLITS, SqlQuestion, SqlQuota, compose

SYSTEM = {
    "tool": "Answer the question about the database. See its tables with schema, try queries with sql.",
    "none": "Answer the question about the database without looking at it.",
}
ASKED = {
    "query": "Answer with one SQLite query that gives this, columns in this order, nothing rounded.",
    "value": "Answer with the value alone, numbers to two decimals.",
}
Topic = Literal["shop", "library", "clinic", "flights", "school", "cinema"]
TOPICS: tuple[Topic, ...] = ("shop", "library", "clinic", "flights", "school", "cinema")


class SqlSettings(BaseModel):
    """Settings of the SQL world (`env.settings`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    levels: tuple[Literal[1, 2, 3, 4, 5], ...] = Field((1, 2, 3, 4, 5), min_length=1)
    """Of the questions: 1 is one table and one condition, 5 joins, nested queries, ranks."""
    domains: tuple[Topic, ...] = Field(TOPICS, min_length=1)
    """What the databases are about."""
    databases: int = Field(2, ge=1, le=50)
    """Of each domain, with names and rows of their own."""
    vary_names: bool = True
    """Whether databases call their tables and columns otherwise than the question does."""
    tasks: int = Field(600, ge=10)
    """Of all splits together. Fewer come where the shapes run out."""
    per_shape: int = Field(1, ge=1)
    """Tasks with the same gold query but for identifiers, texts and numbers."""
    unseen: Literal["shapes", "questions"] = "shapes"
    """What validation and test do not share with training; `composition` always has shapes of its own."""
    answers: Literal["query", "value", "both"] = "both"
    """What an answer is: a query, the value where there is one, or by task."""
    access: Literal["tool", "none"] = "tool"
    """`none`: no tools."""
    rows: int = Field(20, ge=1, le=200)
    """Rows that `sql` shows."""
    forget: float = Field(0.4, ge=0, le=1)
    """Share of the demonstrations that leave out a part of the question."""
    well_formed_weight: float = Field(0.1, ge=0, lt=0.5)
    """Of an episode without a failed call whose answer a call ran or gave, or is right, which weighs 1."""
    seed: int = 0


@dataclass(frozen=True)
class SqlWorld(World):
    """Questions over small databases."""

    settings: SqlSettings = field(default_factory=SqlSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    name: str = "sql"
    splits: Sequence[str] = SPLITS
    _tools: dict[str, tuple[Tool, Tool]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def questions(self) -> Mapping[str, Sequence[SqlQuestion]]:
        """The questions of each split. They hold the truth: not for an environment."""
        return _questions(self.settings)

    @cached_property
    def rewards(self) -> tuple[Reward, ...]:
        """The rows on both databases decide; those on the shown one are reported."""
        return (
            Reward("result_set", result_set, weight=1.0, outcome=True),
            Reward("shown_rows", shown_rows, weight=0.0),
            Reward(
                "well_formed",
                only_if(well_formed, either(was_run, citation_support, result_set)),
                weight=self.settings.well_formed_weight,
            ),
        )

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        """The milestone is a query that gives the gold rows; without tools there is no verifier."""
        return gold_rows_found if self.settings.access == "tool" else None

    @cached_property
    def _task_lists(self) -> Mapping[str, Sequence[Task]]:
        return {split: [self._task(q, split) for q in found] for split, found in self.questions.items()}

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, levels mixed, in a fixed order."""
        return split_of(self._task_lists, split, self.name)

    def environment(self, task: Task) -> ToolEnv:
        """A fresh episode, on a copy of the task's database. The hidden one is not there."""
        tools = self.tools(task.tags["database"]) if self.settings.access == "tool" else ()
        return ToolEnv(tools, self.rewards, self.limits)

    def tools(self, database: str) -> tuple[Tool, Tool]:
        """`schema` and `sql` on a database. They keep no state."""
        if database not in self._tools:
            pair = next(pair for pair in _pairs(self.settings) if pair.key == database)
            shown = Database(pair.image, limits=SqlLimits(rows=self.settings.rows))
            self._tools[database] = schema_tool(shown), sql_tool(shown)
        return self._tools[database]

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """An endless stream by the flawed expert on training tasks."""
        rng = random.Random(f"demonstrations:{self.settings.seed}:{seed}")
        flaws = SqlFlaws(forget=self.settings.forget)
        while True:
            yield self._dialogue(rng.choice(self.questions["train"]), flaws, rng)

    def expert(self, task: Task) -> Dialogue | None:
        """The expert without its flaws; None for a task of another world, or without tools."""
        found = self.questions.get(task.tags.get("split", ""), ())
        question = next((one for one in found if one.id == task.id), None)
        if question is None or self.settings.access != "tool":
            return None
        return self._dialogue(question, SqlFlaws(0.0, 0.0, 0.0), random.Random(task.id))

    def difficulty_report(self) -> str:
        """How many questions differ, and what is solved without skill."""
        from ludus.worlds.sql.difficulty_report import report

        return report(self)

    def paraphrases(self, task: Task) -> Sequence[str]:
        """Another query with the same rows, or the value in another writing."""
        return other_words(truth_of(task, SqlTruth))

    def texts(self) -> Iterator[str]:
        """Descriptions of the databases, then dialogues as text: what the tokenizer is trained on."""
        for pair in _pairs(self.settings):
            yield Database(pair.image).describe()
        for dialogue, _ in zip(self.demonstrations(seed=0), range(2_000), strict=False):
            for message in dialogue.messages:
                yield message["content"]
                for call in message.get("tool_calls", []):
                    function = call["function"]
                    yield f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'

    def _dialogue(self, question: SqlQuestion, flaws: SqlFlaws, rng: random.Random) -> Dialogue:
        tools = self.tools(question.pair.key)
        return Dialogue((*self._opening(question), *SqlSolver(*tools, flaws).messages(question, rng)), tools)

    def _task(self, question: SqlQuestion, split: str) -> Task:
        tags = {
            "split": split,
            "family": f"level {question.level}",
            "answer": question.kind,
            "database": question.pair.key,
        }
        return Task(question.id, self._opening(question), make_truth(question), tags)

    def _opening(self, question: SqlQuestion) -> tuple[Message, ...]:
        asked = f"{question.text}\n{ASKED[question.kind]}"
        system = SYSTEM[self.settings.access]
        return Message(role="system", content=system), Message(role="user", content=asked)


@cache
def _pairs(settings: SqlSettings) -> tuple[DataPair, ...]:
    """The databases, made once in a process."""
    names, numbers = dict.fromkeys(settings.domains), range(settings.databases)
    return tuple(
        make_pair(domain(name), number, settings.seed, settings.vary_names) for name in names for number in numbers
    )


@cache
def _questions(settings: SqlSettings) -> Mapping[str, Sequence[SqlQuestion]]:
    """The questions of each split, composed once in a process."""
    wanted = SqlQuota(
        tuple(dict.fromkeys(settings.levels)),
        settings.tasks,
        settings.per_shape,
        settings.answers,
        settings.seed,
        settings.unseen == "shapes",
    )
    return compose(_pairs(settings), wanted)


def make_sql_world(settings: Mapping[str, object], limits: ToolLimits) -> SqlWorld:
    """The factory by which the world is registered. Raises ConfigError for settings that do not fit."""
    return SqlWorld(read_settings(SqlSettings, settings), limits)
