"""Instructions of the shop: drawn from products, with constraints that the product satisfies.

A pair of a product type and an attribute may be held out: it occurs in no instruction of `train`, `validation` and
`composition`, and each instruction of `test` has at least one. `composition` has more constraints than training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import count

from ludus.worlds.shop.catalogue import Product, catalogue, catalogue_data
from ludus.worlds.shop.session import ShopGoal

SPLITS: Mapping[str, float] = {"train": 0.6, "validation": 0.1, "test": 0.2, "composition": 0.1}
"""Splits, with their fractions of the tasks."""
SHAPES: Mapping[int, tuple[int, int]] = {1: (1, 1), 2: (2, 1), 3: (2, 2), 4: (3, 2)}
"""Numbers of attributes and options by level; `composition` has level 4."""
MAX_REPEATED = 1000
"""Number of successive draws without a new instruction after which there are no more."""
HELD_OUT = 0.25
"""Fraction of the pairs of type and attribute that are held out."""


def is_held_out(type_: str, attribute: str) -> bool:
    """Return whether a pair occurs only in `test`."""
    return random.Random(f"held out:{type_}:{attribute}").random() < HELD_OUT


def goals(
    split: str, levels: Sequence[int], categories: Sequence[str], seed: int | str
) -> Iterator[tuple[int, ShopGoal]]:
    """Yield level and goal of distinct instructions in a fixed order, until most draws would be repetitions."""
    rng = random.Random(f"shop:{split}:{seed}")
    products = [one for one in catalogue().products.values() if one.is_cheapest and one.category in categories]
    seen: set[object] = set()
    last = 0
    for draw in count():
        if draw - last > MAX_REPEATED:
            return
        product = rng.choice(products)
        level = 4 if split == "composition" else rng.choice(levels)
        num_attributes, num_options = SHAPES[level]
        attributes = tuple(rng.sample(product.attributes, num_attributes))
        has_held_out = any(is_held_out(product.type, attribute) for attribute in attributes)
        names = sorted(rng.sample(list(product.options), num_options))
        options = tuple((name, rng.choice(product.options[name])) for name in names)
        goal = _goal(product, attributes, options, rng)
        key = (product.id, frozenset(attributes), options)
        if has_held_out == (split == "test") and key not in seen:
            seen.add(key)
            last = draw
            yield level, goal


def _goal(
    product: Product, attributes: tuple[str, ...], options: tuple[tuple[str, str], ...], rng: random.Random
) -> ShopGoal:
    price = product.price + 10 - product.price % 10 + rng.choice((0, 0, 10))
    text = rng.choice(catalogue_data().phrasings).format(
        a="an" if attributes[0][0] in "aeiou" else "a",
        attributes=", ".join(attributes),
        type=product.type,
        options=" and ".join(f"{name} {value}" for name, value in options),
        price=price,
    )
    return ShopGoal(text, product.title, product.type, attributes, options, price)
