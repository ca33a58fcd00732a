"""Where the dialogues of fine-tuning come from: the world, a file, or several of both, by weight and class.

Which dialogue stands at which place follows from the settings and the seed alone, so that a resumed run
draws the same ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

from ludus.chat.render import Renderer, render_dialogue
from ludus.config.schema import Config
from ludus.config.sections.rollout import EnvConfig
from ludus.config.sections.stages import SftSource
from ludus.envs.base import Demonstration, World, class_of
from ludus.envs.registry import build_world
from ludus.errors import UserError
from ludus.tasks.order import permutation
from ludus.training.datasets.files import DATA_CLASSES, read_dialogues
from ludus.types import DataClass, Message, Segment

MOST_LEFT_OUT = 2000
"""Dialogues in a row of which none is of a class that is taken; then a source is refused."""

Labelled = tuple[Demonstration, DataClass]
"""A dialogue and what it teaches."""


def dialogues(config: Config, world: World) -> Iterator[Labelled]:
    """The dialogues of a run, without end. Raises UserError for a source that has none to give."""
    streams = {name: _stream(config, world, name) for name in sources_of(config)}
    weights = [source.weight for source in sources_of(config).values()]
    rng = random.Random(f"sources:{config.run.seed}")
    while True:
        (name,) = rng.choices(list(streams), weights)
        shown = next(streams[name], None)
        if shown is None:
            return
        yield shown


def first_dialogues(config: Config, world: World, name: str, num: int) -> Iterator[Demonstration]:
    """The first `num` dialogues of a source that is a world, or one pass over its file."""
    source = sources_of(config)[name]
    if source.data is not None:
        num = len(read_dialogues(Path(source.data)))
    return (dialogue for dialogue, _ in itertools.islice(_stream(config, world, name), num))


def dialogue_segments(renderer: Renderer, dialogue: Demonstration) -> tuple[Segment, ...]:
    """Return a dialogue as segments, without what its messages say for training only."""
    return render_dialogue(renderer, [_plain(message) for message in dialogue.messages], dialogue.tools)


def _plain(message: Message) -> Message:
    """The message without what is for training only: the prompt of a rollout has no such key."""
    plain = message.copy()
    plain.pop("train", None)
    return plain


def check_sources(config: Config, world: World) -> None:
    """Raise UserError for a source without a dialogue of a class that is taken, and for one with a fault."""
    for name in sources_of(config):
        next(_stream(config, world, name), None)


def sources_of(config: Config) -> Mapping[str, SftSource]:
    """The sources by name; without `sft.sources` the one source of `sft.data` or of the world."""
    return config.sft.sources or {"": SftSource(data=config.sft.data)}


def _stream(config: Config, world: World, name: str) -> Iterator[Labelled]:
    """The dialogues of a source of which a class is taken, each class as often as its weight says."""
    source, classes = sources_of(config)[name], config.sft.classes
    most = max([*classes.values(), *([1.0] if len(classes) < len(DATA_CLASSES) else [])])
    rng = random.Random(f"classes:{config.run.seed}:{name}")
    left_out = 0
    for shown in _shown(config, world, name):
        own = class_of(shown) if shown.data_class or not source.data_class else source.data_class
        share = classes.get(own, 1.0) / most
        left_out = 0 if share else left_out + 1
        if left_out == MOST_LEFT_OUT:
            gone = ", ".join(one for one, weight in classes.items() if not weight)
            raise UserError(
                f"{_words(source, world)} has {MOST_LEFT_OUT:,} dialogues in a row of classes that "
                f"sft.classes leaves out ({gone}).",
                "Raise a weight in sft.classes, or take the source out.",
            )
        if share == 1 or rng.random() < share:
            yield shown, own


def _shown(config: Config, world: World, name: str) -> Iterator[Demonstration]:
    """The dialogues of a source, passed over again and again: a file in another order each time, a world with
    another seed if its demonstrations end."""
    source, seed = sources_of(config)[name], f"{config.run.seed}:{name}" if name else str(config.run.seed)
    if source.data is not None:
        found = read_dialogues(Path(source.data))
        for epoch in itertools.count():
            yield from (found[i] for i in permutation(len(found), f"sft:{seed}", epoch))
    shows = demonstrating(world_of(source, config, world))
    first = random.Random(seed).randrange(2**31) if name else config.run.seed + 1
    for lap in itertools.count():
        empty = True
        for shown in shows.demonstrations(first + lap):
            empty = False
            yield shown
        if empty:
            raise UserError(f"{_words(source, world)} shows no dialogue.", "Take the source out.")


def world_of(source: SftSource, config: Config, world: World) -> World:
    """The world of a source that is not a file: the run's own unless it names another."""
    if source.world is None:
        return world
    env = EnvConfig(name=source.world, settings=source.settings)
    return build_world(env, config.rollout, config.sandbox)


def demonstrating(world: World) -> World:
    """The world itself. Raises UserError if it has no demonstrations."""
    if not world.implements("demonstrations"):
        raise UserError(
            f"The world {world.name!r} has no demonstrations to fine-tune on.",
            "Pass dialogues in a file (sft.data), or start from a model (model.path).",
        )
    return world


def words_of(config: Config, world: World, name: str) -> str:
    """A source in a sentence: its file, or its world."""
    return _words(sources_of(config)[name], world)


def _words(source: SftSource, world: World) -> str:
    return source.data or f"The world {source.world or world.name!r}"
