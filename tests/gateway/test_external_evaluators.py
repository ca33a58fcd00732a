"""Inspect and lm-eval evaluate a checkpoint through `ludus serve` (`make foreign` installs them apart)."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gateway.external_evaluators import CONTINUATIONS, QUESTION
from served import COLD_START

pytestmark = pytest.mark.foreign
PYTHON = Path(__file__).parents[2] / ".bench" / "evaluators" / "bin" / "python"


def evaluated(*arguments):
    script = Path(__file__).with_name("external_evaluators.py")
    done = subprocess.run([PYTHON, script, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_inspect_task_with_a_tool_evaluates_the_checkpoint(served, tmp_path):
    said = evaluated("inspect", f"{served.url}/v1", tmp_path)
    assert (said["status"], said["error"]) == ("success", "")
    assert said["scores"] == ["C", "I"]
    assert said["calls"] == ["search", "search"]
    assert said["usage"]["openai-api/ludus/policy"] > 0
    assert [*tmp_path.glob("*.eval")]


def test_lm_eval_reads_the_log_likelihoods_of_the_model(served):
    tokenizer, model = (kind.from_pretrained(COLD_START) for kind in (AutoTokenizer, AutoModelForCausalLM))
    expected = []
    for text in CONTINUATIONS:
        start, ids = (tokenizer.encode(whole, add_special_tokens=False) for whole in (QUESTION, QUESTION + text))
        assert ids[: len(start)] == start
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        expected.append(sum(float(scores[place - 1, ids[place]]) for place in range(len(start), len(ids))))
    found = evaluated("lm-eval", f"{served.url}/v1", COLD_START)
    assert [score for score, _ in found] == pytest.approx(expected, abs=1e-3)
