"""Steps from graphs and road maps to lists and numbers."""

from __future__ import annotations

from generators.code.steps.base import EDGES, INT, INTS, ROADS, step


@step(EDGES, INT, 3)
def num_components(edges: list[list[int]]) -> int:
    """Count the connected parts of the graph."""
    parent = {node: node for edge in edges for node in edge}

    def root(node: int) -> int:
        while parent[node] != node:
            node = parent[node]
        return node

    for a, b in edges:
        parent[root(a)] = root(b)
    return sum(node == above for node, above in parent.items())


@step(EDGES, INTS, 3)
def component_sizes(edges: list[list[int]]) -> list[int]:
    """Take the numbers of nodes of the connected parts of the graph, largest first."""
    near: dict[int, list[int]] = {}
    for a, b in edges:
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    sizes, seen = list[int](), set[int]()
    for start in near:
        if start in seen:
            continue
        waiting, size = [start], 0
        seen.add(start)
        while waiting:
            size += 1
            for node in near[waiting.pop()]:
                if node not in seen:
                    seen.add(node)
                    waiting.append(node)
        sizes.append(size)
    return sorted(sizes, reverse=True)


@step(EDGES, INTS, 1)
def degrees(edges: list[list[int]]) -> list[int]:
    """Take the number of edges of each node, in the order of the nodes' numbers, smallest first."""
    ends = [node for edge in edges for node in edge]
    return [ends.count(node) for node in sorted(set(ends))]


@step(EDGES, INTS, 2)
def leaves(edges: list[list[int]]) -> list[int]:
    """Take the nodes that have exactly one edge, smallest first."""
    ends = [node for edge in edges for node in edge]
    return sorted(node for node in ends if ends.count(node) == 1)


@step(EDGES, EDGES, 2)
def prune_leaves(edges: list[list[int]]) -> list[list[int]]:
    """Remove all edges one of whose nodes has only that edge (all as they were before this step); the
    others keep their order."""
    ends = [node for edge in edges for node in edge]
    return [[a, b] for a, b in edges if ends.count(a) > 1 and ends.count(b) > 1]


@step(EDGES, EDGES, 1)
def odd_edges(edges: list[list[int]]) -> list[list[int]]:
    """Keep only the edges whose two nodes have an odd sum, or of which one node is the double of the
    other."""
    return [[a, b] for a, b in edges if (a + b) % 2 or a == 2 * b or b == 2 * a]


@step(EDGES, INT, 3)
def count_triangles(edges: list[list[int]]) -> int:
    """Count the sets of three nodes that are all joined to each other."""
    near: dict[int, set[int]] = {}
    for a, b in edges:
        near.setdefault(a, set()).add(b)
        near.setdefault(b, set()).add(a)
    return sum(len(near[a] & near[b]) for a, b in edges) // 3


@step(EDGES, INTS, 3)
def distances(edges: list[list[int]]) -> list[int]:
    """Take for each node, in the order of their numbers, the fewest edges on a way to it from the node
    with the smallest number, or -1 where there is no way."""
    near: dict[int, list[int]] = {}
    for a, b in edges:
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    wave = [min(near)] if near else []
    found, away = dict.fromkeys(wave, 0), 0
    while wave:
        away += 1
        wave = [node for node in near if node not in found and any(here in near[node] for here in wave)]
        found |= dict.fromkeys(wave, away)
    return [found.get(node, -1) for node in sorted(near)]


@step(EDGES, INTS, 4)
def topological_order(edges: list[list[int]]) -> list[int]:
    """Read each edge [a, b] as "a before b". Take the nodes in an order that keeps to this, at each place
    the smallest node that can come next; stop where none can."""
    nodes = sorted({node for edge in edges for node in edge})
    order: list[int] = []
    while True:
        ready = [n for n in nodes if n not in order and all(a in order for a, b in edges if b == n)]
        if not ready:
            return order
        order.append(ready[0])


@step(EDGES, INT, 4)
def two_sides(edges: list[list[int]]) -> int:
    """Count the connected parts of the graph whose nodes can be put on two sides so that every edge joins
    the two sides."""
    near: dict[int, list[int]] = {}
    for a, b in edges:
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    side, count = dict[int, int](), 0
    for start in near:
        if start in side:
            continue
        side[start], waiting, fine = 0, [start], True
        while waiting:
            here = waiting.pop()
            for node in near[here]:
                if node not in side:
                    side[node] = 1 - side[here]
                    waiting.append(node)
                fine = fine and side[node] != side[here]
        count += fine
    return count


@step(EDGES, INTS, 4)
def bridges(edges: list[list[int]]) -> list[int]:
    """Take the places in the list, counted from 1, of the edges without which the graph has more
    connected parts (the nodes stay)."""

    def parts(left: list[list[int]]) -> int:
        label = {node: node for edge in edges for node in edge}
        for a, b in left:
            old, new = label[a], label[b]
            label = {node: new if mark == old else mark for node, mark in label.items()}
        return len(set(label.values()))

    whole = parts(edges)
    return [i + 1 for i in range(len(edges)) if parts(edges[:i] + edges[i + 1 :]) > whole]


@step(EDGES, INT, 4)
def widest_distance(edges: list[list[int]]) -> int:
    """Take the largest distance of two nodes that are connected, in edges on a shortest way; 0 for no
    edges."""
    nodes = sorted({node for edge in edges for node in edge})
    far = {(a, b): 0 if a == b else len(nodes) for a in nodes for b in nodes}
    for a, b in edges:
        far[a, b] = far[b, a] = 1
    for mid in nodes:
        for a in nodes:
            for b in nodes:
                far[a, b] = min(far[a, b], far[a, mid] + far[mid, b])
    return max((d for d in far.values() if d < len(nodes)), default=0)


@step(EDGES, INTS, 3)
def greedy_colours(edges: list[list[int]]) -> list[int]:
    """In the order of their numbers, smallest first, give each node the smallest number of 1 or more that
    none of its neighbours has yet; take these numbers in that order."""
    near: dict[int, set[int]] = {}
    for a, b in edges:
        near.setdefault(a, set()).add(b)
        near.setdefault(b, set()).add(a)
    colour: dict[int, int] = {}
    for node in sorted(near):
        used = {colour.get(other) for other in near[node]}
        colour[node] = next(c for c in range(1, len(near) + 1) if c not in used)
    return list(colour.values())


@step(ROADS, INT, 4)
def spanning_cost(roads: list[list[int]]) -> int:
    """Take the smallest total length of roads that keep all towns connected that are so now; 0 for no
    roads."""
    label = {town: town for a, b, _ in roads for town in (a, b)}
    cost = 0
    for a, b, length in sorted(roads, key=lambda road: road[2]):
        if label[a] != label[b]:
            cost += length
            old, new = label[a], label[b]
            label = {town: new if mark == old else mark for town, mark in label.items()}
    return cost


@step(ROADS, INTS, 5)
def road_distances(roads: list[list[int]]) -> list[int]:
    """Take for each town, in the order of their numbers, the length of the shortest way to it from the
    town with the smallest number, or -1 where there is no way."""
    towns = sorted({town for a, b, _ in roads for town in (a, b)})
    best = dict.fromkeys(towns[:1], 0)
    for _ in towns:
        for a, b, length in [*roads, *([b, a, length] for a, b, length in roads)]:
            if a in best and best[a] + length < best.get(b, best[a] + length + 1):
                best[b] = best[a] + length
    return [best.get(town, -1) for town in towns]


@step(ROADS, INT, 5)
def widest_way(roads: list[list[int]]) -> int:
    """The numbers w are the greatest loads that the roads bear. Take the greatest load that can be
    brought from the town with the smallest number to the one with the largest; 0 where there is no
    way."""
    towns = {town for a, b, _ in roads for town in (a, b)}
    label = {town: town for town in towns}
    for a, b, load in sorted(roads, key=lambda road: -road[2]):
        old, new = label[a], label[b]
        label = {town: new if mark == old else mark for town, mark in label.items()}
        if label[min(towns)] == label[max(towns)]:
            return load
    return 0


@step(ROADS, EDGES, 2, k=(4, 8))
def short_roads(roads: list[list[int]], k: int) -> list[list[int]]:
    """Keep only the roads of a length of {k} or less and leave out the lengths: what is left is a list of
    pairs, the edges of a graph."""
    return [[a, b] for a, b, length in roads if length <= k]


@step(ROADS, INTS, 2)
def town_lengths(roads: list[list[int]]) -> list[int]:
    """Take for each town, in the order of their numbers, the total length of its roads."""
    towns = sorted({town for a, b, _ in roads for town in (a, b)})
    return [sum(length for a, b, length in roads if town in (a, b)) for town in towns]


@step((EDGES, INT), INTS, 3)
def reach_within(edges: list[list[int]], n: int) -> list[int]:
    """Take the nodes, smallest first, to which a way leads from the smallest node by no more edges than
    the remainder of the number on division by 5; none for no edges."""
    reached = {min((node for edge in edges for node in edge), default=0)}
    for _ in range(n % 5):
        reached |= {node for edge in edges if reached & set(edge) for node in edge}
    return sorted(reached) if edges else []
