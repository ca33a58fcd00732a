"""`ludus contamination` finds a test task that is planted in the dialogues and rollouts of a run."""

import json
from dataclasses import replace

import pytest

from ludus.rollouts.rollout_files import read_rollouts, rollouts_path, write_rollouts
from ludus.types import Message
from tiny_run import copy_run, ludus, refused
from tiny_world import PRICES

PLANTED = "What does rake cost?"


def test_contamination_detects_a_planted_test_task(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    path = rollouts_path(run, 2)
    first, *others = read_rollouts(path)
    told = Message(role="user", content=f"{PLANTED} {PRICES['rake']}")
    planted = replace(first.trajectory, messages=(*first.trajectory.messages, told))
    write_rollouts(path, [replace(first, trajectory=planted), *others])
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": told["content"]}) + "\n")
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("\n# data is none\n", f'\ndata = "{data}"\n', 1))
    said = ludus("contamination", run, "--json", tmp_path / "c.json", "--markdown", tmp_path / "c.md", "--ngrams", "4")
    assert said.code == 0, said
    (row,) = [row for row in json.loads((tmp_path / "c.json").read_text()) if row["task"] == "test:rake"]
    found = {one["source"]: one for one in row["found"]}
    shares = {name: one["share"] for name, one in found.items()}
    assert shares == {"training tasks": 0.0, "training dialogues": 1.0, "training rollouts": 1.0}
    assert found["training dialogues"]["example"] == "dialogue 1"
    assert found["training rollouts"]["example"].startswith("step-000002, sample ")
    assert "1 contaminated tasks; difference" in said.out
    assert "test:rake" in (tmp_path / "c.md").read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nope",), "nope does not exist"),
        (("RUN", "--split", "tset"), "no split 'tset'"),
        (("RUN", "--ngrams", "0"), "--ngrams must be 1 or more"),
        (("RUN", "--dialogues", "0", "--json", "nope/c.json"), "nope/c.json cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(words, expected, tiny_run):
    assert expected in refused("contamination", *(tiny_run if word == "RUN" else word for word in words))
