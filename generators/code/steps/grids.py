"""Steps from grids and mazes to grids, lists and numbers."""

from __future__ import annotations

from generators.code.steps.base import GRID, INT, INTS, MAZE, WORDS, step


@step(GRID, GRID, 1)
def transpose(grid: list[list[int]]) -> list[list[int]]:
    """Make rows of the columns, the first column first."""
    return [list(column) for column in zip(*grid, strict=True)]


@step(GRID, GRID, 1)
def turn_right(grid: list[list[int]]) -> list[list[int]]:
    """Turn the grid by 90 degrees clockwise."""
    return [list(column)[::-1] for column in zip(*grid, strict=True)]


@step(GRID, GRID, 2)
def neighbour_sums(grid: list[list[int]]) -> list[list[int]]:
    """Replace each number by the sum of its neighbours above, below, left and right (all as they were
    before this step)."""
    height, width = len(grid), len(grid[0])
    return [
        [
            sum(
                grid[a][b]
                for a, b in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1))
                if 0 <= a < height and 0 <= b < width
            )
            for j in range(width)
        ]
        for i in range(height)
    ]


@step(GRID, GRID, 2)
def drop_down(grid: list[list[int]]) -> list[list[int]]:
    """Zeros are empty places. In each column let the other numbers fall down, in their order, so that all
    empty places are above them."""
    columns = [[0] * column.count(0) + [x for x in column if x] for column in zip(*grid, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


@step(GRID, GRID, 3)
def life_step(grid: list[list[int]]) -> list[list[int]]:
    """Odd numbers are living cells. In the next generation a cell is 1 where it lives and has 2 or 3
    living ones among its up to eight neighbours, or does not live and has 3; otherwise it is 0. Replace
    the grid by that generation."""
    height, width = len(grid), len(grid[0])
    after = []
    for i in range(height):
        row = []
        for j in range(width):
            rows = range(max(0, i - 1), min(height, i + 2))
            columns = range(max(0, j - 1), min(width, j + 2))
            near = sum(grid[a][b] % 2 for a in rows for b in columns) - grid[i][j] % 2
            row.append(int(near == 3 or (near == 2 and grid[i][j] % 2 == 1)))
        after.append(row)
    return after


@step(GRID, GRID, 3)
def prefix_sums_2d(grid: list[list[int]]) -> list[list[int]]:
    """Replace each number by the sum of all numbers that are neither below it nor to the right of it,
    itself included."""
    return [
        [sum(sum(row[: j + 1]) for row in grid[: i + 1]) for j in range(len(grid[0]))]
        for i in range(len(grid))
    ]


@step(GRID, INTS, 1)
def row_sums(grid: list[list[int]]) -> list[int]:
    """Take the sum of each row, from top to bottom."""
    return [sum(row) for row in grid]


@step(GRID, INTS, 1)
def column_maxima(grid: list[list[int]]) -> list[int]:
    """Take the largest number of each column, from left to right."""
    return [max(column) for column in zip(*grid, strict=True)]


@step(GRID, INTS, 3)
def spiral(grid: list[list[int]]) -> list[int]:
    """Take the numbers in a spiral: the top row from the left, then down the right side, back along the
    bottom, up the left side, and so on inwards."""
    rows, taken = [list(row) for row in grid], list[int]()
    while rows:
        taken += rows.pop(0)
        rows = [list(column) for column in zip(*rows, strict=True)][::-1]
    return taken


@step(GRID, INTS, 2)
def diagonal_sums(grid: list[list[int]]) -> list[int]:
    """Take the sums of the diagonals that run from the lower left to the upper right, beginning with that
    of the upper left corner alone."""
    sums = [0] * (len(grid) + len(grid[0]) - 1)
    for i, row in enumerate(grid):
        for j, x in enumerate(row):
            sums[i + j] += x
    return sums


@step(GRID, INTS, 2)
def snake(grid: list[list[int]]) -> list[int]:
    """Take the numbers row by row from the top, the first row from the left, the second from the right,
    and so on in turn."""
    return [x for i, row in enumerate(grid) for x in (row[::-1] if i % 2 else row)]


@step(GRID, INT, 4)
def cheapest_way(grid: list[list[int]]) -> int:
    """Take the smallest sum of numbers on a way from the upper left to the lower right corner that goes
    right and down only, both corners included."""
    best: dict[tuple[int, int], int] = {}
    for i, row in enumerate(grid):
        for j, x in enumerate(row):
            before = [best[place] for place in ((i - 1, j), (i, j - 1)) if place in best]
            best[i, j] = x + min(before, default=0)
    return best[len(grid) - 1, len(grid[0]) - 1]


@step(GRID, INT, 4)
def largest_region(grid: list[list[int]]) -> int:
    """Take the size of the largest region of equal numbers, cells being neighbours above, below, left and
    right."""
    left = {(i, j): x for i, row in enumerate(grid) for j, x in enumerate(row)}
    best = 0
    while left:
        place, value = left.popitem()
        waiting, size = [place], 0
        while waiting:
            i, j = waiting.pop()
            size += 1
            for near in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
                if left.get(near) == value:
                    del left[near]
                    waiting.append(near)
        best = max(best, size)
    return best


@step(GRID, INT, 4)
def num_islands(grid: list[list[int]]) -> int:
    """Zeros are water, all other numbers land. Count the islands, land being joined above, below, left
    and right."""
    land = {(i, j) for i, row in enumerate(grid) for j, x in enumerate(row) if x}
    count = 0
    while land:
        waiting, count = [land.pop()], count + 1
        while waiting:
            i, j = waiting.pop()
            near = {(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)} & land
            land -= near
            waiting += near
    return count


@step(GRID, INT, 5)
def longest_rising_way(grid: list[list[int]]) -> int:
    """Take the number of cells on the longest way on which each number is larger than the one before,
    going above, below, left or right."""
    cells = {(i, j): x for i, row in enumerate(grid) for j, x in enumerate(row)}
    best: dict[tuple[int, int], int] = {}
    for i, j in sorted(cells, key=lambda place: cells[place]):
        near = ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1))
        below = [best[place] for place in near if place in cells and cells[place] < cells[i, j]]
        best[i, j] = 1 + max(below, default=0)
    return max(best.values())


@step(GRID, INT, 4)
def largest_square(grid: list[list[int]]) -> int:
    """Take the side of the largest square of cells none of which is 0; 0 where there is none."""
    side: dict[tuple[int, int], int] = {}
    for i, row in enumerate(grid):
        for j, x in enumerate(row):
            around = (side.get(place, 0) for place in ((i - 1, j), (i, j - 1), (i - 1, j - 1)))
            side[i, j] = 1 + min(around) if x else 0
    return max(side.values())


@step(GRID, INT, 2)
def saddle_points(grid: list[list[int]]) -> int:
    """Count the cells whose number is the smallest of its row and the largest of its column (others may
    equal it)."""
    columns = list(zip(*grid, strict=True))
    return sum(x == min(row) and x == max(columns[j]) for row in grid for j, x in enumerate(row))


@step(MAZE, INT, 4)
def shortest_escape(maze: list[str]) -> int:
    """Take the fewest moves (up, down, left, right, over free cells) from the upper left to the lower
    right cell; 0 where there is no way."""
    height, width = len(maze), len(maze[0])
    seen, wave, count = {(0, 0)}, {(0, 0)}, 0
    while wave:
        if (height - 1, width - 1) in wave:
            return count
        near = {p for i, j in wave for p in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1))}
        wave = {(i, j) for i, j in near if 0 <= i < height and 0 <= j < width and maze[i][j] == "."} - seen
        seen |= wave
        count += 1
    return 0


@step(MAZE, INT, 3)
def reachable_cells(maze: list[str]) -> int:
    """Count the free cells that can be reached from the upper left cell by going up, down, left and right
    over free cells, that cell included."""
    seen, waiting = {(0, 0)}, [(0, 0)]
    while waiting:
        i, j = waiting.pop()
        for a, b in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
            inside = 0 <= a < len(maze) and 0 <= b < len(maze[0])
            if inside and maze[a][b] == "." and (a, b) not in seen:
                seen.add((a, b))
                waiting.append((a, b))
    return len(seen)


@step(MAZE, INT, 4)
def ways_down(maze: list[str]) -> int:
    """Count the ways from the upper left to the lower right cell over free cells that go right and down
    only."""
    ways: dict[tuple[int, int], int] = {}
    for i, row in enumerate(maze):
        for j, cell in enumerate(row):
            before = ways.get((i - 1, j), 0) + ways.get((i, j - 1), 0)
            ways[i, j] = (before or int(i == j == 0)) * (cell == ".")
    return ways[len(maze) - 1, len(maze[0]) - 1]


@step(MAZE, INTS, 1)
def walls_by_row(maze: list[str]) -> list[int]:
    """Count the walls of each row, from top to bottom."""
    return [row.count("#") for row in maze]


@step(MAZE, INTS, 2)
def corridors(maze: list[str]) -> list[int]:
    """Take the lengths of all longest runs of free cells within a row, row by row from the top, each from
    the left."""
    return [len(run) for row in maze for run in row.split("#") if run]


@step(MAZE, MAZE, 2)
def block_dead_ends(maze: list[str]) -> list[str]:
    """Make a wall of each free cell but the upper left one that has exactly one free neighbour above,
    below, left and right (all as they were before this step)."""
    free = {(i, j) for i, row in enumerate(maze) for j, cell in enumerate(row) if cell == "."}
    dead = {
        (i, j)
        for i, j in free - {(0, 0)}
        if len({(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)} & free) == 1
    }
    return [
        "".join("." if (i, j) in free - dead else "#" for j in range(len(maze[0]))) for i in range(len(maze))
    ]


@step(MAZE, WORDS, 3)
def walk_right_hand(maze: list[str]) -> list[str]:
    """A robot in the upper left cell looks right. Ten times it turns right by 90 degrees, then, while the
    cell before it is a wall or outside, left by 90 degrees (at most four times), and goes one cell on if
    that is free. Take the directions ("right", "down", "left", "up") in which it moved, in order."""
    names, moves = ("right", "down", "left", "up"), list[str]()
    i = j = facing = 0
    for _ in range(10):
        facing = (facing + 1) % 4
        for _ in range(5):
            a, b = i + (0, 1, 0, -1)[facing], j + (1, 0, -1, 0)[facing]
            if 0 <= a < len(maze) and 0 <= b < len(maze[0]) and maze[a][b] == ".":
                i, j = a, b
                moves.append(names[facing])
                break
            facing = (facing - 1) % 4
    return moves
