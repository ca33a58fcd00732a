"""Sources of fine-tuning dialogues: the world, a file, or several of both, by weight and class.

The sequence of dialogues depends only on the settings and the seed, so a resumed run draws the same ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ludus.chat.render import Renderer, document_tokens, render_dialogue
from ludus.config.schema import Config
from ludus.config.sections.rollout import EnvConfig
from ludus.config.sections.stages import SftSource
from ludus.envs.base import Demonstration, World, class_of, permutation
from ludus.envs.registry import build_world
from ludus.errors import UserError
from ludus.training.datasets.files import DATA_CLASSES, FileDialogue, FileText, read_sft_data
from ludus.types import DataClass, Segment

MAX_SKIPPED = 2000
"""Consecutive dialogues of excluded classes after which a source is rejected."""

Labelled = tuple[Demonstration, DataClass]
"""Dialogue and its data class."""


@dataclass(frozen=True)
class DialogueSource:
    """A source of the run's dialogues; `name` is empty for the single one without `sft.sources`."""

    name: str
    settings: SftSource
    config: Config
    own_world: World

    @property
    def title(self) -> str:
        return self.settings.data or f"The world {self.settings.world or self.own_world.name!r}"

    @property
    def world(self) -> World:
        """The world of the source: the run's own unless it names another."""
        if self.settings.world is None:
            return self.own_world
        env = EnvConfig(name=self.settings.world, settings=self.settings.settings)
        return build_world(env, self.config.rollout, self.config.sandbox)

    def first(self, num: int) -> Iterator[Demonstration]:
        """Yield the first `num` dialogues of a world, or one pass over a file."""
        if self.settings.data is not None:
            num = len(_read_file(self.settings.data))
        return (dialogue for dialogue, _ in itertools.islice(self.stream(), num))

    def stream(self) -> Iterator[Labelled]:
        """Yield the dialogues in accepted classes endlessly, sampled by class weight."""
        classes, default = self.config.sft.classes, self.settings.data_class
        highest = max([*classes.values(), *([1.0] if len(classes) < len(DATA_CLASSES) else [])])
        rng = random.Random(f"classes:{self.config.run.seed}:{self.name}")
        skipped = 0
        for dialogue in self._read():
            data_class = class_of(dialogue) if dialogue.data_class or not default else default
            share = classes.get(data_class, 1.0) / highest
            skipped = 0 if share else skipped + 1
            if skipped == MAX_SKIPPED:
                excluded = ", ".join(name for name, weight in classes.items() if not weight)
                raise UserError(
                    f"{self.title} has {MAX_SKIPPED:,} dialogues in a row of classes that "
                    f"sft.classes excludes ({excluded}).",
                    "Raise a weight in sft.classes, or remove the source.",
                )
            if share == 1 or rng.random() < share:
                yield dialogue, data_class

    def _read(self) -> Iterator[Demonstration]:
        """Yield the dialogues repeatedly: a file in a new order each time, a world with a new seed."""
        seed = f"{self.config.run.seed}:{self.name}" if self.name else str(self.config.run.seed)
        if self.settings.data is not None:
            dialogues = _read_file(self.settings.data)
            for epoch in itertools.count():
                yield from (dialogues[i] for i in permutation(len(dialogues), f"sft:{seed}", epoch))
        world = require_demonstrations(self.world)
        first = random.Random(seed).randrange(2**31) if self.name else self.config.run.seed + 1
        for epoch in itertools.count():
            empty = True
            for dialogue in world.demonstrations(first + epoch):
                empty = False
                yield dialogue
            if empty:
                raise UserError(f"{self.title} has no dialogue.", "Remove the source.")


def _read_file(data: str) -> Sequence[FileDialogue | FileText]:
    """Return the dialogues of a file, which is read again only if it has changed; or those of another source."""
    if not (path := Path(data)).is_file():
        return read_sft_data(path)
    state = path.stat()
    return _read_version(path, state.st_mtime_ns, state.st_size)


@lru_cache(4)
def _read_version(path: Path, changed_ns: int, size: int) -> Sequence[FileDialogue | FileText]:
    return read_sft_data(path)


def sources_of(config: Config, world: World) -> list[DialogueSource]:
    """Return the sources; without `sft.sources` the single source of `sft.data` or of the world."""
    settings = config.sft.sources or {"": SftSource(data=config.sft.data)}
    return [DialogueSource(name, source, config, world) for name, source in settings.items()]


def dialogues(config: Config, world: World) -> Iterator[Labelled]:
    """Yield the dialogues of a run endlessly. Raises UserError for an empty source."""
    sources = sources_of(config, world)
    streams, weights = [source.stream() for source in sources], [source.settings.weight for source in sources]
    rng = random.Random(f"sources:{config.run.seed}")
    while True:
        (stream,) = rng.choices(streams, weights)
        yield next(stream)


def check_sources(config: Config, world: World) -> None:
    """Raise UserError for a source without a dialogue of an accepted class, and for an invalid one."""
    for source in sources_of(config, world):
        next(source.stream(), None)


def dialogue_segments(renderer: Renderer, dialogue: Demonstration) -> tuple[Segment, ...]:
    """Return a dialogue as segments, without keys for training, or a text as `text_segments`."""
    if isinstance(dialogue, FileText):
        return text_segments(document_tokens(renderer.tokenizer, dialogue.text))
    plain = [message.copy() for message in dialogue.messages]
    for message in plain:
        message.pop("train", None)
    return render_dialogue(renderer, plain, dialogue.tools)


def text_segments(tokens: tuple[int, ...]) -> tuple[Segment, ...]:
    """Return the tokens of a text as segments: all train except the first, which nothing predicts."""
    return Segment("prompt", tokens[:1]), Segment("action", tokens[1:], 0)


def require_demonstrations(world: World) -> World:
    """Return the world. Raises UserError if it has no demonstrations."""
    if not world.implements("demonstrations"):
        raise UserError(
            f"The world {world.name!r} has no demonstrations to fine-tune on.",
            "Pass dialogues in a file (sft.data), or start from a model (model.path).",
        )
    return world
