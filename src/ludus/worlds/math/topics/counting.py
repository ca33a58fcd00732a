"""Combinatorics and small probabilities."""

from __future__ import annotations

from collections import Counter

from ludus.worlds.math.drafts import Draft, listed


def outfits(d: Draft) -> str:
    """One of each kind of clothes."""
    numbers = [d.randint(2, 18 // d.level) for _ in range(2 + (d.level > 1))]
    d.do(" * ".join(map(str, numbers)))
    clothes = listed([f"{n} {word}" for n, word in zip(numbers, ("shirts", "hats", "scarves"), strict=False)])
    return f"Someone has {clothes}. How many outfits with one of each are there?"


def letters(d: Draft) -> str:
    """Arrangements of a word with repeated letters."""
    word = "".join(d.choice("AEILNRST") for _ in range(d.level + 2))
    counts = Counter(word).values()
    repeated = [f"factorial({n})" for n in counts if n > 1]
    if not repeated or len(counts) < 2:
        return letters(d)
    every = d.do(f"factorial({len(word)})")
    d.do(f"{every} / ({' * '.join(repeated)})")
    return f"In how many different orders can the letters of {word} be written?"


def same_colour(d: Draft) -> str:
    """Two balls without replacement: both red (level 3), of the same or of different colours."""
    numbers = {colour: d.randint(2, 9) for colour in ("red", "blue", "green")[: 3 if d.level > 4 else 2]}
    wanted = ["red"] if d.level < 4 else list(numbers)
    good = d.do(" + ".join(f"comb({numbers[colour]}, 2)" for colour in wanted))
    same = d.do(f"{good} / comb({sum(numbers.values())}, 2)")
    event = "both are red" if d.level < 4 else "both have the same colour"
    if d.level > 3 and d.coin():
        d.do(f"1 - {same}")
        event = "they have different colours"
    balls = " and ".join(f"{n} {colour}" for colour, n in numbers.items())
    return f"A bag holds {balls} balls. Two are taken without putting back. What is the probability that {event}?"


MAKERS = (outfits, letters, same_colour)
