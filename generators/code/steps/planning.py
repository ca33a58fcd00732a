"""Steps that optimise or count: the best choice, the fewest, the number of ways."""

from __future__ import annotations

from generators.code.steps.base import INT, INTS, WORDS, step


@step(INTS, INT, 3)
def no_two_neighbours(xs: list[int]) -> int:
    """Take the largest sum of numbers no two of which are neighbours; taking none gives 0."""
    with_last = without = 0
    for x in xs:
        with_last, without = without + x, max(with_last, without)
    return max(with_last, without)


@step(INTS, INT, 4)
def no_two_neighbours_in_ring(xs: list[int]) -> int:
    """The list is a ring: its last number is a neighbour of its first. Take the largest sum of numbers no
    two of which are neighbours; taking none gives 0."""

    def best(row: list[int]) -> int:
        taken = left = 0
        for x in row:
            taken, left = left + x, max(taken, left)
        return max(taken, left)

    return max(best(xs[1:]), best(xs[:-1]), 0 if len(xs) != 1 else xs[0])


@step(INTS, INT, 3)
def longest_rising(xs: list[int]) -> int:
    """Take the largest number of numbers that can be left over, in order, so that each is larger than the
    one before."""
    best: list[int] = []
    for i, x in enumerate(xs):
        best.append(1 + max((best[j] for j in range(i) if xs[j] < x), default=0))
    return max(best, default=0)


@step(INTS, INT, 4)
def longest_zigzag(xs: list[int]) -> int:
    """Take the largest number of numbers that can be left over, in order, so that they go up and down in
    turn (either may come first)."""
    up = down = min(len(xs), 1)
    for i in range(1, len(xs)):
        if xs[i] > xs[i - 1]:
            up = down + 1
        elif xs[i] < xs[i - 1]:
            down = up + 1
    return max(up, down)


@step(INTS, INT, 4, amount=(11, 29))
def fewest_coins(xs: list[int], amount: int) -> int:
    """The numbers above 0 are kinds of coins, each there as often as needed. Take the fewest coins that
    make {amount}, or 0 where it cannot be made."""
    best: dict[int, int] = {0: 0}
    for total in range(1, amount + 1):
        options = [best[total - x] + 1 for x in xs if x > 0 and total - x in best]
        if options:
            best[total] = min(options)
    return best.get(amount, 0)


@step(INTS, INT, 4, amount=(5, 12))
def ways_to_choose(xs: list[int], amount: int) -> int:
    """Count the choices of places (any number of them, each once) whose numbers add up to {amount}."""
    ways = {0: 1}
    for x in xs:
        added = dict(ways)
        for total, count in ways.items():
            added[total + x] = added.get(total + x, 0) + count
        ways = added
    return ways.get(amount, 0)


@step(INTS, INT, 4)
def fewest_jumps(xs: list[int]) -> int:
    """From each place one may go right by as many places as its number says, or fewer (numbers below 1:
    not at all). Take the fewest moves from the first place to the last; 0 where that is impossible or not
    needed."""
    reached, moves = {0}, 0
    while len(xs) - 1 not in reached:
        more = reached | {i + d for i in reached if i < len(xs) for d in range(1, xs[i] + 1)}
        if more == reached or not xs:
            return 0
        reached, moves = more, moves + 1
    return moves


@step(INTS, INT, 5, parts=(2, 3))
def fairest_cut(xs: list[int], parts: int) -> int:
    """Cut the list into {parts} pieces of neighbours, of which some may be empty, so that the largest sum
    of a piece is as small as possible; take that sum (an empty piece has the sum 0)."""
    sums = [0]
    for x in xs:
        sums.append(sums[-1] + x)
    best = list(sums)
    for _ in range(parts - 1):
        best = [min(max(best[i], sums[j] - sums[i]) for i in range(j + 1)) for j in range(len(sums))]
    return best[-1]


@step(INTS, INT, 5)
def stones_to_one(xs: list[int]) -> int:
    """The numbers are piles in a row. Two neighbouring piles can be put together at the cost of the sum
    of both, and become one pile of that size. Take the smallest total cost until one pile is left; 0 for
    fewer than two piles."""
    cost = {(i, i + 1): 0 for i in range(len(xs))}
    for width in range(2, len(xs) + 1):
        for i in range(len(xs) - width + 1):
            j = i + width
            cost[i, j] = sum(xs[i:j]) + min(cost[i, m] + cost[m, j] for m in range(i + 1, j))
    return cost.get((0, len(xs)), 0)


@step(INTS, INT, 4)
def game_from_ends(xs: list[int]) -> int:
    """Two players take in turn the first or the last number of what is left, and each plays as well as
    possible for the sum of their own numbers. Take by how much the sum of the one who begins exceeds the
    other's; 0 for an empty list."""
    lead = list(xs)
    for width in range(1, len(xs)):
        lead = [max(xs[i] - lead[i + 1], xs[i + width] - lead[i]) for i in range(len(xs) - width)]
    return lead[0] if lead else 0


@step((INTS, INTS), INT, 5, capacity=(10, 20))
def best_load(weights: list[int], values: list[int], capacity: int) -> int:
    """The two lists are weights and values of things at equal places (what one list has more is left out,
    and so are things whose weight is below 1). Take the largest total value of things, each taken once or
    not, whose weights add up to {capacity} or less."""
    best = [0] * (capacity + 1)
    for weight, value in zip(weights, values, strict=False):
        for room in range(capacity, weight - 1, -1):
            if weight > 0:
                best[room] = max(best[room], best[room - weight] + value)
    return best[-1]


@step((INTS, INT), INTS, 3)
def greedy_choice(xs: list[int], n: int) -> list[int]:
    """Go through the different numbers of the list from the largest to the smallest and take each one
    that is above 0 and not larger than what is left of the number beside it, which is lowered by it; take
    those in the order in which they were taken."""
    taken = []
    for x in sorted(set(xs), reverse=True):
        if 0 < x <= n:
            taken.append(x)
            n -= x
    return taken


@step((INTS, INTS), INT, 4)
def tasks_done(days: list[int], gains: list[int]) -> int:
    """Task i is due on day days[i] (days from 1) and gives gains[i]; what one list has more is left out.
    One task can be done a day, on its due day or before. Take the largest total gain."""
    busy: set[int] = set()
    total = 0
    for gain, day in sorted(zip(gains, days, strict=False), reverse=True):
        free = [d for d in range(day, 0, -1) if d not in busy]
        if free and gain > 0:
            busy.add(free[0])
            total += gain
    return total


@step(INTS, INTS, 4)
def largest_chain(xs: list[int]) -> list[int]:
    """Of the different numbers above 0 choose as many as possible such that of any two one divides the
    other; of several such choices the one that is smallest when they are sorted and compared number by
    number from the left. Take it, smallest first."""
    best: list[list[int]] = []
    for x in sorted({x for x in xs if x > 0}):
        options = [chain for chain in best if x % chain[-1] == 0]
        best.append([*min(options, key=lambda chain: (-len(chain), chain), default=[]), x])
    return min(best, key=lambda chain: (-len(chain), chain), default=[])


@step((WORDS, INT), WORDS, 4)
def best_lines(words: list[str], n: int) -> list[str]:
    """Let w be 15 plus the remainder of the number on division by 10. Put the words into lines, joined by
    "-", no line longer than w characters. A line costs the square of w minus its length. Take the lines,
    in order, for which the total cost is smallest; of several ways the one whose first line is longest,
    then whose second is, and so on."""
    width = 15 + n % 10
    best: list[tuple[int, list[str]]] = [(0, [])]
    for start in range(len(words) - 1, -1, -1):
        options = []
        for end in range(len(words), start, -1):
            line = "-".join(words[start:end])
            if len(line) <= width:
                cost, rest = best[len(words) - end]
                options.append((cost + (width - len(line)) ** 2, [line, *rest]))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]
