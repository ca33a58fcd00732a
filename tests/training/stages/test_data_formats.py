"""Third-party formats are detected by their keys, tables are read like lines, and texts train without a template."""

import csv
import gzip
import json
import sys
from itertools import islice
from types import ModuleType

import pytest

from ludus.chat.render import TemplateRenderer, document_tokens
from ludus.chat.tags import TagsRenderer
from ludus.config import load_config
from ludus.diagnostics.trackers import read_metrics
from ludus.engines.models.loading import load_tokenizer
from ludus.envs.task_files import is_table, read_table, split_of
from ludus.errors import UserError
from ludus.training.datasets.files import FileText, check_file, parse_record, read_dialogues, read_sft_data, row_of
from ludus.training.run.session import model_path, open_session
from ludus.training.sft import batches, dialogue_row
from tests.training.stages.test_data import ASK, SAY, TOOL, messages, write
from tiny_run import cold_start, ludus, make_recipe, refused

SYSTEM = {"role": "system", "content": "Be brief."}
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"item": "fig"}}}]}
RESULT = {"role": "tool", "content": "fig costs 4"}
TURNS = [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": "4"}]
QUESTION = {"prompt": ASK["content"], "completion": "4"}
PART = {"type": "text", "text": ASK["content"]}
EXPECTED = {
    "ShareGPT": ({"conversations": TURNS, "system": "Be brief."}, messages(SYSTEM, ASK, SAY)),
    "ShareGPT of roles": ({"conversations": [ASK, SAY]}, messages(ASK, SAY)),
    "ShareGPT with calls": (
        {
            "conversations": [
                TURNS[0],
                {"from": "function_call", "value": '{"name": "look", "arguments": {"item": "fig"}}'},
                {"from": "observation", "value": "fig costs 4"},
                TURNS[1],
            ],
            "tools": json.dumps([TOOL["function"]]),
        },
        messages(ASK, CALLED, RESULT, SAY, tools=[TOOL]),
    ),
    "prompt and completion": (QUESTION, messages(ASK, SAY)),
    "of messages": ({"prompt": [SYSTEM, ASK], "completion": [SAY]}, messages(SYSTEM, ASK, SAY)),
    "only the completion trains": (
        {"prompt": [ASK, SAY, ASK], "completion": "4"},
        messages(ASK, {**SAY, "train": False}, ASK, SAY),
    ),
    "brackets in a prompt": (
        {"prompt": "[INST] {x}", "completion": "{}"},
        messages({**ASK, "content": "[INST] {x}"}, {**SAY, "content": "{}"}),
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "1 3", "output": "4", "text": "Add. 1 3 4"},
        messages({**ASK, "content": "Add.\n\n1 3"}, SAY),
    ),
    "Alpaca without input": (
        {"instruction": ASK["content"], "input": "", "output": "4", "system": "Be brief."},
        messages(SYSTEM, ASK, SAY),
    ),
    "Dolly": (
        {"instruction": "Add.", "context": "1 3", "response": "4", "category": "qa"},
        messages({**ASK, "content": "Add.\n\n1 3"}, SAY),
    ),
    "prompt and response": ({"prompt": ASK["content"], "response": "4"}, messages(ASK, SAY)),
    "question and answer": ({"question": ASK["content"], "answer": "4"}, messages(ASK, SAY)),
    "OpenAI": (
        {
            "messages": [
                {**SYSTEM, "role": "developer"},
                ASK,
                {**SAY, "weight": 0},
                {**ASK, "content": [PART]},
                {**SAY, "weight": 1, "refusal": None},
            ],
            "tools": [TOOL],
            "parallel_tool_calls": False,
        },
        messages(SYSTEM, ASK, {**SAY, "train": False}, ASK, SAY, tools=[TOOL]),
    ),
    "OpenAI preference": (
        {"input": {"messages": [ASK]}, "preferred_output": [SAY], "non_preferred_output": [{**SAY, "content": "5"}]},
        {"prompt": [ASK], "chosen": SAY, "rejected": {**SAY, "content": "5"}},
    ),
    "pair of texts": (
        {"prompt": ASK["content"], "chosen": "4", "rejected": "5"},
        {"prompt": [ASK], "chosen": SAY, "rejected": {**SAY, "content": "5"}},
    ),
}


def shown(record):
    """A record as its row of a table, so that tools compare by their schema."""
    return row_of(parse_record(record))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_foreign_record_reads_as_ours(name):
    given, ours = EXPECTED[name]
    assert shown(given) == shown(ours)


def test_unknown_format_is_reported_with_its_keys(tmp_path):
    file = write(tmp_path / "odd.jsonl", {"body": "x", "title": "y"})
    said = refused("sft", make_recipe(tmp_path), "--from-scratch", "--sft.data", file)
    assert "line 1, is not a dialogue: its keys are body, title, and no format has these" in said
    assert "ShareGPT (conversations); Alpaca (instruction, output)" in said


ROWS = [{"instruction": f"Add {n}, and \n1.", "output": str(n)} for n in range(3)]


def write_table(path, rows, delimiter=","):
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.tsv", "t.json", "t.parquet", "folder", "saved", "hub/name"])
def test_table_reads_like_its_json_lines(tmp_path, monkeypatch, name):
    path = tmp_path / name
    if name == "t.parquet":
        pytest.importorskip("pyarrow.parquet").write_table(sys.modules["pyarrow"].Table.from_pylist(ROWS), path)
    elif name == "t.json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif name == "folder":
        path.mkdir()
        write(path / "data" / "train-00000.jsonl", ROWS[0])
        write(path / "data" / "train-00001.jsonl", *ROWS[1:])
        write_table(path / "test.csv", ROWS)
        (path / "README.md").write_text("A card.")
    elif name == "saved":
        pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(str(path))
    elif name == "hub/name":
        hub = ModuleType("datasets")
        hub.load_dataset = lambda name, config: {"test": ROWS, "train": ROWS} if (name, config) == ("a/b", "c") else {}
        monkeypatch.setitem(sys.modules, "datasets", hub)
        path = type(path)("a/b:c")
    else:
        write_table(path, ROWS, "\t" if "tsv" in name else ",")
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(path.read_bytes()))
    assert is_table(path)
    assert read_dialogues(path) == read_dialogues(write(tmp_path / "lines.jsonl", *ROWS))
    assert check_file(path).num_records == 3


def test_messages_in_a_cell_are_json_and_rows_are_numbered(tmp_path):
    file = write_table(tmp_path / "t.csv", [{"messages": json.dumps([ASK, SAY])}, {"messages": "none"}])
    (problem,) = check_file(file).problems
    assert (problem.line, problem.text) == (3, 'messages is "none", and must be a list')


def test_splits_are_inferred_from_file_names():
    names = ("train-00000-of-00001", "hotpot_dev_distractor_v1", "validation", "GSM8K_test", "contest", "latest", "all")
    assert list(map(split_of, names)) == ["train", "validation", "validation", "test", "", "", ""]


def broken(tmp_path, name, text):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text)
    return path


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", b"text\na,b\n", "line 2, has more cells than the first row"),
        ("t.csv", b'text\n"a', "is not valid CSV"),
        ("t.csv", b"text\n\xff\n", "cannot be read"),
        ("t.json", b'[{"text": ', "is not valid JSON"),
        ("t.json", b"[1]", "line 1, is not an object"),
        ("d/t.jsonl", b'{"text": "a"}\n{', "line 2, is not valid JSON"),
        ("d/README.md", b"", "has neither data files"),
        ("none/name", None, "the package datasets"),
        ("t.parquet", b"", "pyarrow"),
    ],
)
def test_a_source_that_cannot_be_read_is_one_sentence(tmp_path, monkeypatch, name, text, said):
    for package in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, package, None)
    path = broken(tmp_path, name, text) if text is not None else type(tmp_path)(name)
    with pytest.raises(UserError) as error:
        list(read_table(path.parent if name.startswith("d/") else path))
    assert said in str(error.value)


def test_a_folder_without_the_split_is_refused(tmp_path):
    for split in ("dev", "test"):
        write(tmp_path / "d" / f"{split}.jsonl", {"text": "a"})
    with pytest.raises(UserError, match="has no split train, but validation, test"):
        list(read_table(tmp_path / "d", "train"))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(model_path(load_config("search")))


@pytest.mark.parametrize("make", [TemplateRenderer, TagsRenderer])
def test_plain_text_trains_whole_with_an_end_token(tokenizer, make):
    row = dialogue_row(make(tokenizer), FileText("The capital of Chad is N'Djamena."))
    assert tokenizer.decode(row.tokens) == "The capital of Chad is N'Djamena.<|endoftext|>"
    assert row.trains == (False, *[True] * (len(row.tokens) - 1))
    assert document_tokens(tokenizer, "a<|endoftext|>") == document_tokens(tokenizer, "a")


def test_texts_are_read_split_and_trained_on(tmp_path, tiny_run):
    texts = ["A fig costs 4. " * 60, "Short."]
    file = write(tmp_path / "texts.jsonl", *[{"text": text, "source": "web"} for text in texts])
    assert read_sft_data(file) == [FileText(text) for text in texts]
    assert check_file(file).kind == "text"
    with pytest.raises(UserError, match="is not a dialogue: it is a text"):
        read_dialogues(file)
    recipe, words = make_recipe(tmp_path), ("--sft.batch_size", "1", "--sft.data", str(file))
    session = open_session(load_config(recipe, ("--model.path", str(cold_start(tiny_run)), *words)))
    whole = [document_tokens(session.tokenizer, text) for text in texts]
    limit = session.config.rollout.max_seq_len
    assert len(whole[0]) > limit
    num = -(-len(whole[0]) // limit) + 1
    found = [rows[0].tokens for rows, _ in islice(batches(session, session.config.sft), num)]
    assert max(map(len, found)) <= limit
    assert sorted(token for part in found for token in part) == sorted(token for text in whole for token in text)
    run = tmp_path / "run"
    assert ludus("sft", recipe, "--model", cold_start(tiny_run), *words, "--sft.steps", "2", "--run.dir", run).code == 0
    (first, *_) = read_metrics(run / "metrics.jsonl")
    assert first.metrics["batch/trained_tokens"] == first.metrics["batch/total_tokens"] - 1


def test_texts_convert_to_rows_and_back():
    text = FileText("Figs.", "reasoning")
    assert parse_record(row_of(text)) == text
    assert parse_record({"text": "Figs.", "messages": [ASK, SAY]}) == parse_record(messages(ASK, SAY))
