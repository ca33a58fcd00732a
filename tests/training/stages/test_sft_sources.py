"""Fine-tuning samples from several files and worlds by weight and class, and masks some messages."""

import json
from collections import Counter
from itertools import islice

import pytest

from ludus.chat.render import TemplateRenderer
from ludus.config import load_config
from ludus.engines.models.loading import load_tokenizer
from ludus.envs.base import class_of
from ludus.envs.tool_world import Dialogue, ToolWorld
from ludus.errors import ConfigError, UserError
from ludus.training.datasets import sources
from ludus.training.datasets.files import parse_record, read_dialogues, read_sft_data, row_of
from ludus.training.datasets.sources import MAX_SKIPPED, check_sources, dialogues
from ludus.training.run.preflight import model_path
from ludus.training.sft import dialogue_row
from ludus.types import FunctionCall, Message, MessageToolCall
from ludus.worlds.functions.world import FunctionsSettings, FunctionsWorld
from small_runs import lasting_files
from tests.training.stages.test_data import ASK, CALL, GOOD, SAY, messages, write
from tiny_run import cold_start, ludus, make_recipe
from tiny_world import look


@pytest.fixture(scope="module")
def renderer():
    return TemplateRenderer(load_tokenizer(model_path(load_config("search"))))


def functions(**settings):
    return FunctionsWorld(FunctionsSettings(num_tasks=20, **settings))


def assistants(shown):
    return tuple(message["role"] == "assistant" for message in shown.messages)


def test_wrong_call_in_a_demonstration_is_context_and_does_not_train(renderer):
    shown = list(islice(functions(flaw_rate=0, correction_rate=1).demonstrations(0), 40))
    corrected = [one for one in shown if one.trains != assistants(one)]
    assert len(corrected) > 10
    for one in corrected[:5]:
        at = next(i for i, m in enumerate(one.messages) if m["role"] == "assistant")
        assert one.messages[at + 1]["content"].startswith("Error:")
        assert one.trains[at] is False
        row = dialogue_row(renderer, one)
        kept = renderer.tokenizer.decode([t for t, train in zip(row.tokens, row.trains, strict=True) if train])
        whole = renderer.tokenizer.decode(row.tokens)
        assert whole.count("<tool_call>") == kept.count("<tool_call>") + 1
        assert "Done." in kept
        assert "Error:" not in kept
    right = islice(functions(flaw_rate=0, correction_rate=0).demonstrations(0), 20)
    assert all(one.trains == assistants(one) for one in right)


def test_custom_world_can_mark_trained_messages(renderer):
    call = MessageToolCall(id="c", type="function", function=FunctionCall(name="look", arguments='{"item": "fig"}'))
    said = (
        Message(role="user", content="What does a fig cost?"),
        Message(role="assistant", content="", tool_calls=[call], train=False),
        Message(role="tool", content="fig costs 4", tool_call_id="c"),
        Message(role="assistant", content="4"),
    )
    world = ToolWorld("own", {"train": ()}, [look], (), show=lambda seed: iter([said]))
    (shown,) = world.demonstrations(0)
    assert shown.trains == (False, False, False, True)
    flagged, plain = (
        dialogue_row(renderer, one)
        for one in (shown, Dialogue(tuple({k: v for k, v in m.items() if k != "train"} for m in said), (look,)))
    )
    assert flagged.tokens == plain.tokens
    assert sum(flagged.trains) < sum(plain.trains)
    with pytest.raises(UserError, match="has no trained message"):
        dialogue_row(renderer, Dialogue(said[:2], (look,)))


def test_a_file_is_read_once_and_again_after_a_change(tmp_path, monkeypatch):
    file, reads = tmp_path / "data.jsonl", []
    monkeypatch.setattr(sources, "read_sft_data", lambda path: reads.append(path) or read_sft_data(path))
    config, world = load_config("functions", ["--sft.data", str(file)]), functions()
    for text in ("one", "another"):
        write(file, {"text": text})
        for _ in range(3):
            check_sources(config, world)
            assert next(dialogues(config, world))[0].messages[0]["content"] == text
    assert len(reads) == 2


def test_data_class_is_inferred_from_messages_unless_set():
    user, answer = Message(role="user", content="?"), Message(role="assistant", content="4")
    call = {**answer, "tool_calls": [CALL]}
    for dialogue, found in (
        (Dialogue((user, call), (look,)), "tool_use"),
        (Dialogue((user, answer), (look,)), "negatives"),
        (Dialogue((user, {**answer, "reasoning_content": "hm"}), ()), "reasoning"),
        (Dialogue((user, answer), ()), "format"),
        (Dialogue((user, answer), (), "negatives"), "negatives"),
    ):
        assert class_of(dialogue) == found
    shown = Counter(one.data_class for one in islice(functions(flaw_rate=1).demonstrations(0), 60))
    assert set(shown) == {"tool_use", "negatives"}  # also where the demonstration calls and should not


TABLE = """
[sft.sources.calls]
data = "{0}/calls.jsonl"
weight = 3
[sft.sources.plain]
data = "{0}/plain.jsonl"
data_class = "reasoning"
[sft.sources.requests]
world = "functions"
settings = {{ num_tasks = 20, flaw_rate = 0.0 }}
weight = 4
[sft.classes]
negatives = 0.5
format = 2
"""


@pytest.fixture
def recipe(tmp_path):
    write(tmp_path / "calls.jsonl", GOOD, {**GOOD, "data_class": "format"})
    write(tmp_path / "plain.jsonl", messages(ASK, SAY))
    path = make_recipe(tmp_path)
    path.write_text(path.read_text() + TABLE.format(tmp_path))
    return path


@pytest.mark.slow
def test_sources_and_classes_are_drawn_by_their_weights_and_the_same_each_time(recipe):
    def drawn(*words, num=400):
        config = load_config(recipe, words)
        return list(islice(dialogues(config, functions()), num))

    found = drawn()
    counts = Counter(name for _, name in found)
    files = Counter(one.messages[0]["content"] == ASK["content"] for one, _ in found)
    assert 0.42 < files[False] / 400 < 0.58  # 4 of 8
    assert 0.08 < counts["reasoning"] / 400 < 0.18  # 1 of 8: the class that its source names
    own = [name for one, name in found if one.messages[0]["content"] == ASK["content"] and name != "reasoning"]
    assert own.count("format") / len(own) == pytest.approx(2 / 3, abs=0.08)  # twice as often as tool_use
    assert [one.messages for one, _ in found] == [one.messages for one, _ in drawn()]
    assert [one.messages for one, _ in found] != [one.messages for one, _ in drawn("--run.seed", "1")]
    assert "negatives" not in Counter(name for _, name in drawn("--sft.classes.negatives", "0", num=200))


def test_without_weights_the_order_is_that_of_the_world(tmp_path):
    config = load_config(make_recipe(tmp_path), ())
    world = functions()
    drawn = [one.messages for one, _ in islice(dialogues(config, world), 20)]
    assert drawn == [one.messages for one in islice(world.demonstrations(1), 20)]


def test_demonstrations_that_end_are_shown_again(tmp_path):
    said = (Message(role="user", content="?"), Message(role="assistant", content="4"))
    config = load_config(make_recipe(tmp_path), ())
    short = ToolWorld("short", {"train": ()}, (), (), show=lambda seed: iter([said]))
    assert len(list(islice(dialogues(config, short), 5))) == 5
    empty = ToolWorld("none", {"train": ()}, (), (), show=lambda seed: iter(()))
    with pytest.raises(UserError, match="The world 'none' has no dialogue"):
        next(dialogues(config, empty))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sft.classes.negative", "1"), "negative"),
        (("--sft.classes.negatives", "-1"), "sft.classes.negatives"),
        (("--sft.data", "x.jsonl"), "are mutually exclusive"),
        (("--sft.sources.plain.world", "math"), "are mutually exclusive"),
        (("--sft.sources.calls.settings", "{a = 1}"), "world is not set"),
        (("--sft.sources.calls.weight", "0"), "weight"),
        (("--sft.classes", "{format = 0, reasoning = 0, tool_use = 0, negatives = 0}"), "no dialogues remain"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(recipe, words, said):
    with pytest.raises(ConfigError, match=said):
        load_config(recipe, words)


def test_source_without_a_selected_class_is_rejected(recipe):
    config = load_config(recipe, ("--sft.classes.reasoning", "0"))
    with pytest.raises(UserError, match=rf"plain.jsonl has {MAX_SKIPPED:,} dialogues in a row of classes"):
        list(islice(dialogues(config, functions()), 40))


def test_data_class_in_a_file_is_checked_and_kept(tmp_path):
    path = write(tmp_path / "odd.jsonl", {**GOOD, "data_class": "tools"})
    with pytest.raises(UserError, match="line 1, is not a dialogue: data_class is 'tools', and must be one of"):
        read_dialogues(path)
    good = write(tmp_path / "good.jsonl", {**GOOD, "data_class": "format"}, GOOD)
    assert [one.data_class for one in read_dialogues(good)] == ["format", None]
    assert [parse_record(row_of(one)).data_class for one in read_dialogues(good)] == ["format", None]


@pytest.mark.slow
def test_fine_tuning_on_sources_logs_each_class_and_resumes_to_the_same_bytes(recipe, tmp_path, tiny_run):
    words = ("--model", cold_start(tiny_run), "--sft.batch_size", "4", "--sft.warmup_steps", "0")
    base = ("sft", recipe, *words, "--sft.schedule", "constant")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert ludus(*base, "--sft.steps", "5", "--run.dir", whole).code == 0
    assert ludus(*base, "--sft.steps", "2", "--run.dir", cut).code == 0
    assert ludus("sft", "--resume", cut, "--sft.steps", "5").code == 0
    assert lasting_files(cut) == lasting_files(whole)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    logged = [{k: v for k, v in (row.get("metrics") or row).items() if k.startswith("data/")} for row in rows]
    assert all(sum(v for k, v in row.items() if k.endswith("/share")) == pytest.approx(1) for row in logged)
    assert all(v > 0 for row in logged for v in row.values())
    assert {"data/tool_use/loss", "data/tool_use/share"} <= set().union(*logged)
