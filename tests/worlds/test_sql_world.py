"""The SQL world: questions are sound and varied, and only correct queries earn a reward."""

import asyncio
import hashlib
import json
import random
import sqlite3
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise

import pytest
from generators.reports.shared import variety
from generators.reports.sql import answer_text, majority, no_tool, report, success_by_level, task_shapes
from generators.sql.__main__ import databases_text, draw, draw_pairs, questions_text
from generators.sql.compose import HELD_OUT, MOST_ROWS, features, forgetful, shape_of, weakened
from generators.sql.databases import Naming, make_rows, make_tables
from generators.sql.domains import DOMAINS, ColumnKind
from generators.sql.query import Attribute, AverageCondition, Listing, QueryPlan, SortOrder, Test, level_of, points
from generators.sql.render import to_sql, to_words

from ludus.config.sections.rollout import EnvConfig, RolloutConfig
from ludus.envs.registry import build_world
from ludus.envs.task_archive import SPLITS
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError, UserError
from ludus.evaluation import scripted_agents as scripted
from ludus.recipes import recipe_folder
from ludus.rewards.base import check_rewards, success
from ludus.rollouts.episode import run_episode
from ludus.types import Action, Message, StopReason, ToolCall
from ludus.worlds.sql import questions as data
from ludus.worlds.sql.grader import is_right, make_truth, paraphrases, returns_rows
from ludus.worlds.sql.questions import FILES, LEVELS, make_image
from ludus.worlds.sql.world import SqlFlaws, SqlSettings, SqlWorld, make_sql_world, solve

Test.__test__ = False
WORLD = SqlWorld()
README = recipe_folder("sql") / "README.md"


def shapes_by_level(questions):
    return {int(level): found.num_shapes for level, found in variety(task_shapes(questions)).items()}


@pytest.fixture(scope="module")
def questions():
    """Every question."""
    return list(chain.from_iterable(WORLD.questions.values()))


@pytest.fixture(scope="module")
def drawn():
    """The questions as they are drawn, by their ids."""
    found = [question for _, question in draw("default", 600)]
    return {f"{one.pair.key}:{data.digest(one.sql):016x}": one for one in found}


@pytest.fixture(scope="module")
def redrawn(questions):
    """Some questions, each with itself as it is drawn."""
    found = {f"{one.pair.key}:{data.digest(one.sql):016x}": one for _, one in draw("default", 150)}
    return [(question, found[question.id]) for question in questions if question.id in found]


def some(items, num, seed=0):
    return random.Random(seed).sample(list(items), num)


# Databases


def test_column_names_are_usable_and_unique():
    for domain in DOMAINS:
        names = [name for table in domain.tables for name in table.names]
        assert len(set(names)) == len(names)
        for table in domain.tables:
            columns = [name for column in table.columns for name in column.names]
            assert len(set(columns)) == len(columns), (domain.name, table.id)
        for place in range(3):
            tables = {t.id: t.names[place] for t in domain.tables}
            columns = {(t.id, c.id): c.names[place] for t in domain.tables for c in t.columns}
            connection = sqlite3.connect(":memory:")
            rows = make_rows(domain, random.Random(place))
            connection.deserialize(make_image(make_tables(domain, Naming(tables, columns), [rows]), False, False))
            for (table, _), column in columns.items():
                connection.execute(f"SELECT {column} FROM {tables[table]} AS a WHERE a.{column} IS NOT NULL")


@pytest.mark.pages
def test_shipped_data_equals_the_generator_output(drawn):
    head, *lines = databases_text(databases=1).splitlines()
    assert [[key, 1] for key in (f"{domain}-0" for domain in data.DOMAINS)] == json.loads(head)
    assert lines == [line for domain in data.DOMAINS for line in data._read("databases")[f"{domain}-0"]]
    for name, num in (("default", 50), ("recipe", 40), ("more", 20)):
        head, *lines = questions_text(name, num).splitlines()
        each = num // len(FILES[name].levels)
        assert lines == [line for found in data._read(name).values() for line in found[:each]]
    own = {q.id: q for found in WORLD.questions.values() for q in found}
    assert own.keys() == drawn.keys()
    assert all(own[key].data == {**one.data, "ordered": one.plan.order is not None} for key, one in drawn.items())


def test_foreign_keys_resolve_and_names_are_unique():
    for pair in draw_pairs(data.DOMAINS, 2):
        assert (pair.image, pair.hidden) == (WORLD.pairs[pair.key].image, WORLD.pairs[pair.key].hidden)
        for image in (pair.image, pair.hidden):
            connection = sqlite3.connect(":memory:")
            connection.deserialize(image)
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
            for table in pair.domain.tables:
                if table.label:
                    name = pair.naming.column(table.id, table.label.id)
                    (twice,) = connection.execute(
                        f"SELECT COUNT(*) - COUNT(DISTINCT {name}) FROM {pair.naming.tables[table.id]}"
                    ).fetchone()
                    assert twice == 0


def test_the_hidden_database_has_the_same_tables_and_other_rows():
    for pair in {q.pair.key: q.pair for q in WORLD.questions["train"]}.values():
        told = []
        for image in (pair.image, pair.hidden):
            connection = sqlite3.connect(":memory:")
            connection.deserialize(image)
            told.append(connection.execute("SELECT sql FROM sqlite_master").fetchall())
            told.append(list(connection.iterdump()))
        assert told[0] == told[2]
        assert told[1] != told[3]


# Questions


def test_there_are_many_tasks_of_every_level_and_domain_and_no_two_have_a_shape_in_common(questions):
    assert len(questions) >= 500
    assert len({q.data["shape"] for q in questions}) == len(questions)
    assert all(number >= 100 for number in shapes_by_level(questions).values())
    assert {q.pair.key.split("-")[0] for q in questions} == {d.name for d in DOMAINS}
    assert len({q.id for q in questions}) == len(questions)
    assert {q.kind for q in questions} == {"query", "value"}


def test_shape_ignores_names_texts_and_numbers():
    one = "SELECT a.name, COUNT(*) FROM sale AS a WHERE a.town = 'O''Hara' AND a.price > 2.5 LIMIT 3"
    other = "SELECT q.title, COUNT(*) FROM visit AS q WHERE q.city = 'Oslo' AND q.fee > 19 LIMIT 8"
    assert shape_of(one) == shape_of(other)
    assert shape_of(one) == "SELECT x , COUNT ( * ) FROM x AS x WHERE x = s AND x > n LIMIT n"
    assert shape_of(one) != shape_of(other.replace(">", "<"))


@pytest.mark.slow
def test_splits_share_no_shape_and_composition_has_held_out_pairs(drawn):
    shapes = {split: {q.data["shape"] for q in WORLD.questions[split]} for split in SPLITS}
    assert all(not shapes[a] & shapes[b] for a in SPLITS for b in SPLITS if a != b)
    assert all(len(found) >= 30 for found in shapes.values())
    assert len({q.level for q in WORLD.questions["composition"]}) == 5
    for split in SPLITS:
        held = [any(pair <= features(drawn[q.id].plan) for pair in HELD_OUT) for q in WORLD.questions[split]]
        assert all(held) if split == "composition" else not any(held)
    known = set().union(*(features(drawn[q.id].plan) for q in WORLD.questions["train"]))
    assert set().union(*HELD_OUT) <= known


def test_split_by_questions_the_three_share_shapes_and_no_question():
    world = SqlWorld(SqlSettings(tasks=120, levels=(1,), per_shape=20, unseen="questions"))
    asked = {s: {(q.pair.key, q.data["text"]) for q in world.questions[s]} for s in SPLITS}
    shapes = {s: {q.data["shape"] for q in world.questions[s]} for s in SPLITS}
    assert all(not asked[a] & asked[b] for a in SPLITS for b in SPLITS if a != b)
    assert shapes["test"] & shapes["train"]
    assert not shapes["composition"] & shapes["train"]


@pytest.mark.slow
def test_gold_results_are_neither_empty_nor_long_and_differ_between_the_databases(questions, drawn):
    for question in questions:
        assert 0 < len(question.rows) <= MOST_ROWS
        assert 0 < len(question.hidden_rows) <= MOST_ROWS
        assert question.rows != question.hidden_rows
        if question.data["ordered"]:
            order = drawn[question.id].plan.order
            keys = [row[order.column] for row in question.rows]
            assert keys == sorted(set(keys), reverse=order.descending)


def test_difficulty_grows_with_the_level():
    shop = DOMAINS[0]
    name, price = Attribute((), "name"), Attribute((), "price")
    country = Attribute(("supplier_id",), "country")
    plan = QueryPlan(shop, "product", Listing((name,)))
    assert (points(plan), level_of(plan)) == (0, 1)
    cheap = replace(plan, conditions=(Test(price, "below", (9,)),))
    assert level_of(cheap) == 1
    assert level_of(replace(cheap, order=SortOrder(0, True))) == 2
    far = replace(cheap, conditions=(*cheap.conditions, Test(country, "is", ("Peru",))))
    assert (points(far), level_of(far)) == (2, 3)
    nested = replace(far, conditions=(*far.conditions, AverageCondition(price, "above")))
    assert (points(nested), level_of(nested)) == (5, 5)


def test_question_and_query_express_the_same_plan():
    shop = DOMAINS[0]
    plan = QueryPlan(
        shop,
        "sale",
        Listing((Attribute((), "day"), Attribute(("product_id", "supplier_id"), "country"))),
        (Test(Attribute((), "quantity"), "at least", (4,)),),
        SortOrder(0, True, 3),
    )
    naming = Naming({t.id: t.id for t in shop.tables}, {(t.id, c.id): c.id for t in shop.tables for c in t.columns})
    assert to_words(plan) == (
        "Of the sales whose quantity is at least 4, list the day and product's supplier's country, ordered "
        "by day, latest first, only the first 3 rows."
    )
    assert to_sql(plan, naming) == (
        "SELECT a.day, c.country FROM sale AS a JOIN product AS b ON b.id = a.product_id JOIN supplier AS c "
        "ON c.id = b.supplier_id WHERE a.quantity >= 4 ORDER BY a.day DESC LIMIT 3"
    )


# Verdicts


def test_gold_answer_of_every_question_is_right(questions):
    assert [q.id for q in questions if not is_right(answer_text(q), make_truth(q))] == []


def written_down(question):
    """A query that gives the rows of the shown database without looking at it."""

    def cell(value):
        return "NULL" if value is None else repr(value) if not isinstance(value, str) else f"'{value}'"

    rows = [f"SELECT {', '.join(map(cell, row))}" for row in question.rows]
    return " UNION ALL ".join(rows)


@pytest.mark.parametrize(
    ("asked", "answer", "formed"), [("SELECT 1", "SELECT 1", 1), ("SELECT 1", "SELECT 2", 0), ("", "Done.", 0)]
)
def test_format_reward_needs_a_query_that_ran(asked, answer, formed):
    task = next(t for t in WORLD.tasks("test") if t.tags["answer"] == "query")
    turns = [scripted.call_action(0, ("sql", {"query": asked}))] if asked else []
    (played,) = play(WORLD, [task], [Player([one.message for one in (*turns, scripted.text_action(answer))])])
    assert (played.rewards["result_set"], played.rewards["well_formed"]) == (0, formed)


def test_memorized_rows_are_right_only_on_the_shown_database(questions):
    asked = [q for q in questions if q.kind == "query" and len(written_down(q)) < 4000]
    for question in asked:
        truth = make_truth(question)
        assert returns_rows(written_down(question), truth.image, truth.rows), question.sql
        assert not is_right(written_down(question), truth), question.sql
    assert len(asked) > 300


@pytest.mark.slow
def test_echoes_and_other_answers_have_no_reward(questions):
    by_database = {}
    for question in questions:
        by_database.setdefault(question.pair.key, []).append(question)
    for group in by_database.values():
        for question, other in zip(group, [*group[1:], group[0]], strict=True):
            truth = make_truth(question)
            for said in ("", "I do not know.", "SELECT 1", "SELECT NULL", question.data["text"], answer_text(other)):
                assert not is_right(said, truth), (said, question.sql)


def test_a_query_that_leaves_a_part_of_the_question_out_is_wrong(redrawn):
    tried = 0
    for question, made in some([pair for pair in redrawn if pair[0].kind == "query"], 80):
        for plan in weakened(made.plan):
            tried += 1
            assert not is_right(to_sql(plan, made.pair.naming), make_truth(question)), question.sql
    assert tried > 80


def test_equivalent_queries_are_accepted(questions, redrawn):
    question = next(q for q in questions if q.kind == "query" and len(q.rows) > 1 and not q.data["ordered"])
    truth = make_truth(question)
    assert is_right(f"```sql\n{question.sql};\n```", truth)
    assert is_right(f"WITH found AS ({question.sql}) SELECT * FROM found ORDER BY 1 DESC", truth)
    assert not is_right(f"The query is {question.sql}", truth)
    assert not is_right(f"SELECT * FROM ({question.sql}) UNION ALL SELECT * FROM ({question.sql})", truth)
    assert not is_right(f"SELECT *, 1 FROM ({question.sql})", truth)
    ordered, made = next(pair for pair in redrawn if pair[0].kind == "query" and pair[0].data["ordered"])
    turned = replace(made.plan, order=replace(made.plan.order, descending=not made.plan.order.descending))
    assert not is_right(to_sql(turned, made.pair.naming), make_truth(ordered))


def test_text_answer_may_be_in_a_sentence_or_a_box(questions):
    asked = next(q for q in questions if q.kind == "value" and isinstance(q.rows[0][0], str))
    truth, text = make_truth(asked), asked.rows[0][0]
    for right in (text, f"The answer is {text}.", f"It is \\boxed{{{text}}}.", *paraphrases(truth)):
        assert is_right(right, truth)
    for wrong in (f"The answer is not {text}", f"It is {text}.", f"\\boxed{{{text}}} or \\boxed{{none}}"):
        assert not is_right(wrong, truth)


def test_numeric_answer_is_compared_to_two_decimals(questions):
    asked = [q for q in questions if q.kind == "value"]
    fraction = next(q for q in asked if isinstance(q.rows[0][0], float) and q.rows[0][0] % 1)
    truth, value = make_truth(fraction), fraction.rows[0][0]
    assert is_right(f"{value:.2f}", truth)
    assert not is_right(f"{value + 0.02:.2f}", truth)
    assert not is_right(fraction.sql, truth)
    whole = next(q for q in asked if isinstance(q.rows[0][0], int))
    assert is_right(str(whole.rows[0][0]), make_truth(whole))
    assert not is_right(str(whole.rows[0][0] + 1), make_truth(whole))
    assert all(isinstance(q.rows[0][0], str) or q.rows[0][0] >= 10 for q in asked)


@pytest.mark.parametrize(
    "query",
    [
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT COUNT(*) FROM c",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT x FROM c",
        "ATTACH 'x.db' AS x",
        "SELECT hex(zeroblob(900000000))",
        "DROP TABLE sale",
        "SELECT x'00'",
    ],
)
def test_hostile_answers_are_wrong_and_leave_the_truth_unchanged(query, questions):
    question = next(q for q in questions if q.kind == "query")
    truth = make_truth(question)
    assert not is_right(query, truth)
    assert is_right(question.sql, truth)


# Playing it


@dataclass
class Player:
    """Says the assistant messages that were written for it."""

    messages: list
    segments: tuple = ()
    seen: list = field(default_factory=list)

    def open(self, messages, tools):
        self.seen += messages

    def observe(self, messages):
        self.seen += messages

    def close(self):
        pass

    async def act(self):
        message = self.messages.pop(0)
        calls = tuple(
            ToolCall(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", [])
        )
        return Action(message, calls)


def play(world, tasks, players):
    async def everyone():
        limits = RolloutConfig(max_turns=8)
        pairs = zip(tasks, players, strict=True)
        return [await run_episode(task, 0, world.environment(task), who, limits) for task, who in pairs]

    return asyncio.run(everyone())


def expert_player(world, task):
    return Player([m for m in world.expert(task).messages if m["role"] == "assistant"])


@pytest.mark.slow
def test_the_expert_solves_tasks_of_every_level_in_the_real_environment():
    for split in SPLITS:
        tasks = [t for level in LEVELS for t in WORLD.tasks(split) if t.tags["family"] == f"level {level}"]
        tasks = some(tasks, 30)
        played = play(WORLD, tasks, [expert_player(WORLD, task) for task in tasks])
        assert all(success(WORLD.rewards, t) for t in played)
        assert all(t.reward == pytest.approx(1.1) for t in played)
        assert {t.stop_reason for t in played} == {StopReason.ANSWERED}
        assert all([o.tool for o in t.outcomes] == ["schema", "sql"] for t in played)


def test_visible_data_does_not_depend_on_truth_or_hidden_rows(questions, drawn):
    tasks = some(WORLD.tasks("test"), 20)
    honest = [expert_player(WORLD, task) for task in tasks]
    play(WORLD, tasks, honest)
    golds = {q.id: q for q in questions}
    naughty = make_truth(golds[tasks[0].id])
    blind = [expert_player(WORLD, task) for task in tasks]
    play(WORLD, [replace(task, truth=naughty, id="x") for task in tasks], blind)
    assert [player.seen for player in blind] == [player.seen for player in honest]
    for task in tasks:
        assert golds[task.id].sql not in str(task.prompt)
        assert task.tags.keys() == {"split", "family", "answer", "database"}
        _, sql = WORLD.environment(task).tools
        files = sql.function(query="SELECT COUNT(*) AS n FROM sqlite_master WHERE type = 'table'")
        assert files.split("\n")[1] == str(len(drawn[task.id].pair.domain.tables))


def test_rewards_cannot_be_earned_by_their_form():
    check_rewards(WORLD.rewards)
    assert [(part.name, part.weight, part.outcome) for part in WORLD.rewards] == [
        ("result_set", 1.0, True),
        ("shown_rows", 0.0, False),
        ("well_formed", 0.1, False),
    ]


def test_literal_rows_are_distinguished_in_the_rewards():
    task = next(t for t in WORLD.tasks("test") if t.tags["answer"] == "query")
    (question,) = [q for q in WORLD.questions["test"] if q.id == task.id]
    cheat = Player([Message(role="assistant", content=written_down(question))])
    (played,) = play(WORLD, [task], [cheat])
    assert (played.rewards["shown_rows"], played.rewards["result_set"]) == (1.0, 0.0)


def test_baselines_without_the_loop_earn_little(questions):
    told = report(WORLD)
    print(told)
    assert told in README.read_text("utf-8")
    train, test = WORLD.questions["train"], WORLD.questions["test"]
    for guess, bound in ((no_tool(train), 0.15), (majority(train), 0.05)):
        rates = success_by_level(test, guess)
        assert set(rates) == set(LEVELS)
        right = sum(is_right(guess(q), make_truth(q)) for q in test) / len(test)
        assert right < bound
    assert [line.split()[:3] for line in told.splitlines()[1:6]] == [
        [str(level), str(sum(q.level == level for q in questions)), str(number)]
        for level, number in shapes_by_level(questions).items()
    ]


def test_names_in_the_question_make_schema_lookups_unnecessary():
    plain = SqlWorld(SqlSettings(tasks=40, vary_names=False))
    asked = list(chain.from_iterable(plain.questions.values()))
    assert all(query == plain for q in asked for query, plain in (q.data["queries"], *q.data["forgetful"]))
    varied = {q.data["text"]: q for found in SqlWorld(SqlSettings(tasks=40)).questions.values() for q in found}
    assert {q.data["text"]: (q.rows, q.hidden_rows) for q in asked} == {
        t: (q.rows, q.hidden_rows) for t, q in varied.items()
    }
    assert all(q.sql == varied[q.data["text"]].data["queries"][1] for q in asked)
    assert any(q.sql != varied[q.data["text"]].sql for q in asked)


# Demonstrations


def test_demonstrations_are_training_tasks_with_real_tool_outputs():
    asked = {q.data["text"] for q in WORLD.questions["train"]}
    for dialogue in islice(WORLD.demonstrations(5), 150):
        system, user, *said = dialogue.messages
        assert user["content"].split("\n")[0] in asked
        assert system["role"] == "system"
        assert said[-1]["role"] == "assistant"
        assert not said[-1].get("tool_calls")
        for call, output in pairwise(said):
            for made in call.get("tool_calls", []):
                arguments = json.loads(made["function"]["arguments"])
                (tool,) = [t for t in dialogue.tools if t.name == made["function"]["name"]]
                if not output["content"].startswith("Error"):
                    assert output["content"] == tool.function(**arguments)


def shown(flaws, num=80):
    """Questions and the messages that an expert with these flaws writes."""
    rng = random.Random(3)
    for question in some(WORLD.questions["train"], num):
        yield question, solve(question, WORLD.tools(question.pair.key), flaws, rng)


def test_the_flaws_come_as_often_as_set(drawn):
    right = [is_right(m[-1]["content"], make_truth(q)) for q, m in shown(SqlFlaws(0, 0, 0))]
    assert all(right)
    slipped = list(shown(SqlFlaws(0, 0, 1)))
    assert all("Error: SqlError: " in m[3]["content"] for _, m in slipped)
    assert all(is_right(m[-1]["content"], make_truth(q)) for q, m in slipped)
    assert all(len(m) == 1 for q, m in shown(SqlFlaws(0, 1, 0)) if q.kind == "query")
    forgot = list(shown(SqlFlaws(1, 0, 0)))
    could = [(q, m) for q, m in forgot if q.data["forgetful"]]
    assert len(could) > 40
    wrong = [not is_right(m[-1]["content"], make_truth(q)) for q, m in could if q.kind == "query"]
    assert sum(wrong) / len(wrong) > 0.95
    for question, messages in forgot:
        plan = drawn[question.id].plan
        assert len(question.data["forgetful"]) == len(plan.conditions) + (plan.order is not None)
        assert [to_sql(less, drawn[question.id].pair.naming) for less in forgetful(plan)] == [
            query for query, _ in question.data["forgetful"]
        ]
        if not question.data["forgetful"] and question.kind == "query":
            assert messages[-1]["content"] == question.sql


def test_the_transcript_of_the_readme_is_a_real_one():
    question = next(q for q in WORLD.questions["train"] if q.id == "clinic-1:32ddee292758d70f")
    page = README.read_text("utf-8")
    assert question.data["text"] in page
    for message in solve(question, WORLD.tools(question.pair.key), SqlFlaws(0, 0, 1), random.Random(1)):
        assert f"{message['role']}: {message['content']}" in page or message["tool_calls"]
        for call in message.get("tool_calls", []):
            assert call["function"]["arguments"] in page


def test_texts_contain_the_dialogues():
    texts = list(islice(WORLD.texts(), 400))
    assert any("INTEGER PRIMARY KEY" in text for text in texts)
    assert any(text.startswith('{"name": "sql", "arguments": {"query": "SELECT') for text in texts)


# Settings


DIGEST = """
import hashlib
from itertools import islice
from ludus.worlds.sql.world import SqlSettings, SqlWorld
world = SqlWorld(SqlSettings(tasks=25))
print(hashlib.sha256(repr([world.tasks(split) for split in world.splits]).encode()).hexdigest())
print(hashlib.sha256(repr([q.pair.hidden for q in world.questions["test"]]).encode()).hexdigest())
print(hashlib.sha256(repr([d.messages for d in islice(world.demonstrations(1), 20)]).encode()).hexdigest())
"""


@pytest.mark.slow
def test_equal_settings_give_equal_tasks_and_demonstrations_in_every_process(capsys):
    told = subprocess.run(
        [sys.executable, "-c", DIGEST],
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": "4242", "PYTHONPATH": ":".join(sys.path)},
        check=True,
        timeout=300,
    )
    exec(DIGEST, {})
    assert told.stdout == capsys.readouterr().out
    assert len(hashlib.sha256().hexdigest()) == len(told.stdout.split()[0])


def test_another_seed_selects_other_tasks():
    ids = [[t.id for t in SqlWorld(SqlSettings(tasks=10, levels=(1,), seed=s)).tasks("train")] for s in (0, 1)]
    assert ids[0] != ids[1]


def test_settings_choose_levels_domains_and_answers():
    world = SqlWorld(SqlSettings(tasks=15, levels=(2,), domains=("clinic",), answers="value", per_shape=5))
    asked = list(chain.from_iterable(world.questions.values()))
    assert {q.level for q in asked} == {2}
    assert {q.pair.key for q in asked} <= {"clinic-0", "clinic-1"}
    assert len(asked) == 15
    assert {q.kind for q in asked} == {"value"}
    assert max(Counter(q.data["shape"] for q in asked).values()) <= 5
    none = SqlWorld(SqlSettings(tasks=10, levels=(1,), access="none"))
    assert none.environment(none.tasks("train")[0]).tools == ()


def test_world_is_built_from_a_configuration_and_errors_are_reported():
    rollout = RolloutConfig(max_tool_output=99, tool_timeout_s=3.0)
    made = build_world(EnvConfig(name="sql", settings={"levels": [1], "tasks": 20}), rollout)
    assert (made.settings.levels, made.limits) == ((1,), ToolLimits(3.0, 99))
    for settings, word in (
        ({"level": [1]}, "the nearest is env.settings.levels"),
        ({"levels": [6]}, "env.settings.levels.0"),
        ({"domains": []}, "env.settings.domains"),
        ({"databases": 9}, "less than or equal to 8"),
        ({"well_formed_weight": 0.5}, "less than 0.5"),
    ):
        with pytest.raises(ConfigError) as refusal:
            make_sql_world(settings, ToolLimits())
        assert word in refusal.value.message
    with pytest.raises(UserError, match="no split 'tests'"):
        WORLD.tasks("tests")


def test_columns_of_every_kind_are_there():
    kinds = {column.kind for domain in DOMAINS for table in domain.tables for column in table.columns}
    assert kinds == set(ColumnKind)
    assert len(DOMAINS) >= 5
