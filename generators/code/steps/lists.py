"""Steps from lists of numbers to lists of numbers."""

from __future__ import annotations

from generators.code.steps.base import INTS, step


@step(INTS, INTS, 1)
def keep_rising(xs: list[int]) -> list[int]:
    """Keep the first number and each number that is larger than the one directly before it in the list."""
    return [x for i, x in enumerate(xs) if i == 0 or x > xs[i - 1]]


@step(INTS, INTS, 1)
def drop_repeats(xs: list[int]) -> list[int]:
    """Keep only the first occurrence of each number, in order."""
    return list(dict.fromkeys(xs))


@step(INTS, INTS, 1)
def drop_runs(xs: list[int]) -> list[int]:
    """Replace each run of equal neighbours by one of them."""
    kept: list[int] = []
    for x in xs:
        if not kept or kept[-1] != x:
            kept.append(x)
    return kept


@step(INTS, INTS, 1)
def running_sums(xs: list[int]) -> list[int]:
    """Replace each number by the sum of all numbers up to and including it."""
    sums, total = [], 0
    for x in xs:
        total += x
        sums.append(total)
    return sums


@step(INTS, INTS, 1)
def differences(xs: list[int]) -> list[int]:
    """Replace the list by the differences of neighbours, each number minus the one before it; it gets one
    shorter (an empty list stays empty)."""
    return [xs[i] - xs[i - 1] for i in range(1, len(xs))]


@step(INTS, INTS, 1, k=(1, 5))
def rotate_left(xs: list[int], k: int) -> list[int]:
    """Move the first number to the end of the list, {k} times."""
    if not xs:
        return []
    k %= len(xs)
    return xs[k:] + xs[:k]


@step(INTS, INTS, 2, k=(2, 4))
def reverse_pieces(xs: list[int], k: int) -> list[int]:
    """Cut the list into pieces of {k} numbers from the left (the last one may be shorter) and turn each piece
    around in its place."""
    turned: list[int] = []
    for start in range(0, len(xs), k):
        turned += xs[start : start + k][::-1]
    return turned


@step(INTS, INTS, 2)
def sort_by_digit_sum(xs: list[int]) -> list[int]:
    """Sort the numbers by the sum of their decimal digits (without the sign), smallest first, equal ones by
    value, smallest first."""
    return sorted(xs, key=lambda x: (sum(map(int, str(abs(x)))), x))


@step(INTS, INTS, 2)
def interleave_halves(xs: list[int]) -> list[int]:
    """Cut the list in the middle (the first half gets the odd one) and take from the two halves in turn,
    beginning with the first half."""
    middle = (len(xs) + 1) // 2
    mixed: list[int] = []
    for i in range(middle):
        mixed.append(xs[i])
        if middle + i < len(xs):
            mixed.append(xs[middle + i])
    return mixed


@step(INTS, INTS, 2, k=(2, 4))
def window_maxima(xs: list[int], k: int) -> list[int]:
    """Replace the list by the largest number of each {k} neighbours, from left to right; a list of fewer than
    {k} numbers becomes empty."""
    return [max(xs[i : i + k]) for i in range(len(xs) - k + 1)]


@step(INTS, INTS, 1, k=(2, 4))
def window_sums(xs: list[int], k: int) -> list[int]:
    """Replace the list by the sum of each {k} neighbours, from left to right; a list of fewer than {k}
    numbers becomes empty."""
    return [sum(xs[i : i + k]) for i in range(len(xs) - k + 1)]


@step(INTS, INTS, 1)
def keep_peaks(xs: list[int]) -> list[int]:
    """Keep only the numbers that are larger than both of their neighbours; the first and the last go."""
    return [xs[i] for i in range(1, len(xs) - 1) if xs[i - 1] < xs[i] > xs[i + 1]]


@step(INTS, INTS, 2)
def ranks(xs: list[int]) -> list[int]:
    """Replace each number by how many different smaller numbers the list has."""
    order = sorted(set(xs))
    return [order.index(x) for x in xs]


@step(INTS, INTS, 1)
def evens_first(xs: list[int]) -> list[int]:
    """Put all even numbers before all odd ones, otherwise in the order that they have."""
    return [x for x in xs if x % 2 == 0] + [x for x in xs if x % 2]


@step(INTS, INTS, 1)
def largest_so_far(xs: list[int]) -> list[int]:
    """Replace each number by the largest one up to and including it."""
    return [max(xs[: i + 1]) for i in range(len(xs))]


@step(INTS, INTS, 3)
def next_larger(xs: list[int]) -> list[int]:
    """Replace each number by the nearest larger number to its right, or by 0 where there is none."""
    found, waiting = [0] * len(xs), list[int]()
    for i, x in enumerate(xs):
        while waiting and xs[waiting[-1]] < x:
            found[waiting.pop()] = x
        waiting.append(i)
    return found


@step(INTS, INTS, 2)
def earlier_copies(xs: list[int]) -> list[int]:
    """Replace each number by how often the same number stands before it."""
    seen: dict[int, int] = {}
    counts = []
    for x in xs:
        counts.append(seen.get(x, 0))
        seen[x] = counts[-1] + 1
    return counts


@step(INTS, INTS, 1, low=(-2, 1), high=(4, 12))
def clamp(xs: list[int], low: int, high: int) -> list[int]:
    """Raise every number below {low} to {low} and lower every number above {high} to {high}."""
    return [min(max(x, low), high) for x in xs]


@step(INTS, INTS, 1)
def ring_products(xs: list[int]) -> list[int]:
    """Replace each number by its product with the number after it; the last one is multiplied by the
    first (all as they were before this step)."""
    return [x * xs[(i + 1) % len(xs)] for i, x in enumerate(xs)]


@step(INTS, INTS, 2)
def sort_by_frequency(xs: list[int]) -> list[int]:
    """Sort the numbers by how often they occur, most frequent first, equally frequent ones by value, smallest
    first; every occurrence stays."""
    return sorted(xs, key=lambda x: (-xs.count(x), x))


@step(INTS, INTS, 1)
def drop_smallest(xs: list[int]) -> list[int]:
    """Remove every occurrence of the smallest number."""
    return [x for x in xs if x != min(xs)]


@step(INTS, INTS, 1, k=(2, 3))
def every_kth(xs: list[int], k: int) -> list[int]:
    """Keep only the numbers at the positions {k}, 2 * {k}, 3 * {k} and so on, counted from 1."""
    return xs[k - 1 :: k]


@step(INTS, INTS, 2)
def from_both_ends(xs: list[int]) -> list[int]:
    """Reorder the list: the first number, the last, the second, the last but one, and so on."""
    left, right, taken = 0, len(xs) - 1, list[int]()
    while left <= right:
        taken.append(xs[left])
        if left < right:
            taken.append(xs[right])
        left, right = left + 1, right - 1
    return taken


@step(INTS, INTS, 2)
def smooth(xs: list[int]) -> list[int]:
    """Replace each number that has two neighbours by the middle one in size of the three (all as they were
    before this step); the first and the last stay."""
    inner = [sorted(xs[i - 1 : i + 2])[1] for i in range(1, len(xs) - 1)]
    return [*xs[:1], *inner, *xs[-1:]] if len(xs) > 1 else list(xs)


@step(INTS, INTS, 2)
def one_bubble_pass(xs: list[int]) -> list[int]:
    """Go once through the list from the left and swap each number with the one after it where it is
    larger than that (a number that was moved goes on)."""
    ys = list(xs)
    for i in range(len(ys) - 1):
        if ys[i] > ys[i + 1]:
            ys[i], ys[i + 1] = ys[i + 1], ys[i]
    return ys


@step(INTS, INTS, 1)
def subtract_mean(xs: list[int]) -> list[int]:
    """Subtract from each number the mean of the list, rounded down to a whole number."""
    return [x - sum(xs) // len(xs) for x in xs]


@step(INTS, INTS, 3)
def run_lengths(xs: list[int]) -> list[int]:
    """Replace each run of equal neighbours by two numbers: the number, then the length of the run."""
    pairs: list[list[int]] = []
    for x in xs:
        if pairs and pairs[-1][0] == x:
            pairs[-1][1] += 1
        else:
            pairs.append([x, 1])
    return [number for pair in pairs for number in pair]


@step(INTS, INTS, 3)
def smaller_to_the_right(xs: list[int]) -> list[int]:
    """Replace each number by how many numbers to its right are smaller than it."""
    return [sum(y < x for y in xs[i + 1 :]) for i, x in enumerate(xs)]


@step(INTS, INTS, 3)
def cancel_neighbours(xs: list[int]) -> list[int]:
    """Remove two neighbours that add up to 0, the leftmost such two first, again and again until there
    are none; numbers that become neighbours by that count."""
    left: list[int] = []
    for x in xs:
        if left and left[-1] + x == 0:
            left.pop()
        else:
            left.append(x)
    return left


@step(INTS, INTS, 4)
def longest_rising_choice(xs: list[int]) -> list[int]:
    """Replace the list by its longest strictly rising subsequence (numbers in order, not necessarily
    neighbours); of several, the one that is smallest when they are compared number by number from the
    left."""
    best: list[list[int]] = []
    for i, x in enumerate(xs):
        options = [chain for chain, y in zip(best, xs[:i], strict=True) if y < x]
        longest = max(map(len, options), default=0)
        best.append([*min((c for c in options if len(c) == longest), default=[]), x])
    longest = max(map(len, best), default=0)
    return min((chain for chain in best if len(chain) == longest), default=[])


@step(INTS, INTS, 3)
def next_arrangement(xs: list[int]) -> list[int]:
    """Replace the list by the next larger arrangement of the same numbers, lists being compared number by
    number from the left; the largest arrangement is followed by the smallest one."""
    ys = list(xs)
    i = len(ys) - 2
    while i >= 0 and ys[i] >= ys[i + 1]:
        i -= 1
    if i >= 0:
        j = max(j for j in range(i + 1, len(ys)) if ys[j] > ys[i])
        ys[i], ys[j] = ys[j], ys[i]
    return ys[: i + 1] + ys[i + 1 :][::-1]


@step((INTS, INTS), INTS, 2)
def merge_sorted(xs: list[int], ys: list[int]) -> list[int]:
    """Sort both lists and replace them by one list of the numbers that are in exactly one of them,
    smallest first, each once."""
    return sorted(set(xs) ^ set(ys))


@step((INTS, INTS), INTS, 2)
def common_with_counts(xs: list[int], ys: list[int]) -> list[int]:
    """Replace the two lists by the numbers that both have, in the order of the first list, each as often
    as in the list that has it less often (its first occurrences are kept)."""
    left = list(ys)
    common = []
    for x in xs:
        if x in left:
            left.remove(x)
            common.append(x)
    return common


@step((INTS, INTS), INTS, 3)
def column_addition(xs: list[int], ys: list[int]) -> list[int]:
    """Take the last decimal digit of each number's absolute value, so that each list spells a whole
    number (an empty one spells 0); replace both by the digits of the sum of the two, without leading
    zeros."""
    spelled = [int("0" + "".join(str(abs(x) % 10) for x in one)) for one in (xs, ys)]
    return [int(digit) for digit in str(sum(spelled))]
