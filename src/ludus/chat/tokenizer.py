"""Train a byte-level BPE tokenizer with the package's chat template."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from itertools import chain
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that are not special, so that decoded text contains them."""

ROLES = ("system", "user", "assistant", "tool", "Tools")
"""Words of the template that occur in every dialogue but in no message."""

PATTERN = r" ?\p{Ll}+|\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s"
"""Pre-tokenization pattern. A space is joined with a following lower-case word or punctuation mark and
otherwise separate, so that a name or number has the same tokens after a space, in quotes and at the start of an
answer, and can be copied token by token."""


def chat_template() -> str:
    """Return the package's ChatML template with thinking, tool calls and tool messages."""
    return resources.files("ludus.chat").joinpath("template.jinja").read_text("utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:  # noqa: ANN401 (a transformers tokenizer)
    """Train a byte-level BPE on `texts` and wrap it as a Hugging Face tokenizer.

    Deterministic in the texts and their order. Every string round-trips unchanged.
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
