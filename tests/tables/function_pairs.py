"""Calls of the world `functions`, derived: (calls made, gold calls); a call is its name and arguments."""

from ludus.worlds.functions.grader import GoldCall

ITEM, OTHER = "fig tree", "pear"


def _gold(name, optional=(), after=(), **accepted):
    return GoldCall(name, {key: (value,) for key, value in accepted.items()}, frozenset(optional), tuple(after))


VALUES = {
    "email": ("ann@example.org", ["Ann@Example.org"], ["ann@example.com", "ann", "", None]),
    "negative": (-3.5, [-3.5 - 1e-12], ["-3.5", 3.5, -3, None, [-3.5], {"value": -3.5}]),
    "sentence": ("Call me at 9.", ["call  me at 9."], ["Call me at 9", "Call me at 10.", "at 9.", None, 9]),
    "flags": ([True, False], [[True, False]], [[1, 0], ["true", "false"], [False, True], [True], True, None]),
    "text": (ITEM, ["Fig Tree", " fig  tree ", "FIG TREE"], ["figtree", "fig", "fig tree!", "", None, 1, [ITEM]]),
    "accented": ("Zoë", ["ZOË", "zoë "], ["Zoe", "Zo\u00eb?", "Z", None, ["Zoë"], 0, True]),
    "whole": (7, [7.0, 7 + 1e-12], ["7", 8, -7, 7.5, True, None, [7]]),
    "zero": (0, [0.0, -0.0], [False, None, "", "0", [], 1, {}]),
    "one": (1, [1.0, 1], [True, "1", [1], None, 2, -1, 1.01]),
    "decimal": (2.5, [2.5 + 1e-11, 2.5], ["2.5", 2, 3, -2.5, None, [2.5], True]),
    "large": (10**16, [1e16, 10**16], [10**16 + 2, 1e15, "1e16", None, True, [], -(10**16)]),
    "true": (True, [True], [1, "true", False, None, "True", [True], 1.0]),
    "false": (False, [False], [0, "false", True, None, "", [], 0.0]),
    "null": (None, [None], [0, "", False, "null", [], {}, "None"]),
    "empty": ("", ["", " "], [None, 0, False, [], "x", "''", {}]),
    "list": ([1, 2], [[1.0, 2], [1, 2.0]], [[2, 1], [1], [1, 2, 2], ["1", "2"], "[1, 2]", [], None]),
    "texts": (
        ["a", "b"],
        [["A", "b"], ["a ", "B"]],
        [["b", "a"], ["a"], "a, b", ["a", "b", "b"], [["a", "b"]], {}, ["a", 1]],
    ),
    "object": (
        {"x": 1, "y": "p"},
        [{"y": "P", "x": 1}, {"x": 1.0, "y": "p"}],
        [{"x": 1}, {"x": 1, "y": "q"}, {"x": "1", "y": "p"}, {}, '{"x": 1}', [1, "p"], {"x": 1, "y": "p", "z": None}],
    ),
    "nested": (
        {"a": [{"b": 1}]},
        [{"a": [{"b": 1.0}]}],
        [
            {"a": {"b": 1}},
            {"a": [{"b": 2}]},
            {"a": [{"b": 1}, {"b": 1}]},
            {"a": [[1]]},
            {"a": []},
            {"b": 1},
            {"a": [{"b": True}]},
        ],
    ),
    "date": (
        "2026-03-04",
        ["2026-03-04 "],
        ["2026-04-03", "04.03.2026", "2026-3-4", 20260304, None, "2026-03-04T00:00", ["2026-03-04"]],
    ),
}
"""A value of each kind, values that count as equal, and values that do not."""
LOOK, BUY = _gold("look", item=ITEM), _gold("buy", optional=("gift",), item=ITEM, number=2, gift=False)
LAST = _gold("pay", after=(1,), total=5.5)
ANY = GoldCall("book", {"day": ("Monday", "2026-03-02"), "hour": (9, "09:00")})
CALLS = ("look", {"item": ITEM}), ("buy", {"item": ITEM, "number": 2}), ("pay", {"total": 5.5})
BOOKED = {"day": "Monday", "hour": 9}


def _right():
    for key, (value, equal, _) in VALUES.items():
        gold = (_gold("f", **{key: value}),)
        yield from (([("f", {key: other})], gold) for other in (value, *equal))
        two = (_gold("f", **{key: value, "more": ITEM}), _gold("g", n=1))
        made = [("f", {"more": ITEM, key: value}), ("g", {"n": 1})]
        yield made, two
        yield made[::-1], two
        yield from (([("g", {"n": 1.0}), ("f", {key: other, "more": "FIG tree"})], two) for other in equal)
        optional = (_gold("f", optional=(key,), **{key: value, "more": ITEM}),)
        yield [("f", {"more": ITEM})], optional
        yield [("f", {"more": ITEM, key: value})], optional
    look, buy, pay = CALLS
    for gold in ((LOOK, BUY), (BUY, LOOK)):
        yield [look, buy], gold
        yield [buy, look], gold
        yield [look, ("buy", {**buy[1], "gift": False})], gold
    yield [look, buy, pay], (LOOK, BUY, LAST)
    yield [buy, pay, look], (LOOK, BUY, LAST)
    yield [buy, look, pay], (LOOK, BUY, LAST)
    yield [look, look], (LOOK, LOOK)
    for hour in (9, "09:00"):
        yield from (([("book", {"day": day, "hour": hour})], (ANY,)) for day in ("monday", "2026-03-02"))


def _wrong():
    for key, (value, _, others) in VALUES.items():
        gold = (_gold("f", **{key: value}),)
        yield from (([("f", {key: other})], gold) for other in others)
        made = ("f", {key: value})
        yield from ((calls, gold) for calls in ([], [made, made], [("g", {key: value})], [("F", {key: value})]))
        yield [("f", {})], gold
        yield [("f", {key.upper(): value})], gold
        yield [("f", {key: value, "more": None})], gold
        yield [made, ("g", {})], gold
        optional = (_gold("f", optional=(key,), **{key: value, "more": ITEM}),)
        yield [("f", {key: value})], optional
        yield [("f", {key: others[0], "more": ITEM})], optional
    look, buy, pay = CALLS
    for calls in ([look], [buy], [look, buy, look], [look, look], [buy, buy], [pay, look], [look, pay], []):
        yield calls, (LOOK, BUY)
    for calls in ([pay, look, buy], [look, pay, buy], [pay, buy, look], [look, buy], [look, buy, pay, pay]):
        yield calls, (LOOK, BUY, LAST)
    for key, value in (("day", "Tuesday"), ("day", 1), ("hour", 10), ("hour", "9"), ("hour", None)):
        yield [("book", {**BOOKED, key: value})], (ANY,)


def _different(pairs):
    return [*{repr(pair): pair for pair in pairs}.values()]


ACCEPTED, REJECTED = _different(_right()), _different(_wrong())
