"""`ludus export`: Inspect logs, a dataset folder and ShareGPT, with hostile text and input that it rejects."""

import json
import shutil
import zipfile
from dataclasses import replace

import pytest

from ludus.evaluation import exports
from ludus.evaluation.exports import LogHeader, ScoredRecord, inspect_message, json_text, sharegpt_turn, write_inspect
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path, write_rollouts
from tiny_run import copy_run, ludus, refused

HEADER = LogHeader("tiny", "ludus/policy", "2030-01-01T00:00:00+00:00")
HOSTILE = "lone \ud83d half, NUL \x00, </script>, snow \u2603"


def records(tiny_run):
    return [record for step in (1, 2) for record in read_rollouts(rollouts_path(tiny_run, step))]


def scored(found):
    return [ScoredRecord(record, record.trajectory.reward > 0) for record in found]


def opened(path):
    """The parts of an Inspect log by name."""
    with zipfile.ZipFile(path) as log:
        return {name: json.loads(log.read(name)) for name in log.namelist()}


def test_inspect_export_contains_each_rollout_once_with_scores(tiny_run, tmp_path):
    said = ludus("export", tiny_run, "--inspect", tmp_path / "logs")
    assert said.code == 0, said
    (path,) = (tmp_path / "logs").iterdir()
    assert path.name == "part-0001-steps-000001-000002.eval"
    log, stored = opened(path), records(tiny_run)
    samples = [part for name, part in log.items() if name.startswith("samples/")]
    assert f"{len(stored):,} rollouts" in said.out
    assert len(samples) == len(log["summaries.json"]) == log["header.json"]["results"]["total_samples"] == len(stored)
    assert sorted(s["scores"]["reward"]["value"] for s in samples) == sorted(r.trajectory.reward for r in stored)
    assert {(s["id"], s["epoch"]) for s in samples} == {(s["id"], s["epoch"]) for s in log["summaries.json"]}
    for sample in samples:
        (own,) = [r for r in stored if (r.step, r.group, r.trajectory.sample) == key(sample)]
        assert [spoken(m) for m in sample["messages"]] == [m["content"] for m in own.trajectory.messages]
    means = {score["name"]: score["metrics"]["mean"]["value"] for score in log["header.json"]["results"]["scores"]}
    assert means["reward"] == pytest.approx(sum(r.trajectory.reward for r in stored) / len(stored))


def spoken(message):
    """The text of a message without its reasoning."""
    content = message["content"]
    return content if isinstance(content, str) else next(part["text"] for part in content if part["type"] == "text")


def key(sample):
    return sample["metadata"]["step"], sample["id"], sample["metadata"]["sample"]


def test_long_runs_become_several_logs(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(exports, "MAX_SAMPLES", 4)
    assert write_inspect(tmp_path, scored(records(tiny_run)[:10]), HEADER) == 10
    sizes = [len(opened(path)["summaries.json"]) for path in sorted(tmp_path.iterdir())]
    assert sizes == [4, 4, 2]


def test_hostile_text_is_written_as_valid_json(tiny_run, tmp_path):
    record = records(tiny_run)[0]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": HOSTILE}]
    trajectory = replace(record.trajectory, messages=tuple(messages))
    assert write_inspect(tmp_path, scored([replace(record, trajectory=trajectory)]), HEADER) == 1
    (path,) = tmp_path.iterdir()
    (sample,) = [part for name, part in opened(path).items() if name.startswith("samples/")]
    assert sample["messages"][1]["content"] == HOSTILE.replace("\ud83d", "\ufffd")
    assert json.loads(json_text({"a": HOSTILE}).encode()) == {"a": HOSTILE.replace("\ud83d", "\ufffd")}
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text(float("nan"))


def test_messages_of_inspect_keep_reasoning_calls_and_malformed_arguments():
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
    broken = {**call, "function": {"name": "search", "arguments": "[1]"}}
    found = inspect_message({"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [call]})
    assert found["content"] == [{"type": "reasoning", "reasoning": "r"}, {"type": "text", "text": "a"}]
    assert found["tool_calls"] == [{"id": "c1", "function": "search", "type": "function", "arguments": {"q": "x"}}]
    (bad,) = inspect_message({"role": "assistant", "content": "", "tool_calls": [broken]})["tool_calls"]
    assert bad["parse_error"] == "the arguments are not an object"
    result = inspect_message({"role": "tool", "content": "3", "tool_call_id": "c1", "name": "search"})
    assert result == {"role": "tool", "content": "3", "tool_call_id": "c1", "function": "search"}


def test_a_dataset_has_one_row_for_each_rollout(tiny_run, tmp_path):
    said = ludus("export", tiny_run, "--hf-dataset", tmp_path / "data", "--steps", "2:2")
    assert said.code == 0, said
    rows = [json.loads(line) for line in (tmp_path / "data" / "data" / "train.jsonl").read_text().splitlines()]
    stored = [record for record in records(tiny_run) if record.step == 2]
    assert [row["reward"] for row in rows] == [record.trajectory.reward for record in stored]
    assert {row["step"] for row in rows} == {2}
    assert "data_files: data/train.jsonl" in (tmp_path / "data" / "README.md").read_text()


def test_sharegpt_dialogues_pass_the_check_of_data(tiny_run, tmp_path):
    out = tmp_path / "dialogues.jsonl"
    assert ludus("export", tiny_run, "--sharegpt", out).code == 0
    checked = ludus("data", "check", out)
    assert checked.code == 0, checked
    turns = json.loads(out.read_text().splitlines()[0])["conversations"]
    assert {turn["from"] for turn in turns} <= {"system", "human", "gpt", "function_call", "observation"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = sharegpt_turn({"role": "assistant", "content": "", "tool_calls": [call]})
    assert json.loads(turn["value"]) == [{"name": "f", "arguments": {}}]


def test_export_replaces_existing_target_only_with_overwrite(tiny_run, tmp_path):
    target = tmp_path / "logs"
    assert ludus("export", tiny_run, "--inspect", target).code == 0
    assert "--overwrite" in refused("export", tiny_run, "--inspect", target)
    assert ludus("export", tiny_run, "--inspect", target, "--steps", "1:1", "--overwrite").code == 0
    assert [path.name for path in target.iterdir()] == ["part-0001-steps-000001-000001.eval"]


def test_input_that_is_rejected(tiny_run, tmp_path):
    assert "No target" in refused("export", tiny_run)
    assert "--steps is 'first'" in refused("export", tiny_run, "--sharegpt", tmp_path / "a", "--steps", "first")
    assert "no saved rollouts" in refused("export", tiny_run, "--sharegpt", tmp_path / "a", "--steps", "7:9")
    assert "No rollout matches" in refused("export", tiny_run, "--sharegpt", tmp_path / "a", "--task", "none")
    assert "no-run" in refused("export", tmp_path / "no-run", "--sharegpt", tmp_path / "a")
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refused("export", tiny_run, "--inspect", tmp_path / "file" / "logs")
    assert not (tmp_path / "a").exists()
    run = copy_run(tiny_run, tmp_path)
    shutil.rmtree(run / "rollouts")
    assert "rollouts" in refused("export", run, "--sharegpt", tmp_path / "a")


@pytest.mark.foreign
def test_inspect_ai_and_datasets_read_an_export(tiny_run, tmp_path):
    from datasets import load_dataset
    from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries, read_eval_log_samples

    run, stored = copy_run(tiny_run, tmp_path), records(tiny_run)
    messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": HOSTILE + "x" * 10_000_000})
    changed = [replace(r, trajectory=replace(r.trajectory, messages=messages)) for r in stored[:1]]
    write_rollouts(rollouts_path(run, 1), [*changed, *[r for r in stored[1:] if r.step == 1]])
    assert ludus("export", run, "--inspect", tmp_path / "logs", "--hf-dataset", tmp_path / "data").code == 0
    (path,) = (tmp_path / "logs").iterdir()
    log = read_eval_log(str(path))
    assert (log.status, len(log.samples), log.results.total_samples) == ("success", len(stored), len(stored))
    assert len(list(read_eval_log_samples(str(path), all_samples_required=True))) == len(stored)
    assert len(read_eval_log_sample_summaries(str(path))) == len(stored)
    rows = load_dataset(str(tmp_path / "data"), split="train")
    assert [row["reward"] for row in rows] == [r.trajectory.reward for r in stored]
