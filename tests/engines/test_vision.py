"""Vision-language models in engine and learner: exact log-probabilities, caches, masks, and rejected models."""

import asyncio
import copy
import functools
from pathlib import Path

import pytest
import torch

from ludus.chat.render import TemplateRenderer
from ludus.config.sections.model import LoraConfig
from ludus.engines.base import Request
from ludus.engines.embedded import engine as engine_module
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.embedded.generic_scheduler import GenericScheduler
from ludus.engines.models import vision
from ludus.engines.models.loading import load_model, load_tokenizer, save_model
from ludus.engines.models.vision import enable_images, image_tokens
from ludus.errors import RequestRejected, UserError
from ludus.images import IMAGE_IDS, Image, content_parts, image_url, read_image
from ludus.rollouts.episode import EngineChatSession
from ludus.training.batches.rows import microbatches, row_of_segments, row_of_trajectory
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.run.session import add_lora
from ludus.types import Message, SamplingParams, StopReason, Trajectory
from tests.vision_models import BLUE, GREEN, RED, SPECIAL, make_idefics3, make_llava, make_tokenizer, picture

TOLERANCE = 2e-4
MAKERS = {"llava": make_llava, "idefics3": make_idefics3}


@pytest.fixture(scope="module", params=sorted(MAKERS))
def folder(request, tmp_path_factory):
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"))


def load(folder: Path):
    model, tokenizer = load_model(str(folder), device="cpu"), load_tokenizer(str(folder), needs_template=True)
    return model, TemplateRenderer(tokenizer, images=image_tokens(model))


def user(text, *images):
    return Message(role="user", content=text, images=list(images))


def settings(**changes):
    return EngineSettings(context_tokens=256, threads=1, **changes)


def plain_logprobs(folder, messages_text, urls, action):
    """Return the log-probabilities of an action after a text, from the model of transformers and its processor."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    pictures = [read_image(url).picture() for url in urls]
    given = processor(text=messages_text, images=[pictures], return_tensors="pt")
    ids = torch.cat([given.pop("input_ids"), torch.tensor([action])], 1)
    del given["attention_mask"]
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, **given).logits[0, -len(action) - 1 : -1]
    return logits.double().log_softmax(-1).gather(1, torch.tensor(action)[:, None])[:, 0], ids.shape[1]


async def play(engine, renderer, images=(RED, BLUE, GREEN), episode="e", seed=0):
    """Play three turns with images in the prompt and in both observations."""
    first, second, third = images
    params = SamplingParams(max_new_tokens=6, seed=3)
    chat = EngineChatSession(engine, renderer, params, 250, episode, seed)
    assert chat.open([user("Look: <image> and <image>?", first, second)], ()) is None
    await chat.act()
    assert chat.observe([user("then <image>", third)]) is None
    await chat.act()
    assert chat.observe([user("<image>", first)]) is None
    await chat.act()
    chat.close()
    return Trajectory("t", 0, chat.segments, (), StopReason.MAX_TURNS)


def learned(model, trajectories, max_tokens=4096):
    """Return the learner's log-probabilities of the sampled tokens of each row, and the engine's."""
    scorer = LogprobScorer(model)
    rows = [row_of_trajectory(one, 1.0) for one in trajectories]
    found = [None] * len(rows)
    for part in microbatches(rows, max_tokens, torch.device("cpu"), torch.float64, shared=scorer.shares_prefixes):
        scores = scorer.score(part.tokens, part.trains).logprobs
        for place, i in enumerate(part.index):
            found[i] = scores[place][part.trains[place]], part.behavior[place][part.trains[place]]
    return found


def gap(pairs):
    return max(float((own.detach().double() - behavior).abs().max()) for own, behavior in pairs)


def run(work):
    return asyncio.run(work)


def test_a_pass_over_image_tokens_is_the_models_own_pass_over_pixels(folder):
    model, renderer = load(folder)
    prompt = renderer.prompt([user("Look: <image> and <image>?", RED, BLUE)], [])
    text = "<|im_start|>user\nLook: <image> and <image>?<|im_end|>\n<|im_start|>assistant\n"

    async def work():
        engine = LocalEngine(model, renderer.tokenizer, settings())
        done = await engine.generate(Request("a", prompt, SamplingParams(max_new_tokens=10, seed=1)))
        scores = await engine.score((*prompt, *done.tokens))
        await engine.close()
        return done, scores

    done, scores = run(work())
    expected, length = plain_logprobs(folder, text, (RED, BLUE), done.tokens)
    assert length == len(prompt) + len(done.tokens)
    assert float((torch.tensor(done.logprobs).double() - expected).abs().max()) < TOLERANCE
    assert scores[len(prompt) :] == pytest.approx(done.logprobs, abs=TOLERANCE)
    assert all(score == 0 for token, score in zip(prompt, scores, strict=False) if token >= IMAGE_IDS)


@pytest.mark.parametrize(("kind", "pass_tokens"), [("paged", 512), ("paged", 7), ("generic", 7)])
def test_turns_in_the_cache_equal_one_pass_of_the_learner(folder, kind, pass_tokens, monkeypatch):
    if kind == "generic":
        monkeypatch.setattr(engine_module, "RaggedForward", refuse)
    model, renderer = load(folder)

    async def work():
        engine = LocalEngine(model, renderer.tokenizer, settings(pass_tokens=pass_tokens, max_batch=4))
        assert isinstance(engine._scheduler, GenericScheduler) == (kind == "generic")
        others = [(GREEN, RED, BLUE), (RED, BLUE, RED)]
        found = [await play(engine, renderer)]
        found += await asyncio.gather(*(play(engine, renderer, images, f"{images}") for images in others))
        stats = engine.stats()
        await engine.close()
        return found, stats

    found, stats = run(work())
    assert stats.cached_tokens > sum(len(one.token_ids) for one in found) / 2
    assert sum(token >= IMAGE_IDS for token in found[0].token_ids) == 4 * len("abcd")
    assert gap(learned(model, found)) < TOLERANCE
    padded = LogprobScorer(model)
    padded.shares_prefixes = False
    part = microbatches([row_of_trajectory(found[0], 1.0)], 999, torch.device("cpu"), torch.float64)[0]
    own = padded.score(part.tokens, part.trains).logprobs
    assert gap([(own[part.trains], part.behavior[part.trains])]) < TOLERANCE


def refuse(*_):
    raise UserError("Not paged.")


def test_equal_texts_with_different_images_share_no_cache_beyond_the_image(llava):
    model, renderer = load(llava)
    prompts = [renderer.prompt([user("<image>?", url)], []) for url in (RED, BLUE, RED)]
    before = next(i for i, token in enumerate(prompts[0]) if token >= IMAGE_IDS)

    async def work():
        engine = LocalEngine(model, renderer.tokenizer, settings())
        found, cached = [], []
        for number, prompt in enumerate(prompts):
            engine.stats(reset=True)
            params = SamplingParams(max_new_tokens=1, seed=1, top_logprobs=20)
            found.append(await engine.generate(Request(f"e{number}", prompt, params)))
            cached.append(engine.stats().cached_tokens)
        await engine.close()
        return found, cached

    (red, blue, again), cached = run(work())
    assert red.top_logprobs == again.top_logprobs != blue.top_logprobs
    assert cached[0] == 0
    assert 0 < cached[1] <= before
    assert cached[2] == len(prompts[0]) - 1


def test_a_group_computes_its_prompt_and_its_image_once(llava, monkeypatch):
    model, renderer = load(llava)
    computed = []
    whole = vision.ImageEmbedding._compute
    monkeypatch.setattr(
        vision.ImageEmbedding, "_compute", lambda self, images: computed.append(1) or whole(self, images)
    )
    prompt = renderer.prompt([user("<image>?", RED)], [])
    requests = [Request(f"e{i}", prompt, SamplingParams(max_new_tokens=4, seed=i)) for i in range(4)]

    async def work():
        engine = LocalEngine(model, renderer.tokenizer, settings(pass_tokens=8))
        await engine.generate_batch(requests)
        stats = engine.stats()
        await engine.close()
        return stats

    stats = run(work())
    assert stats.cached_tokens == 3 * (len(prompt) - 1)
    assert len(computed) == 1


def test_images_of_one_pass_have_the_features_of_each_by_itself(folder):
    model, _ = load(folder)
    embedding = model.get_input_embeddings()
    sizes = ((16, 16), (16, 16), (32, 20), (16, 16))
    colors = ((255, 0, 0), (9, 200, 40), (0, 0, 255), (0, 0, 0))
    images = [read_image(image_url(picture(*one))) for one in zip(colors, sizes, strict=True)]
    calls, plain = [], model.get_image_features
    model.get_image_features = functools.wraps(plain)(lambda **given: calls.append(1) or plain(**given))
    together = embedding._compute(images)
    num_calls = len(calls)
    alone = [embedding._compute([image])[0] for image in images]
    assert num_calls < len(images)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(together, alone, strict=True))
    assert not torch.allclose(alone[0], alone[1], atol=1e-3)


@torch.no_grad()
def test_new_weights_of_the_vision_part_change_the_features(llava):
    model, renderer = load(llava)
    changed = copy.deepcopy(model)
    for name, parameter in changed.named_parameters():
        if "vision_tower" in name:
            parameter.mul_(1.5)
    prompt = renderer.prompt([user("<image>?", RED)], [])
    params = SamplingParams(max_new_tokens=3, seed=1)

    async def work():
        engine = LocalEngine(model, renderer.tokenizer, settings())
        before = await engine.generate(Request("a", prompt, params))
        await engine.load_weights(1, changed.state_dict())
        after = await engine.generate(Request("b", prompt, params))
        other = LocalEngine(changed, renderer.tokenizer, settings())
        expected = await other.generate(Request("a", prompt, params))
        await engine.close()
        await other.close()
        return before, after, expected

    before, after, expected = run(work())
    assert after.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
    assert after.logprobs != before.logprobs


def test_image_tokens_are_in_no_loss(llava):
    model, renderer = load(llava)

    async def work():
        engine = LocalEngine(model, renderer.tokenizer, settings())
        found = await play(engine, renderer)
        await engine.close()
        return found

    found = run(work())
    images = [token >= IMAGE_IDS for token in found.token_ids]
    assert any(images)
    for row in (
        row_of_trajectory(found, 1.0),
        row_of_trajectory(found, 1.0, mask_observations=False),
        row_of_segments(found.segments),
    ):
        for flags in (row.trains, row.sampled, row.observed or (False,) * len(images)):
            assert not any(image and flag for image, flag in zip(images, flags, strict=True))
    assert any(row_of_trajectory(found, 1.0, mask_observations=False).observed)


def test_the_gradient_does_not_depend_on_the_microbatches_and_reaches_the_vision_part(llava):
    model, renderer = load(llava)
    model = model.double()

    async def work():
        engine = LocalEngine(model, renderer.tokenizer, settings())
        found = [await play(engine, renderer, images, seed=i) for i, images in enumerate([(RED, BLUE, RED)] * 3)]
        await engine.close()
        return found

    found, gradients = run(work()), []
    for max_tokens in (4096, 1):
        model.zero_grad()
        from ludus.training.learner.logprobs import model_precision

        with model_precision(model):
            torch.stack([own.sum() for own, _ in learned(model, found, max_tokens)]).sum().backward()
        gradients.append(
            {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    assert max(float((a - b).abs().max()) for a, b in zip(*(g.values() for g in gradients), strict=True)) < 1e-10
    assert any("vision_tower" in name and bool(g.abs().max() > 0) for name, g in gradients[0].items())


def test_lora_adapts_the_text_part_alone(llava):
    model, renderer = load(llava)
    adapted = add_lora(model, LoraConfig(rank=2, alpha=4))
    names = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert names
    assert not any("vision_tower" in name or "projector" in name for name in names)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)

    async def work():
        engine = LocalEngine(adapted, renderer.tokenizer, settings())
        found = await play(engine, renderer)
        await engine.close()
        return found

    assert gap(learned(adapted, [run(work())])) < TOLERANCE


def test_a_saved_model_has_its_processor(llava, tmp_path):
    model, renderer = load(llava)
    save_model(model, renderer.tokenizer, tmp_path / "saved")
    again, other = load(tmp_path / "saved")
    message = user("<image>?", RED)
    assert other.prompt([message], []) == renderer.prompt([message], [])
    ids = torch.tensor([renderer.prompt([message], [])])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits)


def test_a_text_model_rejects_image_tokens(llava):
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.vision_models import text_settings

    tokenizer = make_tokenizer()
    model = LlamaForCausalLM(LlamaConfig(**text_settings(tokenizer)))
    _, renderer = load(llava)
    prompt = renderer.prompt([user("<image>?", RED)], [])

    async def work():
        engine = LocalEngine(model, tokenizer, settings())
        with pytest.raises(RequestRejected, match="outside the model's vocabulary"):
            await engine.generate(Request("a", prompt, SamplingParams()))
        await engine.close()

    run(work())


def test_a_model_without_processor_is_rejected(tmp_path):
    folder = make_llava(tmp_path)
    (folder / "processor_config.json").unlink()
    with pytest.raises(UserError, match="The processor of"):
        load_model(str(folder))


def test_a_model_that_positions_images_otherwise_is_rejected(llava, monkeypatch):
    """An image takes one position in this model, as rows and columns share positions in Qwen2-VL."""
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(llava).eval()
    plain = model.forward

    def forward(input_ids, **given):
        if "pixel_values" in given:
            steps = (input_ids != SPECIAL.index("<image>")).long()
            given["position_ids"] = steps.cumsum(1)
        return plain(input_ids=input_ids, **given)

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(UserError, match="differ by"):
        enable_images(model, AutoProcessor.from_pretrained(llava))


def test_images_are_decoded_once_for_their_data_url():
    (image,) = content_parts(user("<image>", RED))[1:2]
    assert isinstance(image, Image)
    assert read_image(RED) is image
