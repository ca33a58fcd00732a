"""Steps from lists of numbers to a number."""

from __future__ import annotations

from generators.code.steps.base import INT, INTS, step


@step(INTS, INT, 1)
def alternating_sum(xs: list[int]) -> int:
    """Add the first number, subtract the second, add the third, and so on; 0 for an empty list."""
    return sum(xs[::2]) - sum(xs[1::2])


@step(INTS, INT, 1)
def longest_equal_run(xs: list[int]) -> int:
    """Take the length of the longest run of equal neighbours; 0 for an empty list."""
    best = length = 0
    for i, x in enumerate(xs):
        length = length + 1 if i and xs[i - 1] == x else 1
        best = max(best, length)
    return best


@step(INTS, INT, 2)
def longest_climb(xs: list[int]) -> int:
    """Take the length of the longest piece of neighbours in which each number is larger than the one
    before; 0 for an empty list."""
    best = length = 0
    for i, x in enumerate(xs):
        length = length + 1 if i and xs[i - 1] < x else 1
        best = max(best, length)
    return best


@step(INTS, INT, 3)
def best_piece(xs: list[int]) -> int:
    """Take the largest sum of a piece of neighbours, which may be empty with the sum 0."""
    best = here = 0
    for x in xs:
        here = max(0, here + x)
        best = max(best, here)
    return best


@step(INTS, INT, 2)
def inversions(xs: list[int]) -> int:
    """Count the pairs of places of which the left one holds the larger number."""
    return sum(xs[i] > xs[j] for i in range(len(xs)) for j in range(i + 1, len(xs)))


@step(INTS, INT, 2)
def most_common(xs: list[int]) -> int:
    """Take the number that occurs most often, of several the smallest; 0 for an empty list."""
    return min(xs, key=lambda x: (-xs.count(x), x), default=0)


@step(INTS, INT, 2)
def widest_gap(xs: list[int]) -> int:
    """Sort the numbers and take the largest difference of neighbours; 0 for fewer than two numbers."""
    ys = sorted(xs)
    return max((ys[i] - ys[i - 1] for i in range(1, len(ys))), default=0)


@step(INTS, INT, 1)
def count_different(xs: list[int]) -> int:
    """Count the different numbers."""
    return len(set(xs))


@step(INTS, INT, 2)
def balance_point(xs: list[int]) -> int:
    """Take the first position, counted from 0, at which the numbers before it and the numbers after it
    have equal sums; the length of the list where there is none."""
    for i in range(len(xs)):
        if sum(xs[:i]) == sum(xs[i + 1 :]):
            return i
    return len(xs)


@step(INTS, INT, 2)
def smallest_absent(xs: list[int]) -> int:
    """Take the smallest whole number of 1 or more that is not in the list."""
    number = 1
    while number in xs:
        number += 1
    return number


@step(INTS, INT, 1)
def weighted_sum(xs: list[int]) -> int:
    """Multiply each number by its position, counted from 1, and add up; 0 for an empty list."""
    return sum(i * x for i, x in enumerate(xs, 1))


@step(INTS, INT, 1, k=(2, 4))
def top_sum(xs: list[int], k: int) -> int:
    """Add up the {k} largest numbers, or all where there are fewer."""
    return sum(sorted(xs, reverse=True)[:k])


@step(INTS, INT, 2, k=(3, 9))
def pairs_with_sum(xs: list[int], k: int) -> int:
    """Count the pairs of places whose numbers add up to {k}."""
    return sum(xs[i] + xs[j] == k for i in range(len(xs)) for j in range(i + 1, len(xs)))


@step(INTS, INT, 2, base=(7, 31), modulus=(97, 997))
def checksum(xs: list[int], base: int, modulus: int) -> int:
    """Begin with 0; for each number multiply by {base}, add the number, and keep the remainder on division by
    {modulus} (0 or more)."""
    total = 0
    for x in xs:
        total = (total * base + x) % modulus
    return total


@step(INTS, INT, 1)
def spread(xs: list[int]) -> int:
    """Take the largest minus the smallest number; 0 for an empty list."""
    return max(xs, default=0) - min(xs, default=0)


@step(INTS, INT, 2)
def second_largest(xs: list[int]) -> int:
    """Take the second largest of the different numbers, or 0 where there are fewer than two."""
    order = sorted(set(xs))
    return order[-2] if len(order) > 1 else 0


@step(INTS, INT, 3)
def trapped_water(xs: list[int]) -> int:
    """The numbers are heights of walls side by side (those below 0 count as 0). Take how many units of
    water stay on top of them after rain."""
    hs = [max(x, 0) for x in xs]
    return sum(min(max(hs[: i + 1]), max(hs[i:])) - h for i, h in enumerate(hs))


@step(INTS, INT, 4)
def largest_rectangle(xs: list[int]) -> int:
    """The numbers are heights of bars of width 1 side by side (those below 0 count as 0). Take the area
    of the largest rectangle that fits into the bars; 0 for none."""
    best = 0
    for i in range(len(xs)):
        lowest = xs[i]
        for j in range(i, len(xs)):
            lowest = min(lowest, xs[j])
            best = max(best, lowest * (j - i + 1))
    return best


@step(INTS, INT, 2)
def best_trade(xs: list[int]) -> int:
    """The numbers are prices, one a day. Take the largest gain of buying once and selling once on a later
    day; 0 where no trade gains."""
    best, lowest = 0, None
    for x in xs:
        lowest = x if lowest is None else min(lowest, x)
        best = max(best, x - lowest)
    return best


@step(INTS, INT, 3, fee=(1, 4))
def trades_with_fee(xs: list[int], fee: int) -> int:
    """The numbers are prices, one a day. Take the largest total gain of any number of trades, one after
    the other (buy, then sell on a later day), where each sale costs {fee}; 0 where no trade gains."""
    free, holding = 0, None
    for x in xs:
        sold = free if holding is None else max(free, holding + x - fee)
        holding = free - x if holding is None else max(holding, free - x)
        free = sold
    return free


@step(INTS, INT, 3, k=(2, 8))
def pieces_with_sum(xs: list[int], k: int) -> int:
    """Count the pieces of one or more neighbours whose sum is {k}."""
    seen, total, count = {0: 1}, 0, 0
    for x in xs:
        total += x
        count += seen.get(total - k, 0)
        seen[total] = seen.get(total, 0) + 1
    return count


@step(INTS, INT, 3, k=(1, 3))
def longest_even_piece(xs: list[int], k: int) -> int:
    """Take the length of the longest piece of neighbours whose largest and smallest number differ by {k}
    or less; 0 for an empty list."""
    best = 0
    for i in range(len(xs)):
        for j in range(i, len(xs)):
            if max(xs[i : j + 1]) - min(xs[i : j + 1]) <= k:
                best = max(best, j - i + 1)
    return best


@step(INTS, INT, 2)
def best_pair_product(xs: list[int]) -> int:
    """Take the largest product of the numbers at two different places; 0 for fewer than two numbers."""
    ys = sorted(xs)
    return max(ys[0] * ys[1], ys[-1] * ys[-2]) if len(ys) > 1 else 0


@step(INTS, INT, 2)
def sign_changes(xs: list[int]) -> int:
    """Count how often the sign changes from one number to the next; zeros are passed over."""
    signs = [x > 0 for x in xs if x]
    return sum(signs[i] != signs[i - 1] for i in range(1, len(signs)))


@step(INTS, INT, 2)
def fixed_points(xs: list[int]) -> int:
    """Add up the positions, counted from 1, at which the sorted list (smallest first) has the same number
    as the list itself; 0 where there are none."""
    return sum(i for i, (a, b) in enumerate(zip(xs, sorted(xs), strict=True), 1) if a == b)


@step(INTS, INT, 3)
def least_moves(xs: list[int]) -> int:
    """In one move any number becomes larger or smaller by 1. Take the fewest moves after which all
    numbers are equal; 0 for an empty list."""
    ys = sorted(xs)
    return sum(abs(y - ys[len(ys) // 2]) for y in ys)


@step(INTS, INT, 3)
def triangles(xs: list[int]) -> int:
    """Count the choices of three places whose numbers can be the sides of a triangle (each smaller than
    the sum of the other two)."""
    ys, count = sorted(xs), 0
    for i in range(len(ys)):
        for j in range(i + 1, len(ys)):
            count += sum(ys[i] > 0 and ys[i] + ys[j] > y for y in ys[j + 1 :])
    return count


@step(INTS, INT, 4)
def merge_cost(xs: list[int]) -> int:
    """Take away the two smallest numbers, put their sum back, and count that sum as a cost; again until
    one number is left. Take the total cost; 0 for fewer than two numbers."""
    ys, cost = sorted(xs), 0
    while len(ys) > 1:
        made = ys[0] + ys[1]
        cost += made
        ys = sorted([*ys[2:], made])
    return cost


@step((INTS, INTS), INT, 2)
def dot_product(xs: list[int], ys: list[int]) -> int:
    """Multiply the numbers at equal positions of the two lists and add up; what one list has more is left
    out."""
    return sum(x * y for x, y in zip(xs, ys, strict=False))


@step((INTS, INTS), INT, 3)
def matched_pairs(xs: list[int], ys: list[int]) -> int:
    """Count the most pairs of a number of the first list and a larger number of the second one, where
    each place is used once."""
    left, count = sorted(ys), 0
    for x in sorted(xs):
        while left and left[0] <= x:
            left.pop(0)
        if left:
            left.pop(0)
            count += 1
    return count


@step((INTS, INTS), INT, 4)
def common_subsequence(xs: list[int], ys: list[int]) -> int:
    """Take the length of the longest list that is left over of both lists when numbers are struck out of
    them."""
    row = [0] * (len(ys) + 1)
    for x in xs:
        last = row
        row = [0]
        for j, y in enumerate(ys):
            row.append(last[j] + 1 if x == y else max(last[j + 1], row[j]))
    return row[-1]
