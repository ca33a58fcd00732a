"""The tools `sql` and `schema`: results, error messages, and restrictions."""

import asyncio
import resource
import sqlite3
import time

import pytest

from ludus.envs.tool_env import ToolExecutor
from ludus.tools.sql import Database, SqlError, SqlLimits, as_table, schema_tool, sql_tool
from ludus.types import Action, Message, ToolCall


def image(script):
    connection = sqlite3.connect(":memory:")
    connection.executescript(script)
    return connection.serialize()


SCRIPT = """
CREATE TABLE author (id INTEGER PRIMARY KEY, name TEXT, born INTEGER);
CREATE TABLE book (id INTEGER PRIMARY KEY, title TEXT, price REAL, author_id INTEGER REFERENCES author (id));
INSERT INTO author VALUES (1, 'Ada', 1950), (2, 'Boris', NULL);
INSERT INTO book VALUES (1, 'Sand', 2.5, 1), (2, 'Salt', 10.0, 1), (3, 'Two
lines', NULL, 2);
"""
IMAGE = image(SCRIPT)
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT {} FROM c"


def ask(text, **settings):
    return Database(IMAGE, **settings).query(text)


def refusal(text, **settings):
    with pytest.raises(SqlError) as error:
        ask(text, **settings)
    return str(error.value)


def test_query_returns_a_table_with_row_count():
    told = sql_tool(Database(IMAGE)).function(query="SELECT title, price FROM book ORDER BY id")
    assert told == "title | price\nSand | 2.5\nSalt | 10\nTwo lines | NULL\n(3 rows)"
    one = sql_tool(Database(IMAGE)).function(query="SELECT COUNT(*) AS n FROM book;")
    assert one == "n\n3\n(1 row)"
    assert sql_tool(Database(IMAGE)).function(query="SELECT 1 AS x WHERE 0") == "x\n(0 rows)"


def test_long_results_are_truncated_and_rows_counted():
    limits = SqlLimits(rows=2, counted=50, cell=5)
    ninety = ENDLESS.format("x") + " LIMIT {}"
    assert as_table(ask(ninety.format(40), limits=limits), limits) == "x\n1\n2\n(40 rows, 2 shown)"
    assert as_table(ask(ninety.format(90), limits=limits), limits).endswith("(more than 50 rows, 2 shown)")
    assert as_table(ask("SELECT 'abcdefgh' AS x", limits=limits), limits) == "x\nabcde...\n(1 row)"


def test_the_schema_shows_columns_types_keys_and_sample_rows():
    schema = schema_tool(Database(IMAGE), samples=1).function
    assert schema() == (
        "author(id INTEGER PRIMARY KEY, name TEXT, born INTEGER)\n"
        "book(id INTEGER PRIMARY KEY, title TEXT, price REAL, author_id INTEGER -> author.id)"
    )
    assert schema(table="AUTHOR") == (
        "author(id INTEGER PRIMARY KEY, name TEXT, born INTEGER)\nid | name | born\n1 | Ada | 1950\n(2 rows, 1 shown)"
    )
    with pytest.raises(SqlError, match=r"no such table: boks\. Nearest: book\. Tables: author, book"):
        schema(table="boks")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("SELECT * FROM boks", "no such table: boks. Nearest: book. Tables: author, book"),
        ("SELECT titel FROM book", "no such column: titel. Nearest: book.title"),
        ("SELECT b.Nam FROM book AS b", "no such column: b.Nam. Nearest: author.name"),
        ("SELECT zzzz FROM book", "no such column: zzzz"),
        ("SELEC 1", 'near "SELEC": syntax error'),
        ("SELECT 1; SELECT 2", "You can only execute one statement at a time."),
        ("SELECT id FROM book, author", "ambiguous column name: id"),
        ("SELECT '\ud800'", "the query is not valid text"),
        ("SELECT 1 -- " + "x" * 5000, "the query has 5012 characters; 4000 are allowed"),
    ],
)
def test_query_errors_have_helpful_messages(query, words):
    assert refusal(query) == words


FORBIDDEN = {
    "ATTACH 'other.db' AS other": "ATTACH and VACUUM are not allowed",
    "VACUUM INTO 'copy.db'": "ATTACH and VACUUM are not allowed",
    "VACUUM": "ATTACH and VACUUM are not allowed",
    "DETACH main": "DETACH is not allowed",
    "BEGIN": "BEGIN, COMMIT and ROLLBACK are not allowed",
    "SAVEPOINT x": "SAVEPOINT is not allowed",
    "PRAGMA query_only = OFF": "PRAGMA query_only is not allowed",
    "PRAGMA max_page_count = 99999999": "PRAGMA max_page_count is not allowed",
    "PRAGMA hard_heap_limit = 0": "PRAGMA hard_heap_limit is not allowed",
    "UPDATE sqlite_master SET sql = ''": "may not be modified",
    "PRAGMA writable_schema = 1": "PRAGMA writable_schema is not allowed",
    "SELECT load_extension('x.so')": "the function load_extension is not allowed",
    "SELECT random()": "the function random is not allowed",
    "CREATE TRIGGER t AFTER INSERT ON book BEGIN SELECT 1; END": "this kind of statement is not allowed",
    "CREATE TEMP TABLE x (a)": "not allowed here",
    "CREATE VIRTUAL TABLE x USING fts5(a)": "not allowed here",
}
WRITES = {
    "INSERT INTO author VALUES (3, 'Chen', 1)": "INSERT is not allowed here: the database is read-only",
    "UPDATE book SET price = 0": "UPDATE is not allowed here: the database is read-only",
    "DELETE FROM book": "DELETE is not allowed here: the database is read-only",
    "DROP TABLE book": "not allowed here: the database is read-only",
    "CREATE TABLE x (a)": "not allowed here: the database is read-only",
    "ALTER TABLE book ADD COLUMN x": "not allowed here: the database is read-only",
}


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("query", FORBIDDEN)
def test_statements_beyond_the_tables_are_rejected(query, writable, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert FORBIDDEN[query] in refusal(query, writable=writable)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("query", WRITES)
def test_writes_are_rejected_if_read_only_and_kept_if_writable(query):
    database = Database(IMAGE)
    with pytest.raises(SqlError, match=WRITES[query]):
        database.query(query)
    assert database.image == IMAGE
    writable = Database(IMAGE, writable=True)
    assert as_table(writable.query(query), writable.limits) == "Done."
    assert writable.image != IMAGE


def test_failed_write_leaves_the_database_unchanged():
    database = Database(IMAGE, writable=True)
    with pytest.raises(SqlError, match="UNIQUE constraint failed"):
        database.query("INSERT INTO author VALUES (7, 'new', 1), (1, 'again', 2)")
    assert database.image == IMAGE
    database.query("INSERT INTO author VALUES (7, 'new', 1)")
    assert database.query("SELECT COUNT(*) FROM author").rows == ((3,),)


def test_informational_pragmas_are_allowed():
    assert [row[1] for row in ask("PRAGMA table_info(author)").rows] == ["id", "name", "born"]
    assert ask("SELECT name FROM pragma_table_info('book')").total == 4


TRIMS = f"SELECT length(''{' || trim(a, b)' * 200}) FROM "
TRIMS += "(SELECT replace(hex(zeroblob(2450)), '0', 'a') AS a, "
TRIMS += "replace(hex(zeroblob(200)), '0', 'b') || 'a' AS b)"
BOOKS = ", ".join(f"book AS b{n}" for n in range(20))
HOSTILE = {
    ENDLESS.format("COUNT(*)"): "too many steps",
    f"SELECT COUNT(*) FROM {BOOKS}": "too many steps",
    "SELECT hex(zeroblob(1000000000))": "too big",
    "SELECT replace(hex(zeroblob(9000)), '0', 'aaaaaaaa')": "too big",
    "SELECT group_concat(a.title, b.title) FROM sqlite_master AS a": "no such column",
    f"SELECT {'(' * 900}1{')' * 900}": "stack overflow|too large|too deep",
    "SELECT printf('%.*c', 500000000, 'x')": "at most three digits",
    "SELECT 0" + ", printf('%500000000s', 1)" * 40: "at most three digits",
    "SELECT format('%' || '.*c', 500000000, 'x')": "at most three digits",
    "SELECT length(printf(CAST('%!09999.1f' AS BLOB), 1))": "at most three digits",
    TRIMS: "more than 50 calls of functions",
    "SELECT '" + "a" * 90 + "' LIKE '" + "%a" * 60 + "b'": "too complex",
}


@pytest.mark.parametrize("query", HOSTILE)
def test_hostile_queries_are_stopped_within_five_seconds(query):
    begin = time.thread_time()
    with pytest.raises(SqlError, match=HOSTILE[query]):
        ask(query, limits=SqlLimits(steps=500_000))
    assert time.thread_time() - begin < 5


def test_many_slow_function_calls_finish_within_five_seconds():
    begin = time.thread_time()
    assert ask(TRIMS.replace(" || trim(a, b)", "", 160)).rows == ((0,),)
    assert time.thread_time() - begin < 5


@pytest.mark.parametrize(
    ("query", "due"),
    [
        ("SELECT printf('%.2f', AVG(price)) FROM book", "6.25"),
        ("SELECT format('%-5s|%05.1f|%d%%', name, 2.25, 7) FROM author LIMIT 1", "Ada  |002.3|7%"),
        ("SELECT printf('%,d %s %Q', 1234567, NULL, 'it''s')", "1,234,567  'it''s'"),
        (f"SELECT printf('{'%999d' * 700}', 1)", None),
        ("SELECT printf()", None),
        ("SELECT printf(NULL)", None),
        ("SELECT printf(12.5)", "12.5"),
    ],
)
def test_formats_of_ordinary_width_behave_as_in_sqlite(query, due):
    assert ask(query).rows == ((due,),)


def test_schema_samples_of_an_endless_view_are_stopped():
    endless = Database(IMAGE, writable=True, limits=SqlLimits(steps=200_000, counted=10**9))
    endless.query(f"CREATE VIEW forever AS {ENDLESS.format('x')}")
    assert "forever(x )" in endless.describe()
    with pytest.raises(SqlError, match="too many steps"):
        endless.describe("forever", samples=3)


def test_step_limit_is_deterministic():
    limits = SqlLimits(steps=20_000, seconds=60)
    for bound in (1_000, 100_000):
        query = f"SELECT COUNT(*) FROM ({ENDLESS.format('x')} LIMIT {bound})"
        told = []
        for _ in range(2):
            try:
                told.append(ask(query, limits=limits).rows)
            except SqlError as error:
                told.append(str(error))
        assert told[0] == told[1]
    assert told[0] == "the query was stopped: it takes too many steps"


def test_time_limit_holds_with_a_large_step_limit():
    assert "longer than 0.1 s" in refusal(ENDLESS.format("COUNT(*)"), limits=SqlLimits(steps=10**12, seconds=0.1))


def test_query_memory_is_limited():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    blobs = (
        "WITH RECURSIVE c(x, n) AS (SELECT zeroblob(4900), 1 UNION SELECT zeroblob(4900), n + 1 FROM c) "
        "SELECT COUNT(*) FROM c"
    )
    assert refusal(blobs, limits=SqlLimits(memory=32 * 2**20, seconds=60)) == "the query needs too much memory"
    rows = ENDLESS.replace("{}", "zeroblob(4900)").replace("WITH", "INSERT INTO author (name) WITH")
    assert "full" in refusal(rows, writable=True) or "memory" in refusal(rows, writable=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB
    assert ask("SELECT COUNT(*) FROM book").rows == ((3,),)


def test_huge_output_is_truncated_and_rows_counted():
    toolbox = ToolExecutor([sql_tool(Database(IMAGE))])
    call = ToolCall("1", "sql", {"query": ENDLESS.format("hex(zeroblob(2400)), x")})
    (outcome,) = asyncio.run(toolbox.run(Action(Message(role="assistant", content=""), (call,))))
    assert outcome.status == "ok"
    assert len(outcome.output) < 2100
    assert outcome.output.endswith("(more than 10000 rows, 20 shown)")


def test_sql_error_is_returned_as_an_observation():
    toolbox = ToolExecutor([sql_tool(Database(IMAGE)), schema_tool(Database(IMAGE))])
    calls = (ToolCall("1", "sql", {"query": "SELECT nam FROM author"}), ToolCall("2", "schema", {}))
    wrong, right = asyncio.run(toolbox.run(Action(Message(role="assistant", content=""), calls)))
    assert (wrong.status, wrong.output) == ("raised", "Error: SqlError: no such column: nam. Nearest: author.name")
    assert right.status == "ok"


def test_concurrent_queries_are_independent():
    toolbox = ToolExecutor([sql_tool(Database(IMAGE, limits=SqlLimits(steps=200_000)))])
    texts = [ENDLESS.format("COUNT(*)"), "SELECT COUNT(*) AS n FROM book"] * 4
    calls = tuple(ToolCall(str(n), "sql", {"query": text}) for n, text in enumerate(texts))
    told = asyncio.run(toolbox.run(Action(Message(role="assistant", content=""), calls)))
    assert [outcome.status for outcome in told] == ["raised", "ok"] * 4
    assert {outcome.output for outcome in told[1::2]} == {"n\n3\n(1 row)"}
