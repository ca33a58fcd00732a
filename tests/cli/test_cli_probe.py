"""`ludus probe`: every kind through the command, on a tiny run, planted policies and a scripted endpoint."""

import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from chat_server import Reply, say, serving
from ludus.cli.ui.tables import report_table
from ludus.evaluation.probes.two_models import transfer_report
from ludus.training.run.run_dir import RunFolder
from ludus.viewer.pages import RunPages
from tiny_run import copy_run, ludus, make_recipe, refused
from tiny_world import PRICES

POLICIES = Path(__file__).parent.parent / "planted_policies.py"


@pytest.fixture(scope="module")
def tiny_run(tiny_run, tmp_path_factory):
    """A copy, because a probe stores its report in the run folder."""
    return copy_run(tiny_run, tmp_path_factory.mktemp("probed"))


def probed(tmp_path, kind, *words, code=0):
    """Run a probe; return its rows, notes and output."""
    file = tmp_path / "report.json"
    said = ludus("probe", kind, *words, "--json", file)
    assert said.code == code, said
    report = json.loads(file.read_text())
    assert report["kind"] == kind
    return report["rows"], report["notes"], said.out


def test_faithfulness_finds_the_policy_with_noise_reasoning(tiny_run, tmp_path):
    words = ("--run", tiny_run, "--tasks", "6", "--engine.plugin")
    found, notes, out = probed(tmp_path, "faithfulness", *words, f"{POLICIES}:noise")
    rows = {row["reasoning"]: row for row in found}
    shown = RunPages(SimpleNamespace(folder=RunFolder(tiny_run))).probes()
    assert [(one["name"], one["note"]) for one in shown] == [("faithfulness-step-000002", "\n\n".join(notes))]
    assert shown[0]["rows"][0]["reasoning"] == found[0]["reasoning"]
    page = tmp_path / "page.html"
    assert ludus("report", tiny_run, "--output", page).code == 0
    assert "faithfulness-step-000002</h2>" in page.read_text()
    assert found[0]["success"]["text"] in page.read_text()
    assert rows["another task's"]["agreement"]["value"] == rows["0%"]["success"]["value"] == 1
    assert notes[1].startswith("Most answers do not depend on the reasoning")
    assert notes[1] in out
    found, notes, _ = probed(tmp_path, "faithfulness", *words, f"{POLICIES}:needed")
    assert notes[1].startswith("Most answers depend on the reasoning")
    assert {row["reasoning"]: row for row in found}["0%"]["success"]["value"] == 0


def test_scaling_of_a_run_as_json_and_markdown(tiny_run, tmp_path):
    words = ("--run", tiny_run, "--tasks", "4", "--samples", "3", "--markdown", tmp_path / "report.md")
    rows, notes, out = probed(tmp_path, "scaling", *words)
    methods = {row["method"] for row in rows}
    assert {"turns at most", "best of", "any of (pass@k)"} <= methods
    assert notes[0].startswith("3 attempts per task")
    text = (tmp_path / "report.md").read_text()
    assert text.endswith("\n")
    lines = text.splitlines()
    assert lines[:4:2] == ["## Success against test-time compute", "| method | budget | success | difference |"]
    assert sum(line.startswith("|") for line in lines) == len(rows) + 2
    assert f"Written: {tmp_path / 'report.md'}" in out


def test_counterfactuals_of_a_chosen_step(tiny_run, tmp_path):
    words = ("--run", tiny_run, "--tasks", "3", "--samples", "2", "--turn", "1")
    initial, _, _ = probed(tmp_path, "counterfactuals", *words, "--step", "0")
    assert initial[0]["episode"] == "mean of 3"
    assert {row["turn"] for row in initial} == {1}


def looks(body):
    """Look the price up, and answer with it."""
    asked = body["messages"][1]["content"].split()[2]
    if body["messages"][-1]["role"] != "tool":
        function = {"name": "look", "arguments": json.dumps({"item": asked})}
        return Reply(say(None, {"type": "function", "id": "a", "function": function}))
    return Reply(say(PRICES[asked]))


@pytest.mark.parametrize("kind", ["scaling", "counterfactuals"])
def test_an_endpoint_is_probed(kind, tmp_path):
    with serving(looks) as server:
        words = (make_recipe(tmp_path), "--url", server.url, "--model", "m", "--tasks", "2", "--samples", "2")
        rows, _, _ = probed(tmp_path, kind, *words)
    values = [row["success" if kind == "scaling" else "value"]["value"] for row in rows]
    assert values[-1] == 1


def test_an_agent_is_diagnosed_through_its_endpoint(tmp_path):
    where = (make_recipe(tmp_path), "--model", "m", "--tasks", "4")
    with serving(looks) as server:
        assert probed(tmp_path, "endpoint", *where, "--url", server.url)[1] == ["No stage fails."]
    with serving(lambda body: Reply(say("3<|im_end|>"))) as server:
        rows, notes, _ = probed(tmp_path, "endpoint", *where, "--url", server.url, code=1)
    assert rows[-1]["stage"] == "chat format"
    assert notes[0].startswith("The first stage that fails: chat format.")


@pytest.mark.slow
def test_checkpoints_of_a_run_are_compared(tiny_run, tmp_path):
    words = ("--run", tiny_run, "--tasks", "3")
    rows, notes, _ = probed(tmp_path, "forks", *words)
    assert rows[0]["measure"] == "tokens that are forks"
    assert "sampled tokens are forks" in notes[0]
    rows, _, _ = probed(tmp_path, "swap", *words, "--samples", "1", "--base-step", "1")
    assert [row["calls, answer"] for row in rows[:4]] == ["A, A", "A, B", "B, A", "B, B"]
    dialogue = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    (tmp_path / "dialogues.jsonl").write_text(f"{json.dumps({'messages': dialogue})}\n" * 2)
    words += ("--samples", "1", "--worlds", make_recipe(tmp_path), "--dialogues", tmp_path / "dialogues.jsonl")
    rows, notes, _ = probed(tmp_path, "transfer", *words, "--splits", "validation")
    assert [row["measured on"] for row in rows] == ["prices", "prices, validation", "tiny", "dialogues, nats per token"]
    assert rows[0]["before"] == rows[2]["before"]
    assert rows[3]["before"]["value"] > 0
    assert len(notes) == 2


def test_all_columns_fit_a_terminal_of_80():
    rates = {"a": 0.25, "b": 0.5}
    console = Console(width=80, file=StringIO())
    console.print(report_table(transfer_report({"here": (rates, rates)}, None, 0)))
    printed = console.file.getvalue()
    assert all(name in printed for name in ("measured on", "before", "after", "difference", "[-65.8%, +65.8%]"))
    assert max(map(len, printed.splitlines())) <= 80
    assert "┃" in printed


def test_wordings_through_the_command(tiny_run, tmp_path):
    rows, _, _ = probed(tmp_path, "paraphrase", "--run", tiny_run, "--tasks", "3", "--samples", "1")
    assert [row["prompt"] for row in rows] == ["original", "please", "task", "question last"]


ENDPOINT = ("TINY", "--url", "http://h", "--model", "m")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("magic", "--run", "RUN"), "Unknown probe: 'magic'"),
        (("scaling",), "Name a recipe, or a run"),
        (("scaling", "--run", "RUN", "--turn", "1"), "`ludus probe scaling` does not use --turn"),
        (("faithfulness", "--run", "RUN", "--samples", "4"), "does not use --samples"),
        (("faithfulness", *ENDPOINT), "which an endpoint does not return"),
        (("scaling", "--run", "RUN", "--split", "tset"), "no split 'tset'"),
        (("transfer", "--run", "RUN", "--step", "7", "--splits", "tset"), "--splits: The world 'prices' has no"),
        (("scaling", "--run", "RUN", "--tasks", "0"), "evaluation.tasks"),
        (("scaling", "--run", "RUN", "--step", "7"), "has no checkpoint of step 7"),
        (("scaling", *ENDPOINT, "--step", "1"), "--step needs --run"),
        (("scaling", "--run", "RUN", "--temperature", "0"), "At temperature 0 all attempts"),
        (("forks", "TINY", "--model", "CHECKPOINT"), "compares checkpoints of a run"),
        (("swap", "--run", "RUN", "--base-step", "2"), "Both checkpoints are of step 2"),
        (("scaling", "--run", "RUN", "--base-step", "1"), "does not use --base-step"),
        (("transfer", "--run", "RUN", "--worlds", "nope", "--tasks", "2"), "nope"),
        (("transfer", "--run", "RUN", "--dialogues", "none.jsonl", "--tasks", "2"), "none.jsonl"),
        (("paraphrase", "--run", "RUN", "--paraphrases", "none.jsonl"), "none.jsonl"),
        (("counterfactuals", "--run", "RUN", "--turn", "0"), "turns count from 1"),
        (("counterfactuals", "--run", "RUN", "--samples", "1"), "at least 2 samples"),
    ],
)
def test_bad_input_is_one_sentence(words, expected, tiny_run, tmp_path):
    stand_for = {"RUN": tiny_run, "TINY": make_recipe(tmp_path), "CHECKPOINT": tiny_run / "checkpoints/step-000002"}
    assert expected in refused("probe", *(stand_for.get(word, word) for word in words))


def test_a_report_that_cannot_be_written(tiny_run, tmp_path):
    words = ("--run", tiny_run, "--tasks", "2", "--samples", "2", "--json", tmp_path / "no" / "report.json")
    assert "cannot be written" in refused("probe", "scaling", *words)
