"""Reports of tests: (text, suite) for all-or-nothing, (text, suite, which, share) for shares."""

from ludus.rewards.suites import Suite

PAIR = Suite(("a", "b"))
BOTH = Suite(("a", "b"), ("c",))
HIDDEN = Suite(("a", "b"), ("c", "d"), hidden=frozenset({"b", "d"}))
WEIGHED = Suite(("a", "b", "c"), weights={"a": 2, "c": 0})
LONG = Suite(tuple(f"tests/test_x.py::test_{i}[é {i}]" for i in range(2_000)))
ALL = '{"a": true, "b": true, "c": true}'

ACCEPTED = [
    ('{"a": true, "b": true}', PAIR),
    ('{"b": true, "a": true}', PAIR),
    ('{"a": true, "b": true, "z": false}', PAIR),
    (' \n{"a":true,"b":true}\n', PAIR),
    ('{"passed": {"a": true, "b": true}}', PAIR),
    ('{"passed": {"a": true, "b": true}, "seconds": 1, "memory_bytes": 5}', PAIR),
    ('{"passed": {"a": true, "b": true}, "seconds": null}', PAIR),
    (ALL, BOTH),
    ('{"a": true, "b": true, "c": true, "d": true}', HIDDEN),
    (ALL, WEIGHED),
    ("{" + ",".join(f'"{test}": true' for test in LONG.fail_to_pass) + "}", LONG),
    ('{"passed": true}', Suite(("passed",))),
    ('{"passed": {"passed": true}}', Suite(("passed",))),
    ('{"": true}', Suite(("",))),
]
REJECTED = [
    ("", PAIR),
    ("{}", PAIR),
    ("all passed", PAIR),
    ("2 passed in 0.1s", PAIR),
    ("true", PAIR),
    ("null", PAIR),
    ("[]", PAIR),
    ('["a", "b"]', PAIR),
    ('[{"a": true, "b": true}]', PAIR),
    ('{"a": true}', PAIR),
    ('{"a": true, "b": false}', PAIR),
    ('{"a": true, "b": null}', PAIR),
    ('{"a": true, "b": 1}', PAIR),
    ('{"a": true, "b": "true"}', PAIR),
    ('{"a": true, "b": "passed"}', PAIR),
    ('{"a": true, "b": [true]}', PAIR),
    ('{"a": true, "B": true}', PAIR),
    ('{"a": true, "b ": true}', PAIR),
    ('{"a": false, "b": false, "a": true, "b": true}', PAIR),
    ('{"a": true, "b": true} {"a": true}', PAIR),
    ('{"a": true, "b": true', PAIR),
    ('{"passed": ["a", "b"]}', PAIR),
    ('{"passed": {"a": true}}', PAIR),
    ('{"passed": {"a": true}, "b": true}', PAIR),
    ('{"passed": {"a": true, "b": true}, "seconds": NaN}', PAIR),
    ('{"a": true, "b": true}', BOTH),
    ('{"a": true, "b": true, "c": false}', BOTH),
    ('{"a": false, "b": true, "c": true}', BOTH),
    ('{"c": true}', BOTH),
    ('{"a": true, "c": true}', HIDDEN),
    (ALL, HIDDEN),
    ('{"a": true, "b": true}', WEIGHED),
    ("{" + ",".join(f'"{test}": true' for test in LONG.fail_to_pass[1:]) + "}", LONG),
    ("[" * 100_000, PAIR),
]
SHARES = [
    ("", PAIR, "all", 0.0),
    ("{}", PAIR, "fail_to_pass", 0.0),
    ('{"a": true}', PAIR, "all", 0.5),
    ('{"a": true, "z": true}', PAIR, "all", 0.5),
    ('{"a": true}', BOTH, "all", 1 / 3),
    ('{"a": true}', BOTH, "fail_to_pass", 0.5),
    ('{"a": true}', BOTH, "pass_to_pass", 0.0),
    ('{"c": true}', BOTH, "pass_to_pass", 1.0),
    ('{"a": true}', PAIR, "pass_to_pass", 1.0),
    ('{"a": true, "c": true}', HIDDEN, "visible", 1.0),
    ('{"a": true, "c": true}', HIDDEN, "hidden", 0.0),
    ('{"a": true, "d": true}', HIDDEN, "hidden", 0.5),
    ('{"a": true}', WEIGHED, "all", 2 / 3),
    ('{"b": true, "c": true}', WEIGHED, "all", 1 / 3),
    ('{"c": true}', WEIGHED, "all", 0.0),
]
