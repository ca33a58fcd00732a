"""The search world: tasks, environment, demonstrations, and two baselines without tool calls.

The mistakes in demonstrations are systematic, because noise averages out in training: the model learns a bad policy
that reinforcement learning can correct.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

from pydantic import Field

from ludus.envs.base import World
from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.task_archive import SPLITS
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.envs.tool_world import Dialogue, assistant, check_split, tool_turn
from ludus.errors import ConfigError
from ludus.rewards.base import Reward
from ludus.rewards.code.turns import Progress, TurnVerifier, outcomes_by_turn
from ludus.rewards.exact_match import ExpectedAnswers, exact_match, strict_match, token_f1, well_formed
from ludus.rewards.process import Retrieval, Retriever
from ludus.rewards.shaping import citation_support, either, only_if
from ludus.tools.base import Tool
from ludus.tools.search import DenseIndex, FolderEncoder, HybridIndex, PassageIndex, RankedIndex, search_tool
from ludus.types import JSON, Message, Task, ToolStatus, Trajectory
from ludus.worlds.search.questions import WEIGHTS, Hop, SearchQuestion, all_questions, passage_values, sample_questions

SYSTEM = {
    "tool": "Answer the question. Search until you know.",
    "once": "Answer the question from the passages.",
    "none": "Answer the question from memory.",
}
FULL = dict.fromkeys(SYSTEM, "Answer with the name, number or time zone alone.")
FULL["tool"] = f"Look up one fact a search, and search again if the answer needs another one. {FULL['tool']}"
"""Instructions for a pretrained model; a small model learns them from the demonstrations."""
SIZES = {"train": 24_000, "validation": 1_000, "test": 1_500, "composition": 1_200}


class SearchSettings(WorldSettings):
    """Settings of the search world (`env.settings`)."""

    access: Literal["tool", "once", "none"] = "tool"
    """`tool`: searches in a loop. `once`: passages for the question are in the prompt (RAG). `none`: no passages."""
    instructions: Literal["short", "full"] = "short"
    """Instructions in the prompt: `full` also explains how to search and how to answer, for a pretrained model
    without demonstrations."""
    k: int = Field(2, ge=1, le=10)
    """Default number of passages that a search returns."""
    well_formed_weight: float = Field(0.1, ge=0, lt=0.5)
    """Weight of an episode without a failed call whose answer is right or was found. `exact_match` has 1."""
    method: Literal["bm25", "dense", "hybrid"] = "bm25"
    """Ranking by words, by embeddings of `encoder`, or both fused."""
    encoder: str = ""
    """Folder of the embedding model for `dense` and `hybrid`."""
    seed: int = 0
    """Seed of the choice and order of the tasks."""
    framed: bool = True
    """Whether an answer may be framed: a box, "Answer:", "The answer is", `<answer>` tags."""


@dataclass(frozen=True, slots=True)
class SearchFlaws:
    """Probabilities of the expert's mistakes."""

    stop_early: float = 0.70
    """On a question of several hops: answer with the value of the first hop."""
    stop_second: float = 0.30
    """On a question of three hops, after the first: answer with the value of the second hop."""
    lazy_query: float = 0.06
    """On a hop that needs a precise query: search for the name alone, answer from a passage that shares words."""
    lazy_intersection: float = 0.65
    """On a question with two conditions: search for one only, and answer from the first passage."""
    wrong_search: float = 0.05
    """First search for an irrelevant word, then proceed correctly."""


def solve(question: SearchQuestion, tool: Tool, flaws: SearchFlaws, rng: random.Random) -> list[Message] | None:
    """Return the messages after a question, mistakes included; None if the precise queries do not find a passage."""
    if not all(hop.passage in tool.function(hop.query, 5) for hop in question.hops):  # type: ignore[operator]
        return None
    messages: list[Message] = []

    def search(thought: str, query: str, **more: JSON) -> str:
        found = str(tool.function(query, **more))
        arguments: dict[str, JSON] = {"query": query, **more}
        messages.extend(tool_turn(len(messages) // 2, "search", arguments, found, reasoning=thought))
        return found

    answer = _search_answer(question, search, flaws, rng)
    return [*messages, assistant(answer)]


def _search_answer(question: SearchQuestion, search: Callable[..., str], flaws: SearchFlaws, rng: random.Random) -> str:
    hops = question.hops
    if rng.random() < flaws.wrong_search:
        search("Find the answer.", hops[-1].relation)
    if question.family == "intersection" and rng.random() < flaws.lazy_intersection:
        return _first_value(search("Find the country.", hops[0].subject), hops[0])
    for depth, hop in enumerate(hops):
        thought = f"Find the {hop.relation}."
        if hop.query != hop.subject and rng.random() < flaws.lazy_query:
            found = search(thought, hop.subject)
            if hop.passage not in found:
                return _first_value(found, hop)
        elif hop.passage not in search(thought, hop.query):
            search(thought, hop.query, k=5)
        stop = (flaws.stop_early, flaws.stop_second)[min(depth, 1)]
        if depth + 1 < len(hops) and rng.random() < stop:
            return hop.value
    return hops[-1].value


def _first_value(found: str, hop: Hop) -> str:
    values = passage_values()
    return next((values[passage] for passage in found.split("\n") if passage in values), hop.subject)


@dataclass(frozen=True)
class SearchWorld(World):
    """Multi-hop questions over real facts."""

    settings: SearchSettings = field(default_factory=SearchSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    name: str = "search"
    splits: Sequence[str] = SPLITS

    @property
    def index(self) -> RankedIndex:
        """The index of all passages. Raises UserError for an encoder that cannot be read."""
        if self.settings.method == "bm25":
            return _index()
        dense = _dense_index(self.settings.encoder)
        return dense if self.settings.method == "dense" else HybridIndex(_index(), dense)

    @cached_property
    def tool(self) -> Tool:
        return search_tool(self.index, self.settings.k)

    @cached_property
    def rewards(self) -> tuple[Reward, ...]:
        """The outcome is the exact match; F1 is reported only; the format reward has a small weight."""
        match = exact_match if self.settings.framed else strict_match
        form = only_if(well_formed, either(match, citation_support))
        return (
            Reward("exact_match", match, weight=1.0, outcome=True),
            Reward("f1", token_f1, weight=0.0),
            Reward("well_formed", form, weight=self.settings.well_formed_weight),
        )

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        """Verifier of milestones, the passages that state the facts of the hops; None without the tool."""
        return self._retrieved if self.settings.access == "tool" else None

    @property
    def retrieval(self) -> Retriever | None:
        """The passages that each turn found, and those that state the facts of the hops; None without the tool."""
        return self._passages if self.settings.access == "tool" else None

    def _retrieved(self, task: Task, trajectory: Trajectory) -> Progress:
        found = self._passages(task, trajectory)
        return Progress([set(found.gold).intersection(one) for one in found.by_turn], len(found.gold))

    def _passages(self, task: Task, trajectory: Trajectory) -> Retrieval:
        question = self._question(task)
        gold = () if question is None else tuple(dict.fromkeys(hop.passage for hop in question.hops))
        fine = ([o for o in own if o.status is ToolStatus.OK] for own in outcomes_by_turn(trajectory))
        return Retrieval([[line for o in own for line in o.output.split("\n")] for own in fine], gold)

    def _question(self, task: Task) -> SearchQuestion | None:
        split = task.tags.get("split", "")
        return _questions(split, self.settings.seed).get(task.id) if split in SIZES else None

    def tasks(self, split: str) -> Sequence[Task]:
        check_split(split, self.splits, self.name)
        return _tasks(self.settings, split)

    def opening(self, question: str, access: str | None = None) -> tuple[Message, ...]:
        """Return the system message and the question, with passages if the access is `once`."""
        access, text = access or self.settings.access, question
        if access == "once":
            text += "\n" + "\n".join(self.index.search(question, self.settings.k))
        system = SYSTEM[access]
        if self.settings.instructions == "full":
            system += f" {FULL[access]}"
        return Message(role="system", content=system), Message(role="user", content=text)

    def environment(self, task: Task) -> ToolEnv:
        tools = (self.tool,) if self.settings.access == "tool" else ()
        return ToolEnv(tools, self.rewards, self.limits)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield dialogues of the flawed expert without end: most with the tool, some from passages or memory.

        All questions of the training split can occur, families with their weights.
        """
        rng = random.Random(f"demonstrations:{seed}")
        pools = all_questions("train")
        weights = {family: WEIGHTS[family] for family in pools}
        while True:
            (family,) = rng.choices(list(weights), list(weights.values()))
            question = rng.choice(pools[family])
            access = rng.choices(("tool", "once", "none"), (0.90, 0.05, 0.05))[0]
            opening = self.opening(question.text, access)
            if access != "tool":
                yield Dialogue((*opening, assistant(question.answers[0])), ())
                continue
            messages = solve(question, self.tool, SearchFlaws(), rng)
            if messages is not None:
                yield Dialogue((*opening, *messages), (self.tool,))

    def expert(self, task: Task) -> Dialogue | None:
        """Return a dialogue of the expert without flaws; None without the tool or if a search finds nothing."""
        question = self._question(task)
        if question is None or self.settings.access != "tool":
            return None
        messages = solve(question, self.tool, SearchFlaws(0.0, 0.0, 0.0, 0.0, 0.0), random.Random(task.id))
        return None if messages is None else Dialogue((*task.prompt, *messages), (self.tool,))

    def texts(self) -> Iterator[str]:
        """Yield passages, then dialogues as text, to train a tokenizer on."""
        yield from passage_values()
        for dialogue in islice(self.demonstrations(seed=0), self.num_text_dialogues):
            yield f"{self.tool.name}(query: string, k: integer) {self.tool.description}"
            yield from dialogue.texts()


@cache
def _index() -> PassageIndex:
    return PassageIndex(tuple(passage_values()))


@cache
def _dense_index(folder: str) -> DenseIndex:
    return DenseIndex(tuple(passage_values()), FolderEncoder(Path(folder)))


@cache
def _questions(split: str, seed: int) -> Mapping[str, SearchQuestion]:
    """Return the questions of a split by id, composed once per process."""
    return {question.id: question for question in sample_questions(split, SIZES[split], seed)}


@lru_cache(maxsize=8)
def _tasks(settings: SearchSettings, split: str) -> tuple[Task, ...]:
    """Return the tasks of a split; worlds of equal settings share them."""
    world, tasks = SearchWorld(settings), list[Task]()
    for question in _questions(split, settings.seed).values():
        tags = {"split": split, "family": question.family, "hops": str(len(question.hops))}
        tasks.append(Task(question.id, world.opening(question.text), ExpectedAnswers(question.answers), tags))
    return tuple(tasks)


def make_search_world(settings: Mapping[str, object], limits: ToolLimits) -> SearchWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    chosen = read_settings(SearchSettings, settings)
    if chosen.method != "bm25" and not chosen.encoder:
        message = f"env.settings.method (= {chosen.method!r}) needs an encoder."
        raise ConfigError(message, "Set env.settings.encoder to the folder of a model.")
    return SearchWorld(chosen, limits)
