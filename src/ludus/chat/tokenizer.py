"""A byte-level BPE tokenizer made on the spot, with the package's own chat template."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from itertools import chain
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens of their own that stay visible when text is decoded."""


ROLES = ("system", "user", "assistant", "tool", "Tools")
"""Words of the template, which occur in every dialogue and in no message."""

PATTERN = r" ?\p{Ll}+|\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s"
"""Where text is cut before merges. A blank belongs to a lower-case word or a mark that follows it, and
otherwise stands alone: a name or a number is the same tokens wherever it stands, after a blank, in quotes or
at the start of an answer, so that copying it is copying tokens."""


def chat_template() -> str:
    """The package's ChatML template with thinking, tool calls and tool messages."""
    return resources.files("ludus.chat").joinpath("template.jinja").read_text("utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:  # noqa: ANN401 (a transformers tokenizer)
    """Train a byte-level BPE on `texts` and wrap it as a Hugging Face tokenizer.

    Deterministic for the same texts in the same order. Every string encodes and decodes back unchanged.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKS),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain(ROLES * 500, texts), trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = chat_template()
    return wrapped
