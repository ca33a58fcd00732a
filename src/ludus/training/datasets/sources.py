"""Sources of fine-tuning dialogues: the world, a file, or several of both, by weight and class.

The sequence of dialogues depends on the settings and the seed alone, so that a resumed run draws the same ones.
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
from ludus.envs.base import Demonstration, World, class_of, permutation
from ludus.envs.registry import build_world
from ludus.errors import UserError
from ludus.training.datasets.files import DATA_CLASSES, read_dialogues
from ludus.types import DataClass, Message, Segment

MOST_LEFT_OUT = 2000
"""Consecutive dialogues of excluded classes after which a source is rejected."""

Labelled = tuple[Demonstration, DataClass]
"""Dialogue and its data class."""


def dialogues(config: Config, world: World) -> Iterator[Labelled]:
    """Yield the dialogues of a run endlessly. Raises UserError for an empty source."""
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
    """Yield the first `num` dialogues of a world source, or one pass over a file."""
    source = sources_of(config)[name]
    if source.data is not None:
        num = len(read_dialogues(Path(source.data)))
    return (dialogue for dialogue, _ in itertools.islice(_stream(config, world, name), num))


def dialogue_segments(renderer: Renderer, dialogue: Demonstration) -> tuple[Segment, ...]:
    """Return a dialogue as segments, without training-only keys of its messages."""
    return render_dialogue(renderer, [_plain(message) for message in dialogue.messages], dialogue.tools)


def _plain(message: Message) -> Message:
    """Return the message without training-only keys, which the prompt of a rollout does not have."""
    plain = message.copy()
    plain.pop("train", None)
    return plain


def check_sources(config: Config, world: World) -> None:
    """Raise UserError for a source without a dialogue of an accepted class, and for an invalid one."""
    for name in sources_of(config):
        next(_stream(config, world, name), None)


def sources_of(config: Config) -> Mapping[str, SftSource]:
    """Return the sources by name; without `sft.sources` the single source of `sft.data` or of the world."""
    return config.sft.sources or {"": SftSource(data=config.sft.data)}


def _stream(config: Config, world: World, name: str) -> Iterator[Labelled]:
    """Yield the dialogues of a source in accepted classes, sampled by class weight."""
    source, classes = sources_of(config)[name], config.sft.classes
    most = max([*classes.values(), *([1.0] if len(classes) < len(DATA_CLASSES) else [])])
    rng = random.Random(f"classes:{config.run.seed}:{name}")
    left_out = 0
    for shown in _read_source(config, world, name):
        own = class_of(shown) if shown.data_class or not source.data_class else source.data_class
        share = classes.get(own, 1.0) / most
        left_out = 0 if share else left_out + 1
        if left_out == MOST_LEFT_OUT:
            gone = ", ".join(one for one, weight in classes.items() if not weight)
            raise UserError(
                f"{_source_name(source, world)} has {MOST_LEFT_OUT:,} dialogues in a row of classes that "
                f"sft.classes leaves out ({gone}).",
                "Raise a weight in sft.classes, or remove the source.",
            )
        if share == 1 or rng.random() < share:
            yield shown, own


def _read_source(config: Config, world: World, name: str) -> Iterator[Demonstration]:
    """Yield the dialogues of a source repeatedly: a file in a new order each time, a world with a new seed."""
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
            raise UserError(f"{_source_name(source, world)} has no dialogue.", "Remove the source.")


def world_of(source: SftSource, config: Config, world: World) -> World:
    """Return the world of a source: the run's own unless it names another."""
    if source.world is None:
        return world
    env = EnvConfig(name=source.world, settings=source.settings)
    return build_world(env, config.rollout, config.sandbox)


def demonstrating(world: World) -> World:
    """Return the world. Raises UserError if it has no demonstrations."""
    if not world.implements("demonstrations"):
        raise UserError(
            f"The world {world.name!r} has no demonstrations to fine-tune on.",
            "Pass dialogues in a file (sft.data), or start from a model (model.path).",
        )
    return world


def source_name(config: Config, world: World, name: str) -> str:
    """Return the name of a source for messages."""
    return _source_name(sources_of(config)[name], world)


def _source_name(source: SftSource, world: World) -> str:
    return source.data or f"The world {source.world or world.name!r}"
