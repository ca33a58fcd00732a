"""The archive world: a count over more documents than fit into the context of a small model.

A task asks how many items are missing. The tool `read` returns one document, which names an item, its state and the
number of the next document; the documents are read one after another, up to 300 of them. Each call begins with the
count so far. Demonstrations are the rows of episodes with `rollout.context`: dialogues that end with a summary, begin
with one, or both. Their flaws are systematic: most summaries of a count above one are too low, and some rows answer
early.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from pydantic import Field

from ludus.config.sections.rollout import ContextConfig
from ludus.envs.base import World
from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.envs.tool_world import Dialogue, assistant, split_of, summary_message, tool_turn
from ludus.rewards.base import Reward, truth_of
from ludus.rewards.exact_match import ExpectedAnswers, strict_match
from ludus.tools.base import Tool, ToolError, Traits, tool
from ludus.types import Message, Task

SPLITS = {"train": 0.5, "validation": 0.2, "test": 0.3}
ASKED, OTHERS = "missing", ("present", "lent", "sold", "broken")
"""States of items: the one that tasks ask for, and the others."""
ITEMS = (
    *("anchor", "barrel", "candle", "drum", "engine", "flute", "globe", "hammer", "icon", "jar", "kettle", "lamp"),
    *("mirror", "needle", "oven", "piano", "quilt", "rope", "saddle", "tent", "umbrella", "vase", "wheel", "yoke"),
)
COUNTS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")


class ArchiveSettings(WorldSettings):
    """Settings of the archive world (`env.settings`)."""

    num_documents: int = Field(50, ge=12, le=300)
    """Documents of a task."""
    longest: int = Field(300, ge=12, le=300)
    """Largest number of documents in demonstrations: half of them have `num_documents`, the others any number up to
    this one."""
    most_items: int = Field(4, ge=1, le=len(COUNTS) - 1)
    """Largest number of missing items in a task; the smallest is 0."""
    row_documents: int = Field(10, ge=2)
    """Largest number of documents in a row of a demonstration."""
    miscount: float = Field(0.65, ge=0, le=1)
    """Fraction of the summaries in demonstrations, of those of two items or more, that state one item less."""
    stop_early: float = Field(0.02, ge=0, le=1)
    """Fraction of the rows in demonstrations that end with an answer before the last document."""
    num_tasks: int = Field(1200, ge=10)
    """Tasks of all splits together."""
    seed: int = 0


@dataclass(frozen=True)
class Archive(ExpectedAnswers):
    """Documents, and the number of missing items as the answer."""

    documents: tuple[str, ...]

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The question."""
        asked = f"How many items are {ASKED}? Read the documents 1 to {len(self.documents)}, one after another."
        return (Message(role="user", content=asked),)

    def turns(self, start: int, end: int, count: int) -> Iterator[Message]:
        """Yield calls and outputs for the documents after number `start` up to number `end`.

        `count` is the number of missing items up to number `start`.
        """
        for number in range(start + 1, end + 1):
            note = COUNTS[count + self.count(start, number - 1)]
            yield from tool_turn(number, "read", {"number": number}, self.documents[number - 1], content=note)

    def count(self, start: int, end: int) -> int:
        """Return the number of missing items in the documents after number `start` up to number `end`."""
        return sum(f": {ASKED}\n" in document for document in self.documents[start:end])


def make_archive(name: str, num_documents: int, most_items: int) -> Archive:
    """Return the archive that a name determines."""
    rng = random.Random(f"archive:{name}")
    places = set(rng.sample(range(num_documents), rng.randint(0, most_items)))
    states = [ASKED if place in places else rng.choice(OTHERS) for place in range(num_documents)]
    ends = [*(f"next: {number}" for number in range(2, num_documents + 1)), "This is the last document."]
    documents = (f"{rng.choice(ITEMS)}: {state}\n{end}" for state, end in zip(states, ends, strict=True))
    return Archive((COUNTS[len(places)],), tuple(documents))


def read_tool(documents: Sequence[str]) -> Tool:
    """Return the tool that reads these documents."""

    @tool(traits=Traits(latency="instant"))
    async def read(number: int) -> str:
        """Read a document."""
        if not 1 <= number <= len(documents):
            raise ToolError(f"Document {number} does not exist.")
        return documents[number - 1]

    return read


REWARDS = (Reward("exact_match", strict_match, outcome=True),)


@dataclass(frozen=True)
class ArchiveWorld(World):
    """Questions about the documents of archives."""

    task_lists: Mapping[str, Sequence[Task]]
    settings: ArchiveSettings
    limits: ToolLimits
    name: str = "archive"
    splits: Sequence[str] = tuple(SPLITS)
    rewards: Sequence[Reward] = REWARDS

    def tasks(self, split: str) -> Sequence[Task]:
        return split_of(self.task_lists, split, self.name)

    def environment(self, task: Task) -> ToolEnv:
        return ToolEnv((read_tool(truth_of(task, Archive).documents),), self.rewards, self.limits)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield rows of flawed episodes on archives that occur in no split, one row of each."""
        rng, settings = random.Random(f"{settings_seed(self.settings)}/{seed}/show"), self.settings
        while True:
            other = rng.randint(12, settings.longest)
            num = rng.choice((settings.num_documents, other))
            archive = make_archive(f"show/{rng.random()}", num, len(COUNTS) - 1)
            rows = rows_of(archive, row_ends(num, rng, settings.row_documents), rng, settings)
            yield Dialogue(tuple(rng.choice(rows)), (read_tool(()),))

    def expert(self, task: Task) -> Dialogue:
        """Return the episode that reads all documents in one row."""
        archive = truth_of(task, Archive)
        turns = archive.turns(0, len(archive.documents), 0)
        return Dialogue((*task.prompt, *turns, assistant(archive.accepted[0])), (read_tool(()),))

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        """Return an answer with all counts."""
        return {"every count": [assistant(" ".join(COUNTS))]}

    def texts(self) -> Iterator[str]:
        """Yield demonstrations as text, to train a tokenizer on."""
        for dialogue in islice(self.demonstrations(seed=0), self.num_text_dialogues):
            yield from (f"{one.name}(number: integer) {one.description}" for one in dialogue.tools)
            yield from dialogue.texts()


def row_ends(num_documents: int, rng: random.Random, most: int) -> list[int]:
    """Return the last document of each row, for rows of 1 to `most` documents.

    As often as by chance, the last row has no document: the one before it had room for the last document only.
    """
    ends = [0]
    while ends[-1] < num_documents:
        ends.append(min(ends[-1] + rng.randint(1, most), num_documents))
    return ends[1:] + [num_documents] * (rng.random() < 1 / most)


def rows_of(
    archive: Archive, ends: Sequence[int], rng: random.Random, settings: ArchiveSettings
) -> list[list[Message]]:
    """Return the rows of an episode with flaws, as `ludus.rollouts.dialogues.context` makes them.

    `ends` are the last documents of the rows. A row ends with a summary: the count and the next number. The last one
    ends with the answer, and so do rows that stop early; the next row continues as if they had not stopped.
    """
    rows, count, opening = [], 0, [*archive.prompt]
    for row, (start, end) in enumerate(zip((0, *ends), ends, strict=False), 1):
        stop = rng.randint(start + 1, end) if start < end and rng.random() < settings.stop_early else end
        said = count + archive.count(start, stop)
        turns = archive.turns(start, stop, count)
        count += archive.count(start, end)
        count -= row < len(ends) and count > 1 and rng.random() < settings.miscount
        summary = f"{COUNTS[count]}\nnext: {end + 1 if end < ends[-1] else 'none'}"
        if row == len(ends) or stop < end:
            rows.append([*opening, *turns, assistant(COUNTS[said])])
        else:
            asked = Message(role="user", content=ContextConfig().prompt)
            rows.append([*opening, *turns, asked, assistant(summary)])
        opening = [*archive.prompt, summary_message(summary)]
    return rows


def settings_seed(settings: ArchiveSettings) -> str:
    """Return a text that differs between archives of different settings."""
    return f"{settings.seed}/{settings.num_documents}/{settings.most_items}"


def make_archive_world(settings: Mapping[str, object], limits: ToolLimits) -> ArchiveWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    chosen = read_settings(ArchiveSettings, settings)
    lists: dict[str, list[Task]] = {}
    for split, share in SPLITS.items():
        names = [f"{split}-{number}" for number in range(max(1, round(share * chosen.num_tasks)))]
        made = [
            make_archive(f"{settings_seed(chosen)}/{name}", chosen.num_documents, chosen.most_items) for name in names
        ]
        lists[split] = [
            Task(name, one.prompt, one, {"split": split, "missing": one.accepted[0]})
            for name, one in zip(names, made, strict=True)
        ]
    return ArchiveWorld(lists, chosen, limits)
