"""Small random vision-language models with tokenizer and processor, built offline, and pictures for them."""

import io
from pathlib import Path

import torch
from PIL import Image as Pictures
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ludus.images import image_url

SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<global-img>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LISTS_ONLY = TEMPLATE.replace("{% if m['content'] is string %}{{ m['content'] }}{% else %}", "").replace(
    "{% endfor %}{% endif %}<|im_end|>", "{% endfor %}<|im_end|>"
)
"""A template without support for content as a string, such as SmolVLM's."""
SIDE = 16
"""Pixels of a side of the pictures, and of the models' input."""


def picture(color: tuple[int, int, int], size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    """Return a PNG file of one color."""
    file = io.BytesIO()
    Pictures.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


RED, GREEN, BLUE = (image_url(picture(color)) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255)))


def make_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer without merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *letters))}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.chat_template = template
    return made


def text_settings(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    return {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "max_position_embeddings": 512, **sizes, **ids}


def make_llava(folder: Path, template: str = TEMPLATE, seed: int = 0, std: float = 0.1) -> Path:
    """Write a LLaVA model (CLIP and Llama) whose images take 4 tokens."""
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    tokenizer = make_tokenizer(template)
    pixels = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    processor = LlavaProcessor(
        pixels, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=SIDE, patch_size=8, projection_dim=32)
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**text_settings(tokenizer), initializer_range=std, tie_word_embeddings=False),
        image_token_id=3,
        image_seq_length=4,
    )
    torch.manual_seed(seed)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_idefics3(folder: Path, template: str = LISTS_ONLY, seed: int = 0) -> Path:
    """Write an Idefics3 model (SigLIP-like and Llama) whose images take 4 tokens between two markers."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessor, Idefics3Processor

    tokenizer = make_tokenizer(template)
    pixels = Idefics3ImageProcessor(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, do_image_splitting=False
    )
    processor = Idefics3Processor(pixels, tokenizer, image_seq_len=4)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        text_config={"model_type": "llama", **text_settings(tokenizer), "initializer_range": 0.1},
        image_token_id=3,
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
