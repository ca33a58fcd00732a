"""Result sets: (JSON of the rows, truth)."""

from ludus.rewards.rows import Rows

PEOPLE = Rows((("Eve", 30), ("Bo", 25), ("Bo", 25)))
SORTED = Rows((("Eve", 30), ("Bo", 25)), ordered=True)
FREE = Rows((("Eve", 30, 1.5), ("Bo", 25, 2.5)), columns_free=True)
FREE_SORTED = Rows((("Eve", 30), ("Bo", 25)), ordered=True, columns_free=True)
NUMBER, NOTHING, NULL = Rows(((1,),)), Rows(()), Rows(((None,),))
FLOATS = Rows(((0.3,), (1e6,)), tolerance=1e-6)
CLOSE = Rows(((1.0,), (1.1,), (1.2,)), tolerance=0.11)
SAME = Rows(((1, 2), (2, 1)), columns_free=True)

ACCEPTED = [
    ('[["Eve", 30], ["Bo", 25], ["Bo", 25]]', PEOPLE),
    ('[["Bo", 25], ["Eve", 30], ["Bo", 25]]', PEOPLE),
    ('[["Bo", 25.0], ["Eve", 30], ["Bo", 25]]', PEOPLE),
    ('[["Eve", 30], ["Bo", 25]]', SORTED),
    ('[["Eve", 30, 1.5], ["Bo", 25, 2.5]]', FREE),
    ('[[30, "Eve", 1.5], [25, "Bo", 2.5]]', FREE),
    ('[[2.5, "Bo", 25], [1.5, "Eve", 30]]', FREE),
    ('[[30, "Eve"], [25, "Bo"]]', FREE_SORTED),
    ("[[1]]", NUMBER),
    ("[[1.0]]", NUMBER),
    ("[]", NOTHING),
    ("[]", Rows((), columns_free=True)),
    ("[[null]]", NULL),
    ("[[0.30000000000000004], [1000000]]", FLOATS),
    ("[[1000000.5], [0.3]]", FLOATS),
    ("[[1.1], [1.2], [1.3]]", CLOSE),
    ("[[1.2], [1.1], [0.9]]", CLOSE),
    ("[[2, 1], [1, 2]]", SAME),
    ('[["a", 1], ["b", 2]]', Rows((("b", 2), ("a", 1)))),
    ("[[true], [1]]", Rows(((1,), (True,)))),
    ("[[9007199254740993]]", Rows(((9007199254740993,),))),
    ("[[], []]", Rows(((), ()))),
]
REJECTED = [
    ("", PEOPLE),
    ("[]", PEOPLE),
    ('[["Eve", 30], ["Bo", 25]]', PEOPLE),
    ('[["Eve", 30], ["Eve", 30], ["Bo", 25]]', PEOPLE),
    ('[["Eve", 30], ["Bo", 25], ["Bo", 25], ["Bo", 25]]', PEOPLE),
    ('[["Eve", "30"], ["Bo", 25], ["Bo", 25]]', PEOPLE),
    ('[["eve", 30], ["Bo", 25], ["Bo", 25]]', PEOPLE),
    ('[["Eve "  , 30], ["Bo", 25], ["Bo", 25]]', PEOPLE),
    ('[[30, "Eve"], [25, "Bo"], [25, "Bo"]]', PEOPLE),
    ('[["Eve"], ["Bo"], ["Bo"]]', PEOPLE),
    ('[["Eve", 30, 0], ["Bo", 25, 0], ["Bo", 25, 0]]', PEOPLE),
    ('[["Eve", 25], ["Bo", 30], ["Bo", 25]]', PEOPLE),
    ('[["Bo", 25], ["Eve", 30]]', SORTED),
    ('[[30, "Eve"], [25, "Bo"]]', SORTED),
    ('[[25, "Bo"], [30, "Eve"]]', FREE_SORTED),
    ('[[30, "Eve", 1.5], ["Bo", 25, 2.5]]', FREE),
    ('[[30, "Eve", 2.5], [25, "Bo", 1.5]]', FREE),
    ('[["Eve", 30], ["Bo", 25]]', FREE),
    ("[[1, 2], [1, 2]]", SAME),
    ("[[true]]", NUMBER),
    ('[["1"]]', NUMBER),
    ("[[null]]", NUMBER),
    ("[[1], [1]]", NUMBER),
    ("[1]", NUMBER),
    ("1", NUMBER),
    ('{"rows": [[1]]}', NUMBER),
    ("[[[1]]]", NUMBER),
    ('[[{"a": 1}]]', NUMBER),
    ("[[1]] -- one row", NUMBER),
    ("[[NaN]]", NUMBER),
    ("[[null]]", NOTHING),
    ("[[]]", NOTHING),
    ("[[0]]", NULL),
    ('[[""]]', NULL),
    ("[[false]]", NULL),
    ('[["None"]]', NULL),
    ("[]", NULL),
    ("[[0]]", Rows((("",),))),
    ("[[0]]", Rows(((False,),))),
    ("[[0.31], [1000000]]", FLOATS),
    ("[[0.3], [1000002]]", FLOATS),
    ("[[1.1], [1.1], [1.5]]", CLOSE),
    ("[[1.3], [1.3], [1.0]]", CLOSE),
    ("[[9007199254740992]]", Rows(((9007199254740993,),), tolerance=0.0)),
    ("[[1], [1]]", Rows(((1,), (True,)))),
    ("[[1e999]]", NUMBER),
]
