"""Checkpoints written and loaded, and error messages for broken ones."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from generators import model_families
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from ludus.config.sections.model import ModelInitConfig
from ludus.engines.embedded.engine import LocalEngine
from ludus.engines.models.fingerprint import fingerprint_module
from ludus.engines.models.loading import build_tiny, load_model, load_tokenizer, resolve_device, save_model
from ludus.errors import StorageError, UserError
from tests.engines.test_engine_local import ask, batch, build, gemma2, hf_greedy

SCRATCH = ModelInitConfig(
    vocab_size=300, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1
)


def byte_tokenizer(template="{{ messages[0].content }}"):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", chat_template=template
    )


@pytest.fixture
def checkpoint(tmp_path):
    tokenizer = byte_tokenizer()
    save_model(build_tiny(SCRATCH, tokenizer, seed=3), tokenizer, tmp_path / "model")
    return tmp_path / "model"


def edit_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_tiny_model_weights_depend_only_on_the_seed():
    tokenizer = byte_tokenizer()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    prints = [fingerprint_module(build_tiny(SCRATCH, tokenizer, seed)) for seed in (3, 3, 4)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    prints.append(fingerprint_module(build_tiny(SCRATCH, tokenizer, 3)))
    assert prints[0] == prints[1] == prints[3] != prints[2]


def test_tiny_model_has_the_configured_shape():
    tokenizer = byte_tokenizer()
    model = build_tiny(SCRATCH, tokenizer, 0)
    assert model.config.vocab_size == len(tokenizer) == 258
    assert model.config.max_position_embeddings == SCRATCH.context_tokens
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[1].self_attn.k_proj.weight.shape == (8, 16)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert not model.training


@pytest.mark.parametrize("std", [0.02, 0.1])
def test_tiny_model_has_weights_of_the_configured_deviation(std):
    model = build_tiny(SCRATCH.model_copy(update={"initializer_range": std}), byte_tokenizer(), 0)
    matrices = [weight.flatten() for weight in model.parameters() if weight.ndim == 2]
    assert torch.cat(matrices).std().item() == pytest.approx(std, rel=0.03)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"vocab_size": 300, "hidden_size": 18, "num_heads": 4}, "hidden_size"),
     ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads")],
)  # fmt: skip
def test_inconsistent_model_sizes_are_rejected(change, word):
    with pytest.raises(ValidationError, match=word):
        ModelInitConfig(**SCRATCH.model_dump() | change)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"word{number}" for number in range(60)])
    with pytest.raises(UserError, match="318 tokens"):
        build_tiny(SCRATCH, tokenizer, 0)


def test_a_saved_model_loads_with_the_same_weights_and_ties(checkpoint):
    model = load_model(str(checkpoint), device="cpu")
    assert fingerprint_module(model) == fingerprint_module(build_tiny(SCRATCH, byte_tokenizer(), 3))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(checkpoint / "model.safetensors")
    assert model.config._attn_implementation == "sdpa"
    assert not model.training
    tokenizer = load_tokenizer(str(checkpoint), needs_template=True)
    assert tokenizer.encode("héllo") == byte_tokenizer().encode("héllo")


def test_load_model_uses_the_requested_dtype(checkpoint):
    assert load_model(str(checkpoint)).config._attn_implementation == "sdpa"
    for name, dtype in (("bfloat16", torch.bfloat16), ("float64", torch.float64)):
        assert {p.dtype for p in load_model(str(checkpoint), name, "cpu").parameters()} == {dtype}


def test_model_without_sdpa_support_loads_and_samples_with_eager_attention(tmp_path):
    """Gemma2 caps the logits of its attention, which torch's own cannot."""
    save_model(build(gemma2), byte_tokenizer(), tmp_path / "model")
    model = load_model(str(tmp_path / "model"))
    assert model.config._attn_implementation == "eager"
    history = tuple(range(20))
    (answer,) = batch(LocalEngine(model), ask([history], max_new_tokens=8, temperature=0))
    assert answer.tokens == hf_greedy(model, history, 8)


def test_multimodal_checkpoint_loads_and_saves_only_its_text_model(tmp_path):
    text = model_families.build("qwen3_5_text").config.to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).eval()
    whole.save_pretrained(tmp_path / "whole")
    model = load_model(str(tmp_path / "whole"), device="cpu")
    save_model(model, byte_tokenizer(), tmp_path / "text")
    again = load_model(str(tmp_path / "text"), device="cpu")
    tokens = torch.arange(12)[None]
    expected = whole(input_ids=tokens).logits
    for loaded in (model, again):
        assert torch.allclose(loaded(input_ids=tokens).logits, expected, atol=1e-6)


def test_missing_tensor_raises_user_error(checkpoint):
    edit_weights(checkpoint, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=r"lacks weights \(1\): model.layers.1.mlp.up_proj.weight"):
        load_model(str(checkpoint), device="cpu")


def test_unexpected_tensor_raises_user_error(checkpoint):
    edit_weights(checkpoint, lambda weights: weights.update(strange=torch.ones(2)))
    with pytest.raises(UserError, match=r"has unexpected weights \(1\): strange"):
        load_model(str(checkpoint), device="cpu")


def test_tensor_with_wrong_shape_raises_user_error(checkpoint):
    edit_weights(checkpoint, lambda weights: weights.update({"model.norm.weight": torch.ones(17)}))
    with pytest.raises(UserError, match=r"has wrongly shaped weights \(1\): model.norm.weight"):
        load_model(str(checkpoint), device="cpu")


def test_corrupt_weight_file_raises_user_error(checkpoint):
    (checkpoint / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_model(str(checkpoint), device="cpu")


def test_missing_model_folder_raises_error(tmp_path):
    for load in (load_model, load_tokenizer):
        with pytest.raises(UserError, match=r"model folder .* does not exist"):
            load(str(tmp_path / "nothing"))


def test_folder_without_config_json_raises_error(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(str(tmp_path))
    with pytest.raises(UserError, match="The tokenizer of"):
        load_tokenizer(str(tmp_path))


def test_non_causal_language_models_raise_user_error(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = ["Qwen3ForSequenceClassification"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="Qwen3ForSequenceClassification"):
        load_model(str(checkpoint))
    bert = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(UserError, match="not a causal language model"):
        load_model(str(tmp_path / "bert"))


def test_missing_chat_template_raises_only_when_required(tmp_path):
    byte_tokenizer(template=None).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template is None
    with pytest.raises(UserError, match="no chat template"):
        load_tokenizer(str(tmp_path), needs_template=True)


def test_unwritable_model_folder_raises_storage_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    tokenizer = byte_tokenizer()
    with pytest.raises(StorageError, match="cannot be written"):
        save_model(build_tiny(SCRATCH, tokenizer, 0), tokenizer, tmp_path / "file" / "model")


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="no CUDA device"):
        resolve_device("cuda")


def test_merging_adapters_lost_to_bfloat16_rounding_raises_error(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    for size, lost in ((1e-4, True), (1.0, False)):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(load_model(str(checkpoint), device="cpu"), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, size)
        folder = tmp_path / f"adapters-{size}"
        model.save_pretrained(folder)
        load_model(str(folder), "float32", "cpu")
        if lost:
            with pytest.raises(UserError, match="bfloat16 weights loses"):
                load_model(str(folder), "bfloat16", "cpu")
        else:
            load_model(str(folder), "bfloat16", "cpu")


def test_models_are_loaded_in_several_threads(checkpoint):
    with ThreadPoolExecutor(4) as pool:
        loaded = [pool.submit(load_model, str(checkpoint)) for _ in range(8)]
        assert len({fingerprint_module(one.result()) for one in loaded}) == 1
