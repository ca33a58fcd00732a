"""Steps from numbers by name to tables, words, lists and numbers."""

from __future__ import annotations

from generators.code.steps.base import INT, INTS, TABLE, TEXT, WORDS, step


@step(TABLE, TABLE, 1)
def above_average(table: dict[str, int]) -> dict[str, int]:
    """Keep only the names whose number is larger than the mean of all."""
    return {name: n for name, n in table.items() if n * len(table) > sum(table.values())}


@step(TABLE, TABLE, 2)
def merge_by_initial(table: dict[str, int]) -> dict[str, int]:
    """Replace the names by their first letters; numbers of equal letters are added up."""
    merged: dict[str, int] = {}
    for name, n in table.items():
        merged[name[0]] = merged.get(name[0], 0) + n
    return merged


@step(TABLE, TABLE, 2)
def best_by_length(table: dict[str, int]) -> dict[str, int]:
    """Of the names of equal length keep only the one with the largest number, of several the
    alphabetically first."""
    best: dict[int, str] = {}
    for name in sorted(table):
        if len(name) not in best or table[best[len(name)]] < table[name]:
            best[len(name)] = name
    return {name: table[name] for name in best.values()}


@step(TABLE, TABLE, 1)
def names_once_more(table: dict[str, int]) -> dict[str, int]:
    """Add to each number the length of its name."""
    return {name: n + len(name) for name, n in table.items()}


@step(TABLE, TABLE, 2, k=(2, 4))
def top_names(table: dict[str, int], k: int) -> dict[str, int]:
    """Keep only the {k} names with the largest numbers, of equal numbers the alphabetically first names."""
    order = sorted(table, key=lambda name: (-table[name], name))
    return {name: table[name] for name in order[:k]}


@step(TABLE, TABLE, 3)
def places_in_order(table: dict[str, int]) -> dict[str, int]:
    """Replace each number by its place when the different numbers are sorted, largest first: 1 for the
    largest, equal numbers have equal places, and no place is left out."""
    order = sorted(set(table.values()), reverse=True)
    return {name: order.index(n) + 1 for name, n in table.items()}


@step(TABLE, TABLE, 3)
def drop_rival_names(table: dict[str, int]) -> dict[str, int]:
    """Remove every name that shares its last letter with a name of a larger number (all as they were
    before this step)."""
    return {
        name: n
        for name, n in table.items()
        if not any(other[-1] == name[-1] and m > n for other, m in table.items())
    }


@step(TABLE, WORDS, 1)
def names_by_number(table: dict[str, int]) -> list[str]:
    """Take the names, sorted by number, largest first, equal ones in alphabetical order."""
    return sorted(table, key=lambda name: (-table[name], name))


@step(TABLE, WORDS, 2)
def names_of_majority(table: dict[str, int]) -> list[str]:
    """Sort the names by number, largest first (equal ones in alphabetical order), and take as many from
    the front as are needed for more than half of the sum of all numbers (all where that is not
    reached)."""
    taken: list[str] = []
    for name in sorted(table, key=lambda one: (-table[one], one)):
        if 2 * sum(table[one] for one in taken) > sum(table.values()):
            break
        taken.append(name)
    return taken


@step(TABLE, INTS, 1)
def numbers_by_name(table: dict[str, int]) -> list[int]:
    """Take the numbers in the alphabetical order of their names."""
    return [table[name] for name in sorted(table)]


@step(TABLE, INT, 1)
def total(table: dict[str, int]) -> int:
    """Add up all numbers; 0 for none."""
    return sum(table.values())


@step(TABLE, INT, 2)
def largest_group(table: dict[str, int]) -> int:
    """Take the largest number of names that have the same number; 0 for none."""
    numbers = list(table.values())
    return max(map(numbers.count, numbers), default=0)


@step(TABLE, INT, 4)
def fairest_split(table: dict[str, int]) -> int:
    """Take the absolute values of the numbers and split them into two groups whose sums differ as little
    as possible; take that difference."""
    sums = {0}
    for n in table.values():
        sums = {abs(s + abs(n)) for s in sums} | {abs(s - abs(n)) for s in sums}
    return min(sums)


@step(TABLE, TEXT, 1)
def write_pairs(table: dict[str, int]) -> str:
    """Write name=number for each name, in alphabetical order, with ";" between them, as one text."""
    return ";".join(f"{name}={table[name]}" for name in sorted(table))


@step((TABLE, TABLE), TABLE, 2)
def changes(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Give, for each name of either table whose number differs, its number in the second table minus that
    in the first; a name that a table lacks has 0 there."""
    names = [*before, *(name for name in after if name not in before)]
    changed = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    return {name: n for name, n in changed.items() if n}


@step((TABLE, WORDS), INT, 2)
def bill(prices: dict[str, int], order: list[str]) -> int:
    """The numbers are prices and the list of words is an order. Add up the prices of the words; a word
    without a price costs its length, and every third time that a word is ordered is free."""
    total, times = 0, dict[str, int]()
    for word in order:
        times[word] = times.get(word, 0) + 1
        if times[word] % 3:
            total += prices.get(word, len(word))
    return total
