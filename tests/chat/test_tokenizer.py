"""The trained tokenizer: lossless, and equal for equal texts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ludus.chat.tokenizer import MARKS, SPECIAL, chat_template, train_tokenizer

TEXTS = ["Paris is the capital of France.", "The Seine flows through Paris; 1,234 km.", '{"query": "Seine"}'] * 3
TOKENIZER = train_tokenizer(TEXTS, 350)
STATE = TOKENIZER.backend_tokenizer.to_str()


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_any_string_encodes_and_decodes_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


RARE = ["", " ", "\n \t\n", "  a  ,  b .  ", "e\u0301 👩‍👩‍👧‍👦", "\u200b\ufeff", "\x00\x7f", "do n't ?", "a\r\nb"]


@pytest.mark.parametrize("text", RARE)
def test_blanks_and_rare_characters_stay(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_encode_adds_no_special_tokens():
    assert TOKENIZER.encode("Paris") == TOKENIZER.encode("Paris", add_special_tokens=False)


def test_training_is_deterministic():
    assert train_tokenizer(list(TEXTS), 350).backend_tokenizer.to_str() == STATE
    assert train_tokenizer(["Zebras graze."] * 9, 350).backend_tokenizer.to_str() != STATE


def test_the_vocabulary_has_at_most_the_requested_size():
    assert len(TOKENIZER) <= 350
    assert max(TOKENIZER.get_vocab().values()) == len(TOKENIZER) - 1


def test_frequent_words_are_one_token():
    assert len(TOKENIZER.encode("Paris")) == 1
    assert len(TOKENIZER.encode("Parzt")) > 1


def test_name_tokens_are_independent_of_context():
    name = TOKENIZER.encode("Paris")
    for before, after in (("in ", "."), ('"query": "', '"}}'), ("", "<|im_end|>"), ("\n", "\n")):
        around = TOKENIZER.encode(before + "Paris" + after)
        assert [around[i : i + len(name)] for i in range(len(around))].count(name) == 1


@pytest.mark.parametrize("mark", [*SPECIAL, *MARKS])
def test_each_mark_is_one_token_and_decodes_visibly(mark):
    (token,) = TOKENIZER.encode(mark)
    assert TOKENIZER.decode([token]) == mark
    hidden = TOKENIZER.decode(TOKENIZER.encode(f"a{mark}b"), skip_special_tokens=True)
    assert hidden == ("ab" if mark in SPECIAL else f"a{mark}b")


def test_the_end_of_turn_ends_a_sequence():
    assert TOKENIZER.eos_token == "<|im_end|>"
    assert TOKENIZER.pad_token == "<|endoftext|>"
    assert TOKENIZER.pad_token_id != TOKENIZER.eos_token_id


def test_saving_and_loading_keeps_everything(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "Zürich  ,  don't\n<think>a</think><tool_call>{}</tool_call><|im_end|> 🗼 \u200b"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert loaded.chat_template == chat_template()
    assert (loaded.eos_token, loaded.pad_token) == (TOKENIZER.eos_token, TOKENIZER.pad_token)
    special = {i: (str(t), t.special) for i, t in TOKENIZER.added_tokens_decoder.items()}
    assert {i: (str(t), t.special) for i, t in loaded.added_tokens_decoder.items()} == special
    messages = [{"role": "user", "content": "Where is Paris?"}]
    rendered = [t.apply_chat_template(messages, add_generation_prompt=True) for t in (TOKENIZER, loaded)]
    assert rendered[0] == rendered[1]
