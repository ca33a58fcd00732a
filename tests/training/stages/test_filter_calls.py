"""Toolformer's filter: its rule, its loss, and the command."""

from __future__ import annotations

import json

import pytest
import torch

from ludus.chat.render import TemplateRenderer
from ludus.engines.models.loading import load_model, load_tokenizer
from ludus.training.datasets.call_filter import NextMessageLosses, filter_calls
from ludus.training.datasets.files import FileDialogue, read_dialogues
from ludus.training.learner.logprobs import LogprobScorer
from ludus.types import Message
from tiny_run import cold_start, ludus, refused
from tiny_world import look


def call(name, number):
    function = {"name": name, "arguments": json.dumps({"item": number})}
    one = {"id": f"call_{number}", "type": "function", "function": function}
    return Message(role="assistant", content="", tool_calls=[one])


def result(number, text):
    return Message(role="tool", content=text, tool_call_id=f"call_{number}", name="look")


ASKED = Message(role="user", content="What does pear cost?")
TWO = (
    ASKED, call("look", 0), result(0, "pear costs 3"), call("look", 1), result(1, "plum costs 4"),
    Message(role="assistant", content="3"),
)  # fmt: skip
DIALOGUE = FileDialogue(TWO, (), tuple(m["role"] == "assistant" for m in TWO))


@pytest.mark.parametrize(
    ("losses", "margin", "kept"),
    [
        ([(1.0, 3.0, 2.0), (1.0, 3.0, 3.0)], 1.0, [0, 1, 2, 3, 4, 5]),
        ([(1.0, 3.0, 1.5), (1.0, 3.0, 3.0)], 1.0, [0, 3, 4, 5]),  # the results do not help the first one
        ([(1.0, 3.0, 2.0), (1.0, 1.9, 3.0)], 1.0, [0, 1, 2, 5]),
        ([(1.0, 3.0, 1.5), (1.0, 1.9, 3.0)], 0.5, [0, 1, 2, 3, 4, 5]),
        ([(2.0, 1.0, 1.0), (2.0, 1.0, 1.0)], 0.0, [0, 5]),
    ],
)
def test_a_call_is_kept_if_the_loss_falls_below_both_others_by_the_margin(losses, margin, kept):
    given, seen = iter(losses), []

    def lookup(variants):
        seen.append(variants)
        return list(next(given))

    found = filter_calls(DIALOGUE, lookup, margin)
    assert found.dialogue.messages == tuple(TWO[i] for i in kept)
    assert found.dialogue.trains == tuple(DIALOGUE.trains[i] for i in kept)
    assert found.gains == pytest.approx([min(b, c) - a for a, b, c in losses])
    assert found.num_rejected == (6 - len(kept)) // 2
    first, second = seen
    assert [v.messages for v in first[:2]] == [TWO[:4], (TWO[0], TWO[3])]
    assert [m["content"] for m in first[2].messages] == [ASKED["content"], "", "", ""]
    assert second[1].messages == (*TWO[:3], TWO[5])
    assert second[2].messages[2]["content"] == "pear costs 3"
    assert second[2].messages[4]["content"] == ""


@pytest.mark.slow
def test_loss_and_command_on_a_model(tiny_run, tmp_path):
    path = cold_start(tiny_run)
    model, tokenizer = load_model(str(path), "float32", "cpu"), load_tokenizer(str(path), needs_template=True)
    renderer = TemplateRenderer(tokenizer)
    found = NextMessageLosses(LogprobScorer(model), renderer, 3)([DIALOGUE])
    tokens, answer = list(renderer.prompt(TWO[:1], ())), renderer.action(TWO[:5], TWO[5], ())
    tokens += [*renderer.action(TWO[:1], TWO[1], ()), *renderer.observation(TWO[2:3])]
    tokens += [*renderer.action(TWO[:3], TWO[3], ()), *renderer.observation(TWO[4:5]), *answer]
    with torch.no_grad():
        table = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    nll = [-float(table[len(tokens) - len(answer) + i - 1, token]) for i, token in enumerate(answer)]
    weights = [max(0.0, 1 - i / 3) for i in range(len(answer))]
    expected = sum(w * x for w, x in zip(weights, nll, strict=True)) / sum(weights)
    assert found == pytest.approx([expected], abs=1e-4)

    file, out = tmp_path / "d.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps({"messages": TWO, "tools": [look.schema]}) + "\n")
    words = (file, out, "--model", path)
    said = ludus("filter-calls", *words, "--margin", "1e9")
    assert said.code == 0, said
    assert "2 calls compared, 2 removed" in said.out
    (first,) = map(json.loads, out.read_text().splitlines())
    assert [m["role"] for m in first["messages"]] == ["user", "assistant"]
    assert "exists" in refused("filter-calls", *words)
    out.unlink()
    assert ludus("filter-calls", *words, "--margin=-1e9").code == 0
    file.write_text(out.read_text().splitlines()[0])
    assert len(read_dialogues(file)[0].messages) == len(TWO)
