"""Steps from intervals to intervals, lists and numbers."""

from __future__ import annotations

from generators.code.steps.base import INT, INTS, SPANS, step


@step(SPANS, SPANS, 3)
def merge_spans(spans: list[list[int]]) -> list[list[int]]:
    """Merge intervals that overlap or touch, and sort them by start."""
    merged: list[list[int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


@step(SPANS, SPANS, 3)
def gaps_between(spans: list[list[int]]) -> list[list[int]]:
    """Replace the intervals by the gaps that they leave between the first start and the last end, sorted
    by start."""
    gaps, reach = list[list[int]](), None
    for start, end in sorted(spans):
        if reach is not None and start > reach:
            gaps.append([reach, start])
        reach = end if reach is None else max(reach, end)
    return gaps


@step(SPANS, SPANS, 2)
def drop_covered(spans: list[list[int]]) -> list[list[int]]:
    """Keep each different interval once, remove those that lie within another one, and sort the rest by
    start."""
    different = sorted({(start, end) for start, end in spans})
    return [
        [a, b] for a, b in different if not any(c <= a and b <= d and (a, b) != (c, d) for c, d in different)
    ]


@step(SPANS, SPANS, 2, low=(2, 6), high=(12, 25))
def cut_to_window(spans: list[list[int]], low: int, high: int) -> list[list[int]]:
    """Cut off what lies below {low} or above {high}; intervals of which nothing is left go, the others
    keep their order."""
    cut = [[max(start, low), min(end, high)] for start, end in spans]
    return [span for span in cut if span[0] < span[1]]


@step(SPANS, SPANS, 1)
def longest_first(spans: list[list[int]]) -> list[list[int]]:
    """Sort the intervals by length, longest first, equally long ones by start, smallest first."""
    return sorted(spans, key=lambda span: (span[0] - span[1], span[0]))


@step(SPANS, SPANS, 2)
def keep_free(spans: list[list[int]]) -> list[list[int]]:
    """Go through the intervals in their order and keep each one that shares no stretch with one kept
    before (touching is allowed)."""
    kept: list[list[int]] = []
    for start, end in spans:
        if all(end <= a or b <= start for a, b in kept):
            kept.append([start, end])
    return kept


@step(SPANS, SPANS, 4)
def covered_twice(spans: list[list[int]]) -> list[list[int]]:
    """Replace the intervals by the longest stretches that two or more of them cover, sorted by start;
    stretches that touch are one."""
    points = sorted({point for span in spans for point in span})
    found: list[list[int]] = []
    for i in range(1, len(points)):
        a, b = points[i - 1], points[i]
        if sum(start <= a and b <= end for start, end in spans) > 1:
            if found and found[-1][1] == a:
                found[-1][1] = b
            else:
                found.append([a, b])
    return found


@step(SPANS, INT, 3)
def most_at_once(spans: list[list[int]]) -> int:
    """Take the largest number of intervals that cover one and the same stretch; 0 for none."""
    events = sorted((point, side) for span in spans for point, side in zip(span, (1, -1), strict=True))
    best = here = 0
    for _, side in events:
        here += side
        best = max(best, here)
    return best


@step(SPANS, INT, 2)
def covered_length(spans: list[list[int]]) -> int:
    """Take the total length that is covered by one interval at least."""
    return len({unit for start, end in spans for unit in range(start, end)})


@step(SPANS, INT, 3)
def most_disjoint(spans: list[list[int]]) -> int:
    """Take the largest number of intervals of which no two share a stretch (touching is allowed)."""
    count, reach = 0, -1
    for start, end in sorted(spans, key=lambda span: span[1]):
        if start >= reach:
            count, reach = count + 1, end
    return count


@step(SPANS, INT, 3)
def fewest_points(spans: list[list[int]]) -> int:
    """Take the fewest points such that each interval holds one of them (its ends belong to it)."""
    count, point = 0, -1
    for start, end in sorted(spans, key=lambda span: span[1]):
        if start > point:
            count, point = count + 1, end
    return count


@step(SPANS, INT, 4)
def best_weight(spans: list[list[int]]) -> int:
    """Each interval is worth its length squared. Take the largest total worth of intervals of which no
    two share a stretch (touching is allowed); 0 for none."""
    order = sorted(spans, key=lambda span: span[1])
    best: list[int] = []
    for i, (start, end) in enumerate(order):
        before = max((best[j] for j in range(i) if order[j][1] <= start), default=0)
        best.append(max([before + (end - start) ** 2, *best[-1:]]))
    return max(best, default=0)


@step(SPANS, INTS, 1)
def span_lengths(spans: list[list[int]]) -> list[int]:
    """Replace each interval by its length."""
    return [end - start for start, end in spans]


@step(SPANS, INTS, 2)
def overlap_counts(spans: list[list[int]]) -> list[int]:
    """Replace each interval by the number of other intervals with which it shares a stretch (touching
    does not count)."""
    return [sum(c < b and a < d for c, d in spans) - 1 for a, b in spans]


@step(SPANS, INTS, 2)
def room_numbers(spans: list[list[int]]) -> list[int]:
    """The intervals are guests of a house. By start (equal starts: by end, then in their order) each
    guest gets the free room with the lowest number, from 1 on; a room is free again at its guest's end.
    Replace each interval, in the original order, by its room."""
    rooms = [0] * len(spans)
    for i in sorted(range(len(spans)), key=lambda one: spans[one]):
        taken = {rooms[j] for j in range(len(spans)) if rooms[j] and spans[j][1] > spans[i][0]}
        rooms[i] = next(room for room in range(1, len(spans) + 1) if room not in taken)
    return rooms


@step((SPANS, SPANS), SPANS, 3)
def common_stretches(first: list[list[int]], second: list[list[int]]) -> list[list[int]]:
    """Replace the two lists by every stretch that an interval of the first shares with one of the second,
    each different stretch once, sorted by start, then by end."""
    shared = {(max(a, c), min(b, d)) for a, b in first for c, d in second}
    return [[start, end] for start, end in sorted(shared) if start < end]


@step((SPANS, INTS), INTS, 2)
def hits(spans: list[list[int]], points: list[int]) -> list[int]:
    """Replace each number of the list by how many intervals hold it (a start belongs to its interval, an
    end does not)."""
    return [sum(start <= point < end for start, end in spans) for point in points]
