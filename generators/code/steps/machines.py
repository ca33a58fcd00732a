"""Steps that simulate machines, games and queues."""

from __future__ import annotations

import random

from generators.code.steps.base import INT, INTS, TABLE, TEXT, WORDS, StepKind, step


def _program(rng: random.Random, size: int) -> list[str]:
    lines = []
    for i in range(size):
        name = rng.choice("ab")
        lines.append(
            rng.choice(
                (
                    f"set {name} {rng.randint(0, 9)}",
                    f"add {name} {rng.randint(1, 5)}",
                    f"add {name} {rng.choice('ab')}",
                    f"skip {name} {rng.randint(1, 3)}",
                    f"add {rng.choice('ab')} {i}",
                )
            )
        )
    return lines


def _moves(rng: random.Random, size: int) -> str:
    return "".join(rng.choice("FFFLRB") for _ in range(2 * size))


def _stack_code(rng: random.Random, size: int) -> list[str]:
    return [
        rng.choice((str(rng.randint(0, 9)), str(rng.randint(0, 9)), *"+*", "dup", "swap", "drop"))
        for _ in range(size)
    ]


def _orders(rng: random.Random, size: int) -> list[str]:
    names = ("ann", "bob", "cy")
    kinds = ("pay {0} {2}", "pay {0} {2}", "send {0} {1} {2}", "send {0} {1} {2}", "close {0} {1} {2}")
    return [
        rng.choice(kinds).format(rng.choice(names), rng.choice(names), rng.randint(1, 20)).strip()
        for _ in range(size)
    ]


PROGRAM = StepKind(
    "program",
    "list[str]",
    "a program for a machine with two registers a and b that are 0 at first: lines set R N, add R N, "
    "add R S (R and S are "
    "registers, N a number) and skip R N, which passes over the next N lines where R is even; possibly empty",
    _program,
    "lines",
)
MOVES = StepKind(
    "moves",
    "str",
    "moves of a robot that stands at (0, 0) and looks up (y grows upwards): F goes one forward, B one"
    " back, L and R turn by 90 "
    "degrees; possibly empty",
    _moves,
    "text",
)
STACK = StepKind(
    "stack",
    "list[str]",
    "a program for a stack of numbers, empty at first: a number is put on it, + and * replace the "
    "upper two by their sum or "
    "product, dup puts the top on it once more, swap exchanges the upper two, drop removes the top; a"
    " word for which the stack "
    "holds too little does nothing; possibly empty",
    _stack_code,
    "words",
)
ORDERS = StepKind(
    "orders",
    "list[str]",
    "orders for accounts that are 0 at first: pay A N puts N on A, send A B N moves N from A to B if "
    "A has as much, close A B N "
    "moves all that A has to B if that is less than N; possibly empty",
    _orders,
    "lines",
)


@step(PROGRAM, INT, 3)
def run_registers(lines: list[str]) -> int:
    """Run the program and take a minus b in the end."""
    registers, place = {"a": 0, "b": 0}, 0
    while place < len(lines):
        what, name, value = lines[place].split()
        if what == "skip":
            place += int(value) if registers[name] % 2 == 0 else 0
        elif what == "set":
            registers[name] = int(value)
        else:
            registers[name] += registers[value] if value in registers else int(value)
        place += 1
    return registers["a"] - registers["b"]


@step(PROGRAM, INTS, 4)
def trace_registers(lines: list[str]) -> list[int]:
    """Run the program and take the places, counted from 1, of the lines that are run, in order, each
    followed by the value that b has after it."""
    registers, place, trace = {"a": 0, "b": 0}, 0, list[int]()
    while place < len(lines):
        what, name, value = lines[place].split()
        at = place
        if what == "skip":
            place += int(value) if registers[name] % 2 == 0 else 0
        elif what == "set":
            registers[name] = int(value)
        else:
            registers[name] += registers[value] if value in registers else int(value)
        trace += [at + 1, registers["b"]]
        place += 1
    return trace


@step(PROGRAM, WORDS, 2)
def last_written(lines: list[str]) -> list[str]:
    """Without running the program, take for each line with add the word "twice" where the line before it
    has the same register in the same place (right after its first word), and otherwise the word
    "once"."""
    said = []
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("add"):
            said.append("twice" if before.split()[1:2] == line.split()[1:2] else "once")
    return said


@step(MOVES, INTS, 3)
def robot_place(moves: str) -> list[int]:
    """Take the place [x, y] of the robot in the end."""
    x = y = facing = 0
    for move in moves:
        if move in "LR":
            facing = (facing + (1 if move == "R" else -1)) % 4
        else:
            sign = 1 if move == "F" else -1
            x, y = x + sign * (0, 1, 0, -1)[facing], y + sign * (1, 0, -1, 0)[facing]
    return [x, y]


@step(MOVES, INT, 4)
def places_seen_twice(moves: str) -> int:
    """Count the places at which the robot stands more than once in all (the first place counts from the
    beginning; turning does not count as standing again)."""
    x = y = facing = 0
    seen = [(0, 0)]
    for move in moves:
        if move in "LR":
            facing = (facing + (1 if move == "R" else 3)) % 4
        else:
            sign = 1 if move == "F" else -1
            x, y = x + sign * (0, 1, 0, -1)[facing], y + sign * (1, 0, -1, 0)[facing]
            seen.append((x, y))
    return sum(seen.count(place) > 1 for place in set(seen))


@step(MOVES, TEXT, 2)
def tidy_moves(moves: str) -> str:
    """Remove LR, RL, FB and BF from the moves, the leftmost first, again and again until there are none
    (what comes together by that counts too); take what is left as a text."""
    opposite, left = {"L": "R", "R": "L", "F": "B", "B": "F"}, list[str]()
    for move in moves:
        if left and left[-1] == opposite[move]:
            left.pop()
        else:
            left.append(move)
    return "".join(left)


@step(STACK, INTS, 3)
def run_stack(code: list[str]) -> list[int]:
    """Run the program and take the stack in the end, the top last."""
    stack: list[int] = []
    for word in code:
        if word.isdigit():
            stack.append(int(word))
        elif word in "+*" and len(stack) > 1:
            a, b = stack.pop(), stack.pop()
            stack.append(a + b if word == "+" else a * b)
        elif word == "swap" and len(stack) > 1:
            stack[-1], stack[-2] = stack[-2], stack[-1]
        elif word == "dup" and stack:
            stack.append(stack[-1])
        elif word == "drop" and stack:
            stack.pop()
    return stack


@step(STACK, INT, 3)
def deepest_stack(code: list[str]) -> int:
    """Run the program and take the largest number of numbers that the stack holds at one time."""
    depth = deepest = 0
    for word in code:
        if word.isdigit():
            depth += 1
        elif word == "dup":
            depth += depth > 0
        elif word == "drop":
            depth -= depth > 0
        elif word in "+*":
            depth -= depth > 1
        deepest = max(deepest, depth)
    return deepest


@step(ORDERS, TABLE, 3)
def balances(orders: list[str]) -> dict[str, int]:
    """Carry the orders out and give what each account has in the end that is named in them."""
    accounts: dict[str, int] = {}
    for order in orders:
        what, *names, number = order.split()
        amount = int(number)
        for name in names[: 1 if what == "pay" else 2]:
            accounts.setdefault(name, 0)
        if what == "pay":
            accounts[names[0]] += amount
            continue
        moved = amount if what == "send" else accounts[names[0]]
        if (what == "send" and accounts[names[0]] >= amount) or (what == "close" and moved < amount):
            accounts[names[0]] -= moved
            accounts[names[1]] += moved
    return accounts


@step(ORDERS, INTS, 2)
def paid_in(orders: list[str]) -> list[int]:
    """Take the numbers of all orders that pay, in order."""
    return [int(order.split()[-1]) for order in orders if order.startswith("pay")]


@step(INTS, INT, 4, size=(2, 3))
def cache_hits(xs: list[int], size: int) -> int:
    """The numbers are asked for one after the other. A store holds {size} numbers; a number that is not
    in it is put into it, and if it is full the one goes that was asked for longest ago. Count how often a
    number is in the store when it is asked for."""
    store: list[int] = []
    hits = 0
    for x in xs:
        if x in store:
            hits += 1
            store.remove(x)
        elif len(store) == size:
            store.pop(0)
        store.append(x)
    return hits


@step(INTS, INTS, 4, turn=(2, 4))
def round_robin(xs: list[int], turn: int) -> list[int]:
    """The numbers are the times that jobs need (those below 1 are done at once, at time 0). A machine
    works on the jobs in turn, in their order, {turn} units of time or less at a time, and puts a job that
    is not done behind all others. Replace each number by the time at which its job is done."""
    left, done, now = list(xs), [0] * len(xs), 0
    queue = [i for i, x in enumerate(xs) if x > 0]
    while queue:
        job = queue.pop(0)
        used = min(turn, left[job])
        now, left[job] = now + used, left[job] - used
        if left[job]:
            queue.append(job)
        else:
            done[job] = now
    return done


@step(INTS, INTS, 3, desks=(2, 3))
def waiting_times(xs: list[int], desks: int) -> list[int]:
    """The numbers are the times that customers need (those below 0 count as 0); all come at once and are
    served in their order at {desks} desks, each by the desk that is free first. Replace each number by
    how long that customer waits before being served."""
    free, waited = [0] * desks, list[int]()
    for x in xs:
        first = free.index(min(free))
        waited.append(free[first])
        free[first] += max(x, 0)
    return waited


@step(INTS, INT, 4)
def card_game(xs: list[int]) -> int:
    """Deal the numbers to two players in turn. In each round both show their next number; the larger one
    wins, its player puts the winner's number and then the other one under their own numbers; equal
    numbers both go. Play until one has none left or 50 rounds are over; take the number of rounds."""
    first, second, rounds = xs[::2], xs[1::2], 0
    while first and second and rounds < 50:
        a, b = first.pop(0), second.pop(0)
        rounds += 1
        if a > b:
            first += [a, b]
        elif b > a:
            second += [b, a]
    return rounds


@step(INTS, INTS, 3, rounds=(2, 5))
def share_with_right(xs: list[int], rounds: int) -> list[int]:
    """The numbers are sweets of children in a ring. {rounds} times, all at once, each child that has 1 or
    more gives half of its sweets, rounded down, to the child to its right (the last gives to the first).
    Take the sweets in the end."""
    for _ in range(rounds):
        given = [max(x, 0) // 2 for x in xs]
        xs = [x - given[i] + given[i - 1] for i, x in enumerate(xs)]
    return xs


@step(INTS, INT, 3)
def steps_until_out(xs: list[int]) -> int:
    """Begin at the first place. The number there says how many places to go (right, or left where it is
    below 0); each time a place is left, its number becomes larger by 1. Count the moves until a place
    outside the list is reached, 100 at most; 0 for an empty list."""
    xs, place, moves = list(xs), 0, 0
    while 0 <= place < len(xs) and moves < 100:
        xs[place] += 1
        place += xs[place] - 1
        moves += 1
    return moves


@step((TEXT, INTS), TEXT, 4)
def type_with_undo(text: str, xs: list[int]) -> str:
    """The numbers are commands for an editor whose text is empty at first. A number above 0 appends that
    many of the next characters of the given text (fewer where it ends); one below 0 removes that many
    characters from the end (fewer where there are fewer); 0 takes back the last command that is not taken
    back yet (characters that were typed do not come again). Take the editor's text."""
    states, used = [""], 0
    for x in xs:
        if x > 0:
            states.append(states[-1] + text[used : used + x])
            used += x
        elif x < 0:
            states.append(states[-1][: max(0, len(states[-1]) + x)])
        elif len(states) > 1:
            states.pop()
    return states[-1]


@step((WORDS, INTS), WORDS, 3)
def move_to_front(words: list[str], xs: list[int]) -> list[str]:
    """For each number, in order: take the word at the place that its remainder on division by the number
    of words says (counted from 0) and put it to the front of the list. Take the words in the end."""
    words = list(words)
    for x in xs:
        if words:
            words.insert(0, words.pop(x % len(words)))
    return words
