"""Training files: valid ones are read exactly, invalid ones are reported with the line."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from ludus.chat.render import TemplateRenderer
from ludus.config import load_config
from ludus.diagnostics.trackers import read_metrics
from ludus.engines.models.loading import load_tokenizer
from ludus.errors import UserError
from ludus.rollouts.rollout_files import rollout_line, rollouts_path
from ludus.training.datasets.files import (
    FileDialogue,
    FilePair,
    check_file,
    parse_record,
    read_dialogues,
    read_pairs,
    read_records,
    row_of,
)
from ludus.training.run.preflight import model_path
from ludus.training.run.session import open_session
from ludus.training.sft import batches, dialogue_row
from small_runs import lasting_files
from tests.rollouts.test_store import RECORD
from tiny_run import cold_start, ludus, make_recipe, refused

ASK = {"role": "user", "content": "What does a fig cost?"}
SAY = {"role": "assistant", "content": "4"}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"item": "fig"}'}}
LOOK = {"role": "assistant", "content": None, "tool_calls": [CALL]}
FOUND = {"role": "tool", "content": "fig costs 4", "tool_call_id": "c"}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}
GOOD = {"messages": [ASK, LOOK, FOUND, SAY], "tools": [TOOL]}
PAIR = {"prompt": [ASK], "chosen": [LOOK, FOUND, SAY], "rejected": SAY, "tools": [TOOL]}


def write(path: Path, *records: object) -> Path:
    path.parent.mkdir(exist_ok=True)
    text = "".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records)
    path.write_text(text)
    return path


def test_a_dialogue_is_read_with_tools_calls_and_flags(tmp_path):
    quiet = {**LOOK, "train": False, "reasoning_content": None}
    (found,) = read_dialogues(write(tmp_path / "d.jsonl", {**GOOD, "messages": [ASK, quiet, FOUND, SAY]}, "\n"))
    assert [m["role"] for m in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert found.trains == (False, False, False, True)
    assert found.tools[0].schema == TOOL


def test_arguments_may_be_an_object_and_tools_may_be_text():
    call = {"function": {"name": "look", "arguments": {"item": "fig"}}}
    data = {"messages": [ASK, {"role": "assistant", "tool_calls": [call]}], "tools": json.dumps([TOOL])}
    found = parse_record(data)
    assert isinstance(found, FileDialogue)
    assert json.loads(found.messages[1]["tool_calls"][0]["function"]["arguments"]) == {"item": "fig"}
    assert found.tools[0].name == "look"


def test_pair_accepts_one_or_several_messages(tmp_path):
    with gzip.open(tmp_path / "p.jsonl.gz", "wt") as file:
        file.write(json.dumps(PAIR) + "\n")
    (found,) = read_pairs(tmp_path / "p.jsonl.gz")
    assert isinstance(found, FilePair)
    assert (len(found.prompt), len(found.chosen), len(found.rejected)) == (1, 3, 1)


def test_label_applies_to_messages_after_the_prompt_or_trained_ones():
    text = parse_record({"prompt": "What?", "completion": " 4", "label": False})
    listed = {"prompt": [{"role": "user", "content": "What?"}], "label": False}
    assert text == parse_record({**listed, "completion": [{**SAY, "content": " 4"}]})
    assert (text.label, text.trains) == (False, (False, True))
    calls = parse_record({"prompt": [ASK], "completion": [LOOK, FOUND, SAY], "tools": [TOOL], "label": True})
    assert (calls.label, calls.trains) == (True, (False, True, False, True))
    whole = parse_record({"messages": [ASK, {**LOOK, "train": False}, FOUND, SAY], "label": True})
    assert whole.trains == (False, False, False, True)
    assert isinstance(parse_record({**GOOD, "label": "easy"}), FileDialogue)


def test_labelled_dialogues_are_checked_and_not_mistaken_for_other_formats(tmp_path):
    line = {"prompt": [ASK], "completion": [SAY], "label": True}
    file = write(tmp_path / "l.jsonl", line, {**line, "label": "yes"})
    said = ludus("data", "check", file)
    assert 'label is "yes", and must be true or false' in said.out
    report = check_file(write(tmp_path / "l.jsonl", line, {**GOOD, "label": False}))
    assert (report.kind, report.num_records, report.problems) == ("labelled dialogue", 2, ())
    for read, kind in (
        (read_pairs, "pair: it is a labelled dialogue, which preference.loss = kto or bco"),
        (read_dialogues, "dialogue: it is a labelled dialogue"),
    ):
        with pytest.raises(UserError, match=kind):
            read(tmp_path / "l.jsonl")


def messages(*given: object, **more: object) -> dict[str, object]:
    return {"messages": list(given), **more}


def nested(depth: int) -> dict[str, object]:
    return {"a": nested(depth - 1)} if depth else {}


WRONG = {
    "it is not valid JSON": "{",
    "must be an object": [1],
    "its keys are body, and no format has these. Known formats: dialogue (messages); rollout": {"body": "hello"},
    "with instruction it resembles Alpaca, but output is missing": {"instruction": "Add.", "input": "1 2"},
    'read as ShareGPT: conversations[1].from is "bot"': {
        "conversations": [{"from": "human", "value": "?"}, {"from": "bot", "value": "4"}]
    },
    "read as ShareGPT (conversations): it has no assistant": {"conversations": [{"from": "human", "value": "?"}]},
    "read as Alpaca: output is empty": {"instruction": "Add.", "output": ""},
    'messages[0].content[0] has the type "video_url"': messages({**ASK, "content": [{"type": "video_url"}]}, SAY),
    "messages[0].content[0].image_url is missing": messages({**ASK, "content": [{"type": "image_url"}]}, SAY),
    "messages[1].weight is 2": messages(ASK, {**SAY, "weight": 2}),
    "text is empty": {"text": " "},
    "it has no assistant message": messages(ASK),
    "no assistant message trains": messages(ASK, {**SAY, "train": False}),
    "must be a list": {"messages": "hello"},
    'messages[0].role is "robot"': messages({"role": "robot", "content": ""}, SAY),
    "messages[0] has no content": messages({"role": "user"}, SAY),
    "messages[0].content is 3, and must be text": messages({"role": "user", "content": 3}, SAY),
    "unknown key 'contnt'": messages({**ASK, "contnt": ""}, SAY),
    "only the first message can be one": messages(ASK, {"role": "system", "content": "x"}, SAY),
    "a message must precede it": messages(SAY),
    "merge them": messages(ASK, SAY, SAY),
    "no call precedes it": messages(ASK, FOUND, SAY),
    "answers the call 'd'": messages(ASK, LOOK, {**FOUND, "tool_call_id": "d"}, SAY),
    "calls 'look', which is not among its tools": messages(
        ASK, LOOK, tools=[{**TOOL, "function": {**TOOL["function"], "name": "see"}}]
    ),
    "two tools are called 'look'": messages(ASK, SAY, tools=[TOOL, TOOL]),
    "tools is not valid JSON": messages(ASK, SAY, tools="["),
    "arguments is not valid JSON": messages(
        ASK, {**SAY, "tool_calls": [{"function": {"name": "look", "arguments": "{"}}]}
    ),
    'train is "no"': messages(ASK, {**SAY, "train": "no"}),
    "train belongs to assistant messages": messages({**ASK, "train": True}, SAY),
    "it is nested too deeply": "[" * 200_000 + "\n",
    "arguments is nested too deeply": messages(
        ASK, {**SAY, "tool_calls": [{"function": {"name": "look", "arguments": "[" * 200_000}}]}
    ),
    "tool_calls[0].function.arguments is nested too deeply": messages(
        ASK, {**SAY, "tool_calls": [{"function": {"name": "look", "arguments": json.dumps(nested(200))}}]}
    ),
    "tools is nested too deeply": messages(ASK, SAY, tools="[" * 200_000),
    "parameters is nested too deeply": messages(
        ASK, SAY, tools=[{**TOOL, "function": {**TOOL["function"], "parameters": nested(200)}}]
    ),
    "messages[0].content has '\\ud800', an unpaired surrogate": messages({**ASK, "content": "a\ud800"}, SAY),
    "arguments has '\\udc00', an unpaired surrogate": messages(
        ASK, {**SAY, "tool_calls": [{"function": {"name": "look", "arguments": {"\udc00": 1}}}]}
    ),
    'messages[0].role is "\\ud800"': messages({"role": "\ud800", "content": ""}, SAY),
    "task is 7, and must be text": {**GOOD, "task": 7},
    "prompt is missing": {"chosen": SAY, "rejected": SAY},
    "prompt ends with an assistant message": {**PAIR, "prompt": [ASK, SAY]},
    "rejected does not begin with an assistant": {**PAIR, "rejected": [ASK]},
    "chosen and rejected are the same": {**PAIR, "chosen": SAY},
    "chosen[0].train is false": {**PAIR, "chosen": [{**LOOK, "train": False}, FOUND, SAY]},
    "rejected[0].train is false": {**PAIR, "rejected": {**SAY, "train": False}},
    "prompt + chosen[2] is the assistant's": {**PAIR, "chosen": [SAY, SAY]},
    "label is 1, and must be true or false": {"prompt": "Hi", "completion": "Ho", "label": 1},
    "completion does not begin with an assistant": {"prompt": [ASK], "completion": [ASK], "label": True},
    "prompt + completion[2] is the assistant's": {"prompt": [ASK, SAY], "completion": SAY, "label": True},
    "it has chosen and completion": {**PAIR, "completion": SAY, "label": True},
}


@pytest.mark.parametrize(("said", "record"), WRONG.items(), ids=WRONG)
def test_errors_name_their_line(tmp_path, said, record):
    path = write(tmp_path / "f.jsonl", GOOD if "prompt" not in str(record) else PAIR, record, "\n")
    (problem,) = check_file(path).problems
    assert problem.line == 2
    assert said in problem.text
    assert problem.text.encode()


def test_train_flag_of_a_prompt_is_ignored():
    pair = parse_record({**PAIR, "prompt": [ASK, {**SAY, "train": "no"}, ASK]})
    assert [message["content"] for message in pair.prompt] == [ASK["content"], "4", ASK["content"]]


def test_a_list_over_several_lines_is_one_problem(tmp_path):
    path = tmp_path / "list.jsonl"
    path.write_text(json.dumps([GOOD, GOOD], indent=1))
    (problem,) = check_file(path).problems
    assert "a list spans several lines" in problem.text
    assert check_file(path.rename(tmp_path / "list.json")).num_records == 2


def test_mixed_file_is_rejected_and_a_rollout_file_is_accepted(tmp_path, tiny_run):
    report = check_file(write(tmp_path / "f.jsonl", GOOD, PAIR, GOOD))
    assert [(p.line, p.text) for p in report.problems] == [(2, "it is a pair, and the file began with a dialogue")]
    report = check_file(rollouts_path(tiny_run, 1))
    assert (report.kind, report.num_records, report.problems) == ("rollout", 9, ())
    with gzip.open(rollouts_path(tiny_run, 1)) as lines:
        broken = json.loads(lines.readline()) | {"outcome": "lost"}
    assert "lost" in check_file(write(tmp_path / "r.jsonl", broken)).problems[0].text


def test_data_command_prints_the_first_twenty_errors_and_counts_the_rest(tmp_path):
    good = write(tmp_path / "good.jsonl", GOOD, GOOD)
    said = ludus("data", "check", good)
    assert (said.code, said.out) == (0, f"{good}: 2 dialogues, 0 problems\n")
    bad = write(tmp_path / "bad.jsonl", GOOD, *[messages(ASK)] * 25)
    said = ludus("data", "check", good, bad)
    assert said.code == 2
    assert said.out.count("it has no assistant message.") == 20
    assert "line 21:" in said.out
    assert "line 22:" not in said.out
    assert "... and 5 more." in said.out
    assert said.err.count("\n") == 1
    assert f"{bad} cannot be used for training" in said.err


def test_files_that_cannot_be_read_are_one_sentence_each_and_the_others_are_checked(tmp_path, monkeypatch):
    none, empty = tmp_path / "none.jsonl", write(tmp_path / "empty.jsonl")
    cut, good = tmp_path / "cut.jsonl.gz", write(tmp_path / "good.jsonl", GOOD)
    cut.write_bytes(gzip.compress(b"{}\n" * 99)[:-12])
    monkeypatch.setitem(sys.modules, "datasets", None)
    saved = write(tmp_path / "saved" / "state.json", "{}").parent
    said = ludus("data", "check", none, empty, cut, saved, good)
    lines = said.out.splitlines()
    assert said.code == 2
    for line, words in zip(
        lines, ("does not exist", "is empty", "is damaged", "ludus[datasets]", "1 dialogue"), strict=True
    ):
        assert words in line
    assert f"{none}, {empty}, {cut}, {saved} cannot be used for training" in said.err


def test_a_folder_of_datasets_is_read_like_a_file(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [ASK, LOOK, FOUND, SAY], "tools": json.dumps([TOOL])}] * 2
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "d"))
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "s"))
    expected = parse_record(rows[0])
    for name in ("d", "s"):
        found = read_dialogues(tmp_path / name)
        assert len(found) == 2
        assert found[0].messages == expected.messages
        assert found[0].tools[0].schema == TOOL


ROUND_TRIPS = [
    [{**GOOD, "task": "figs"}, messages(ASK, {**LOOK, "train": False}, FOUND, SAY), messages(ASK, SAY)],
    [PAIR, {"prompt": [ASK], "chosen": SAY, "rejected": {**SAY, "content": "5"}}],
    [{**GOOD, "label": True}, {"prompt": "What?", "completion": "4", "label": False}],
    [json.loads(rollout_line(record)) for record in (RECORD, replace(RECORD, advantage=None))],
]


@pytest.mark.parametrize("records", ROUND_TRIPS, ids=["dialogues", "pairs", "labelled", "rollouts"])
def test_converted_dataset_reads_like_the_original_file(tmp_path, records):
    pytest.importorskip("datasets")
    file, folder = write(tmp_path / "f.jsonl", *records), tmp_path / "new" / "folder"
    said = ludus("data", "convert", file, folder)
    assert (said.code, said.out) == (0, f"{folder}: {len(records)} records of {file}\n")
    before, after = (list(map(row_of, read_records(path))) for path in (file, folder))
    assert before == after
    assert len(after) == len(records)
    assert "exists" in refused("data", "convert", file, folder)


def test_failed_conversion_leaves_no_file(tmp_path, monkeypatch):
    good, bad = write(tmp_path / "good.jsonl", GOOD), write(tmp_path / "bad.jsonl", GOOD, PAIR)
    folder = tmp_path / "folder"
    assert "line 2, is not a dialogue: it is a pair" in refused("data", "convert", bad, folder)
    assert "a file and a new folder" in refused("data", "convert", good)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "ludus[datasets]" in refused("data", "convert", good, folder)
    assert not folder.exists()


@pytest.fixture(scope="module")
def renderer():
    return TemplateRenderer(load_tokenizer(model_path(load_config("search"))))


def test_only_flagged_messages_train_and_the_prompt_shows_the_tools(renderer):
    def trained(data):
        dialogue = parse_record(data)
        row = dialogue_row(renderer, dialogue)
        kept = [t for t, train in zip(row.tokens, row.trains, strict=True) if train]
        return renderer.tokenizer.decode(row.tokens), renderer.tokenizer.decode(kept)

    whole, kept = trained(GOOD)
    assert "Look." in whole
    assert '"fig"' in kept
    assert "4" in kept
    assert "costs" not in kept
    quiet = {**GOOD, "messages": [ASK, {**LOOK, "train": False}, FOUND, SAY]}
    same, last = trained(quiet)
    assert same == whole
    assert "fig" not in last
    assert "4" in last


def test_fine_tuning_accepts_a_file_and_rejects_a_bad_one_before_writing(tmp_path, tiny_run, caplog):
    recipe, model = make_recipe(tmp_path), sorted((tiny_run / "cold_start" / "checkpoints").iterdir())[-1]
    base = ("sft", recipe, "--model", model, "--sft.steps", "2", "--sft.batch_size", "2")
    good = write(tmp_path / "good.jsonl", GOOD, messages(ASK, {**SAY, "content": "4 " * 4000}), messages(ASK, SAY))
    said = ludus(*base, "--run.dir", tmp_path / "a", "--sft.data", good)
    assert said.code == 0, said
    assert "1 of 3 demonstrations are longer than rollout.max_seq_len" in caplog.text
    assert "dialogues were too long and were skipped" in said.out
    left_out = [row.metrics["batch/left_out"] for row in read_metrics(tmp_path / "a" / "metrics.jsonl")]
    assert sum(left_out) >= 1
    assert f"{sum(left_out):.0f} of {4 + sum(left_out):.0f} dialogues" in said.out
    bad = write(tmp_path / "bad.jsonl", GOOD, messages(ASK))
    said = refused(*base, "--run.dir", tmp_path / "b", "--sft.data", bad)
    assert f"{bad}, line 2, is not a dialogue: it has no assistant message" in said
    words = (*base, "--rollout.max_seq_len", "16", "--rollout.max_tokens_per_turn", "8", "--sft.data", good)
    told = refused(*words, "--run.dir", tmp_path / "b")
    assert f"No dialogue of {good} fits into rollout.max_seq_len (16)" in told
    assert "Set --rollout.max_seq_len 8064" in told
    assert "is not a dialogue: it is a pair" in refused(
        *base, "--run.dir", tmp_path / "b", "--sft.data", write(tmp_path / "p.jsonl", PAIR)
    )
    assert not (tmp_path / "b").exists()


def numbered(path: Path) -> Path:
    """A file of seven dialogues that differ."""
    said = [messages(ASK, {"role": "assistant", "content": str(n)}) for n in range(7)]
    return write(path, *said)


def test_a_file_is_passed_over_in_another_order_each_time_and_for_each_seed(tmp_path, tiny_run):
    file, recipe = numbered(tmp_path / "seven.jsonl"), make_recipe(tmp_path)
    orders = []
    for seed in ("0", "0", "1"):
        words = ["--model.path", str(cold_start(tiny_run)), "--sft.data", str(file), "--run.seed", seed]
        session = open_session(load_config(recipe, [*words, "--sft.batch_size", "1"]))
        rows = [row.tokens for batch, _ in islice(batches(session, session.config.sft), 14) for row in batch]
        orders.append([rows[:7], rows[7:]])
    (first, second), again, (other, _) = orders
    assert len(set(first)) == 7
    assert sorted(first) == sorted(second) == sorted(other)
    assert again == [first, second]
    assert first != second
    assert first != other


def test_fine_tuning_on_a_file_resumes_in_the_middle_of_a_pass(tmp_path, tiny_run):
    file = numbered(tmp_path / "seven.jsonl")
    words = ("--model", cold_start(tiny_run), "--sft.batch_size", "2", "--sft.warmup_steps", "0")
    base = ("sft", make_recipe(tmp_path), *words, "--sft.data", file, "--sft.schedule", "constant")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert ludus(*base, "--sft.steps", "5", "--run.dir", whole).code == 0
    assert ludus(*base, "--sft.steps", "2", "--run.dir", cut).code == 0
    assert ludus("sft", "--resume", cut, "--sft.steps", "5").code == 0
    assert lasting_files(cut) == lasting_files(whole)
