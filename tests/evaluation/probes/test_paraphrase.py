"""Paraphrased prompts: a policy that depends on one wording is found out."""

import asyncio
import json
from dataclasses import replace

import pytest

from ludus.errors import UserError
from ludus.evaluation.probes.paraphrase import measure_paraphrase, read_paraphrases
from ludus.types import Message
from small_worlds import RecordingWorld
from tests.evaluation.probes.scripted_policies import NUMBERS, PLAN, maker, number_in


def fragile(prompt, begun, turn):
    return "0" if "Here is the task" in prompt else number_in(prompt)


def measured(script, prompts=None, world=None):
    report = asyncio.run(measure_paraphrase(maker(script, world), replace(PLAN, samples=1), prompts))
    return {row["prompt"]: row for row in report.rows}


def test_wording_dependent_policy_fails_on_a_paraphrase():
    rows = measured(fragile)
    assert {name: row["success"].value for name, row in rows.items()} == {
        "original": 1,
        "please": 1,
        "task": 0,
        "question last": 1,
    }
    assert rows["task"]["difference"].interval.high < 0


def test_paraphrases_are_read_from_a_file(tmp_path):
    file = tmp_path / "paraphrases.jsonl"
    lines = [{"task_id": name, "prompt": f"Here is the task: utter {n}"} for name, n in list(NUMBERS.items())[:3]]
    file.write_text("\n".join(map(json.dumps, lines)))
    rows = measured(fragile, read_paraphrases(file))
    assert (rows["original"]["success"].value, rows["paraphrase"]["success"].value) == (1, 0)
    with pytest.raises(UserError, match="0 of the tasks have a paraphrase"):
        measured(fragile, {})


@pytest.mark.parametrize("line", ["no JSON", "[]", '{"task_id": "a"}', '{"task_id": "a", "prompt": 1}'])
def test_invalid_paraphrase_line_is_reported_with_its_number(line, tmp_path):
    (tmp_path / "bad.jsonl").write_text(f'{{"task_id": "a", "prompt": "b"}}\n{line}\n')
    with pytest.raises(UserError, match="line 2: not an object"):
        read_paraphrases(tmp_path / "bad.jsonl")
    with pytest.raises(UserError, match="cannot be read"):
        read_paraphrases(tmp_path / "none.jsonl")


def test_world_that_writes_its_own_prompts_is_rejected():
    async def start(number):
        return [Message(role="user", content="Say 40.")]

    world = RecordingWorld(hooks={"start": start})
    with pytest.raises(UserError, match="does not send the prompts of its tasks"):
        measured(fragile, world=world)
