"""The viewer's index, API and request checks, over a real run."""

import json
import time
from contextlib import closing
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from ludus.errors import UserError
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path, write_rollouts
from ludus.training.run.run_dir import RunFolder
from ludus.types import Segment
from ludus.viewer.index import RolloutIndex, match_text
from ludus.viewer.pages import RunPages, first_difference
from ludus.viewer.server import STATIC, make_app
from tiny_run import copy_run

HOSTILE = "</script><img src=x onerror=alert(1)> lone \ud83d half"
LOCAL = "http://127.0.0.1:8100"


def solved(record):
    return record.trajectory.reward > 0


@pytest.fixture(scope="module")
def run(tiny_run, tmp_path_factory):
    """A run whose first rollout of step 1 has hostile text, and whose rewards differ."""
    run = copy_run(tiny_run, tmp_path_factory.mktemp("viewer"))
    records = list(read_rollouts(rollouts_path(run, 1)))
    messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": HOSTILE})
    changed = [replace(r, trajectory=replace(r.trajectory, reward=float(r.trajectory.sample))) for r in records]
    changed[0] = replace(changed[0], trajectory=replace(changed[0].trajectory, messages=messages))
    write_rollouts(rollouts_path(run, 1), changed)
    last = sorted((run / "evaluations").glob("*.jsonl.gz"))[-1]
    first = [
        replace(r, trajectory=replace(r.trajectory, reward=float(i == 0))) for i, r in enumerate(read_rollouts(last))
    ]
    write_rollouts(last.with_name(earlier(last.name)), first[:-1])
    return run


def earlier(name):
    """The evaluation of the same suite before training."""
    return f"step-000000{name[len('step-000002') :]}"


@pytest.fixture(scope="module")
def index(run):
    index = RolloutIndex(RunFolder(run), solved)
    index.refresh()
    yield index
    index.close()


@pytest.fixture(scope="module")
def client(index):
    return TestClient(make_app(RunPages(index)), base_url=LOCAL)


def rows(client, **query):
    answer = client.get("/api/rollouts", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_rollout_of_training_and_evaluations_is_listed(run, client):
    files = [*(run / "rollouts").glob("*.gz"), *(run / "evaluations").glob("*.gz")]
    stored = [record for file in files for record in read_rollouts(file)]
    found = rows(client, limit=500)
    assert found["total"] == len(found["rows"]) == len(stored)
    assert sorted(row["reward"] for row in found["rows"]) == sorted(r.trajectory.reward for r in stored)
    about = client.get("/api/run").json()
    assert (about["total"], about["steps"], about["running"]) == (len(stored), [1, 2], False)


def test_filters_sorting_and_pages(client):
    everything = rows(client, training=1, limit=500)["rows"]
    failed = rows(client, training=1, solved=0, limit=500)["rows"]
    assert [row["id"] for row in failed] == [row["id"] for row in everything if not row["solved"]]
    best = rows(client, training=1, sort="-reward", limit=2)
    assert best["total"] == len(everything)
    assert [row["reward"] for row in best["rows"]] == sorted((r["reward"] for r in everything), reverse=True)[:2]
    second = rows(client, training=1, sort="-reward", limit=1, offset=1)["rows"]
    assert second == best["rows"][1:]
    low = rows(client, step=1, min_reward=1, max_reward=1, training=1)["rows"]
    assert {row["reward"] for row in low} == {1.0}
    assert {row["step"] for row in low} == {1}


def test_text_is_searched_by_words_and_operators_have_no_meaning(client):
    assert [row["step"] for row in rows(client, text="onerror alert")["rows"]] == [1]
    assert rows(client, text='NOT" OR (x*')["total"] == 0
    assert match_text('a "b') == '"a" """b"'


def test_a_rollout_has_its_messages_and_the_numbers_of_each_token(run, client):
    first = rows(client, step=1, training=1, limit=1)["rows"][0]
    stored = next(read_rollouts(rollouts_path(run, 1)))
    page = client.get(f"/api/rollout/{first['id']}").json()
    assert page["paths"][0]["messages"][1]["content"] == HOSTILE.replace("\ud83d", "\ufffd")
    segments = stored.trajectory.segments
    assert [tuple(segment["ids"]) for segment in page["segments"]] == [segment.tokens for segment in segments]
    assert [tuple(segment["logprobs"]) for segment in page["segments"]] == [segment.logprobs for segment in segments]
    assert {(segment["agent"], segment["policy"], segment["parent"]) for segment in page["segments"]} == {
        (segment.agent, segment.policy, segment.parent) for segment in segments
    }
    prompt = "".join(page["segments"][0]["texts"])
    assert "<|im_start|>" in prompt
    assert page["rewards"] == dict(stored.trajectory.rewards)
    assert first["id"] in page["group"]


def test_rows_of_a_rollout_have_the_row_as_which_they_begin(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    records = list(read_rollouts(rollouts_path(run, 1)))
    prompt, action, *_ = records[0].trajectory.segments
    segments = (prompt, action, replace(action, tokens=action.tokens[::-1], parent=0))
    forked = replace(records[0], trajectory=replace(records[0].trajectory, segments=segments, shared_reward=True))
    write_rollouts(rollouts_path(run, 1), [forked, *records[1:]])
    with closing(RolloutIndex(RunFolder(run), solved)) as index:
        index.refresh()
        client = TestClient(make_app(RunPages(index)), base_url=LOCAL)
        first, second = rows(client, step=1, training=1, limit=2)["rows"]
        assert client.get(f"/api/rollout/{second['id']}").json()["rows"] == []
        _, fork = client.get(f"/api/rollout/{first['id']}").json()["rows"]
    num = len(prompt.tokens)
    assert (fork["of"], fork["shared"], fork["recorded"]) == (0, num, num)
    assert fork["before"] != fork["after"]
    assert "<|im_end|>" in fork["before"] + fork["after"]


def test_a_group_is_ordered_by_reward_and_compared_with_its_best(client):
    first = rows(client, step=1, training=1, limit=1)["rows"][0]
    members = client.get(f"/api/group/{first['id']}").json()["members"]
    assert [member["row"]["reward"] for member in members] == [2.0, 1.0, 0.0]
    assert members[0]["differs"] is None


def test_the_first_difference_is_the_token_and_turn_after_the_common_prefix(run):
    one = next(read_rollouts(rollouts_path(run, 1))).trajectory
    prompt, action = Segment("prompt", (1, 2)), Segment("action", (5, 6), 3, logprobs=(-1.0,) * 2, versions=(0, 0))
    a = replace(one, segments=(prompt, action))
    b = replace(one, segments=(prompt, replace(action, tokens=(5, 7))))
    assert first_difference(a, b) == {"token": 3, "turn": 3}
    assert first_difference(a, a) is None
    assert first_difference(a, replace(one, segments=(prompt,))) == {"token": 2, "turn": 0}


def test_a_task_is_followed_through_training(client):
    task = rows(client, step=1, training=1, limit=1)["rows"][0]["task"]
    found = client.get("/api/task", params={"task": task}).json()
    (first,) = [row for row in found if row["source"] == "" and row["step"] == 1]
    assert (first["attempts"], first["reward"]) == (3, 1.0)
    assert client.get("/api/task", params={"task": "none"}).json() == []


def test_two_evaluations_are_compared_on_the_tasks_that_they_share(run, index, client):
    b = client.get("/api/run").json()["source"][-1]
    a = earlier(b)
    found = client.get("/api/compare", params={"a": a, "b": b}).json()
    stored = {name: {r.group for r in read_rollouts(run / "evaluations" / f"{name}.jsonl.gz")} for name in (a, b)}
    assert {row["task"] for row in found["tasks"]} == stored[a] & stored[b] != set()
    gaps = [row["solved_b"] - row["solved_a"] for row in found["tasks"]]
    difference = found["difference"]
    assert difference["mean"] == pytest.approx(sum(gaps) / len(gaps))
    assert difference["low"] <= difference["mean"] <= difference["high"]
    numbers = found["tasks"][0]["first_a"], found["tasks"][0]["first_b"]
    pair = client.get("/api/pair/{}/{}".format(*numbers)).json()
    assert [member["row"]["source"] for member in pair["members"]] == [a, b]
    assert [member["row"]["id"] for member in pair["members"]] == list(numbers)
    records = [index.record(number)[1].trajectory for number in numbers]
    assert pair["members"][1]["differs"] == first_difference(*records)
    assert client.get("/api/compare", params={"a": a, "b": "none"}).json() == {"tasks": [], "difference": None}


def test_curves_have_a_value_for_each_step(client):
    curves = client.get("/api/curves").json()
    assert curves["steps"] == [1, 2]
    assert len(curves["values"]["reward/mean"]) == 2


def test_a_timeline_has_the_seconds_of_each_turn(run, client):
    lines = client.get("/api/timeline/2").json()
    stored = list(read_rollouts(rollouts_path(run, 2)))
    assert len(lines) == len(stored)
    assert lines == sorted(lines, key=lambda line: line["begin"])
    for line in lines:
        assert line["row"]["task"] == line["task"]
        spent = sum(model + tools for model, tools in line["turns"])
        assert 0 < spent <= line["total_s"] * 1.01
        assert sum(model for model, _ in line["turns"]) == pytest.approx(line["model_s"])
    assert client.get("/api/timeline/99").json() == []


def test_labels_are_stored_and_compared_with_the_verifier(run, client):
    chosen = rows(client, training=1, limit=4)["rows"]
    for row, label in zip(chosen, ("wrong", "right", "right", "right"), strict=True):
        assert client.post(f"/api/label/{row['id']}", json={"label": "wrong", "note": ""}).status_code == 200
        assert client.post(f"/api/label/{row['id']}", json={"label": label, "note": "seen"}).status_code == 200
    found = client.get("/api/labels").json()
    assert [line["label"] for line in found["labels"]] == ["wrong", "right", "right", "right"]
    agree = sum((line["label"] == "right") == bool(line["solved"]) for line in found["labels"])
    assert found["agreement"]["counts"][0] + found["agreement"]["counts"][3] == agree
    assert client.get(f"/api/rollout/{chosen[0]['id']}").json()["label"]["note"] == "seen"
    assert client.post(f"/api/label/{chosen[0]['id']}", json={"label": "maybe"}).status_code == 400
    assert client.post(f"/api/label/{chosen[0]['id']}", content=b"{").status_code == 415
    lines = (run / "labels.jsonl").read_text().splitlines()
    assert len(lines) == 8
    assert json.loads(lines[0])["label"] == "wrong"


def test_random_rollouts_to_label_have_no_label_until_all_have_one(tiny_run, tmp_path):
    with closing(RolloutIndex(RunFolder(copy_run(tiny_run, tmp_path)), solved)) as index:
        index.refresh()
        pages, drawn = RunPages(index), set()
        while (number := pages.unlabelled()["id"]) is not None:
            assert number not in drawn
            drawn.add(number)
            pages.add_label(number, "right", "")
        assert drawn == {row["id"] for row in index.query("SELECT id FROM rollouts")}


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/rollout/999999", 400),
        ("/api/rollouts?sort=drop", 400),
        ("/api/rollouts?nothing=1", 400),
        ("/api/rollouts?limit=x", 400),
        ("/api/rollout/one", 404),
        ("/static/../server.py", 404),
    ],
)
def test_requests_that_are_invalid(client, path, code):
    assert client.get(path).status_code == code


def test_page_may_load_only_files_of_the_viewer(client):
    page = client.get("/")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in page.text
    text = (STATIC / "app.js").read_text()
    assert "innerHTML" not in text
    for name in ("app.js", "viewer.css", "vendor/htm-preact.js", "vendor/uplot.js", "vendor/LICENSES.txt"):
        assert client.get(f"/static/{name}").status_code == 200


def test_only_the_loopback_name_or_a_token_is_accepted(index):
    open_app = make_app(RunPages(index))
    assert TestClient(open_app, base_url="http://attacker.example").get("/api/run").status_code == 400
    assert TestClient(open_app, base_url="http://localhost:1").get("/api/run").status_code == 200
    assert TestClient(open_app, base_url="http://[::1]:1").get("/api/run").status_code == 200
    client = TestClient(make_app(RunPages(index), token="secret"), base_url="http://trainer.example")
    assert client.get("/api/run").status_code == 401
    assert client.get("/?token=wrong").status_code == 401
    assert client.get("/?token=secret").status_code == 200  # a redirect with a cookie
    assert client.get("/api/run").status_code == 200


def test_new_files_are_added_and_changed_ones_indexed_again(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    later = rollouts_path(run, 2).rename(tmp_path / "later.gz")
    index = RolloutIndex(RunFolder(run), solved)
    client = TestClient(make_app(RunPages(index), live=True), base_url=LOCAL)
    index.refresh()
    before = client.get("/api/run").json()
    assert before["steps"] == [1]
    later.rename(rollouts_path(run, 2))
    assert index.refresh() == 1
    assert client.get("/api/run").json()["steps"] == [1, 2]
    write_rollouts(rollouts_path(run, 1), list(read_rollouts(rollouts_path(run, 1)))[:2])
    assert index.refresh() > 1
    assert index.query("SELECT count(*) AS n FROM rollouts WHERE source = '' AND step = 1") == [{"n": 2}]
    index.close()
    again = RolloutIndex(RunFolder(run), solved)
    start = time.monotonic()
    assert again.refresh() == 0
    assert time.monotonic() - start < 5
    with pytest.raises(UserError, match="Unknown rollout"):
        again.record(10**6)
    again.close()
    (run / "viewer.sqlite").write_bytes(b"not a database" * 100)
    rebuilt = RolloutIndex(RunFolder(run), solved)
    assert rebuilt.refresh() > 0
    rebuilt.close()
