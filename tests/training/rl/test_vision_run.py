"""A vision-language model learns the color of a square from pictures: fine-tuning, evaluation, and RL."""

import math
import random

import pytest
import torch
from safetensors.torch import load_file

from ludus.chat.render import TemplateRenderer
from ludus.diagnostics.alarms import LOGPROB_GAP
from ludus.diagnostics.trackers import read_metrics
from ludus.engines.models.loading import load_model, load_tokenizer
from ludus.engines.models.vision import image_tokens
from ludus.images import IMAGE_IDS, ImageToken
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from tests.vision_models import make_llava
from tests.vision_run import command
from tests.vision_world import LETTERS, make_task, shown
from tiny_run import ludus


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vision")


@pytest.fixture(scope="module")
def model(folder):
    return make_llava(folder / "model")


def tuned(model, folder, name, steps):
    """Fine-tune for some steps; return the checkpoint and the metrics."""
    said = command("sft", model, folder, "--run.dir", folder / name, "--sft.steps", steps)
    assert said.code == 0, said
    (checkpoint,) = (folder / name / "checkpoints").glob(f"step-{steps:06d}")
    return checkpoint, read_metrics(folder / name / "metrics.jsonl")


def weights(checkpoint):
    return load_file(checkpoint / "model.safetensors")


@pytest.mark.slow
def test_every_stage_runs_on_pictures(model, folder):
    checkpoint, _ = tuned(model, folder, "begun", 8)
    before, after = weights(model), weights(checkpoint)
    assert before.keys() == after.keys()
    assert any("vision_tower" in name and not torch.equal(before[name], after[name]) for name in before)
    few = ("--training.steps", 1, "--evaluation.tasks", 2, "--evaluation.every", 9, "--training.prompts_per_step", 3)
    said = command("train", checkpoint, folder, "--run.dir", folder / "run", *few)
    assert said.code == 0, said
    (row,) = [row for row in read_metrics(folder / "run" / "metrics.jsonl") if LOGPROB_GAP in row.metrics]
    assert row.metrics[LOGPROB_GAP] < 1e-4
    assert row.metrics["optim/grad_norm"] > 0
    records = list(read_rollouts(rollouts_path(folder / "run", 1)))
    assert len(records) == 12
    for record in records:
        num_images = sum(len(message.get("images", ())) for message in record.trajectory.messages)
        assert sum(isinstance(token, ImageToken) for token in record.trajectory.token_ids) == 4 * num_images > 0
        assert not any(s.kind == "action" and max(s.tokens) >= IMAGE_IDS for s in record.trajectory.segments)
    assert "[image 20x18 " in ludus("show", folder / "run", "--step", 1).out
    assert ludus("show", folder / "run", "--step", 1, "--tokens").code == 0


@torch.no_grad()
def accuracy(checkpoint, seen):
    """Return the fraction of test tasks whose first answer is that of the task, given pictures of the colors `seen`."""
    model = load_model(str(checkpoint), device="cpu")
    renderer = TemplateRenderer(load_tokenizer(str(checkpoint)), images=image_tokens(model))
    tasks, right = [make_task("test", number) for number in range(48)], 0
    for number, task in enumerate(tasks):
        prompt = (shown(seen(task.truth[0]), random.Random(number)),)
        ids = torch.tensor([renderer.prompt(prompt, ())])
        answer = renderer.tokenizer.decode([int(model(input_ids=ids).logits[0, -1].argmax())])
        right += answer == task.truth[0]
    return right / len(tasks)


@pytest.mark.slow
def test_fine_tuning_reads_the_answer_from_the_picture(model, folder):
    checkpoint, rows = tuned(model, folder, "learned", 30)
    chance = math.log(3) / 2  # half of the trained tokens end a turn
    assert rows[-1].metrics["loss/total"] < chance / 4
    assert accuracy(checkpoint, lambda letter: letter) > 0.9
    assert accuracy(checkpoint, lambda letter: LETTERS[LETTERS.index(letter) - 1]) < 0.1
