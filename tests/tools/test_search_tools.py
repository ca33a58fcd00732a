"""Semantic and hybrid search, and reading pages."""

import asyncio
import json
import random

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from ludus.envs.tool_env import ToolExecutor, ToolLimits
from ludus.errors import ConfigError, UserError
from ludus.tools.base import Traits
from ludus.tools.fetch import fetch_tool, load_corpus, split_pages, text_of_html
from ludus.tools.search import (
    MAX_PASSAGES,
    RRF_K,
    DenseIndex,
    FolderEncoder,
    HybridIndex,
    PassageIndex,
    fuse,
    search_tool,
)
from ludus.types import Action, Message, ToolCall, ToolStatus
from ludus.worlds.search.world import SearchWorld, make_search_world
from small_worlds import tokenizer

PASSAGES = ["the cat sleeps", "a dog barks", "the cat and the dog", "rain falls", "nothing at all", "a dog"]


class LetterEncoder:
    """Vectors that count letters: a hand-made encoder."""

    def encode(self, texts):
        counts = np.array([[t.count(c) for c in "abcdefghijklmnopqrstuvwxyz"] for t in texts], dtype=np.float32)
        return counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny encoder as Hugging Face saves one."""
    path = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=400, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertModel(config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


# Dense


def test_dense_ranking_is_by_cosine_similarity():
    index = DenseIndex(PASSAGES, LetterEncoder())
    vectors = LetterEncoder().encode(PASSAGES)
    cosines = vectors @ LetterEncoder().encode(["dog barks"])[0]
    expected = sorted(range(6), key=lambda i: (-cosines[i], i))
    assert index.ranking("dog barks", 6) == expected
    assert index.search("dog barks", 1) == ["a dog barks"]


def test_equal_passages_keep_order_and_result_count_is_bounded():
    index = DenseIndex(["same"] * 30, LetterEncoder())
    assert index.ranking("same", 5) == [0, 1, 2, 3, 4]
    assert len(index.search("same", 99)) == MAX_PASSAGES
    assert len(index.search("same", -3)) == 1


def test_folder_encoder_makes_unit_vectors_independent_of_the_batch(folder):
    encoder = FolderEncoder(folder, batch=2)
    texts = [*PASSAGES, "", "Answer the question. " * 200]
    vectors = encoder.encode(texts)
    assert vectors.shape == (8, 16)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(8), abs=1e-5)
    alone = np.stack([encoder.encode([text])[0] for text in texts])
    assert np.abs(vectors - alone).max() < 1e-6
    assert len({tuple(np.round(v, 4)) for v in vectors}) == 8
    assert np.abs(FolderEncoder(folder, prefix="query: ").encode(texts) - vectors).max() > 1e-3


def test_embedding_is_the_normalised_mean_of_last_hidden_states(folder):
    text = "the cat"
    ids = torch.tensor([tokenizer()(text)["input_ids"]])
    with torch.no_grad():
        hidden = BertModel.from_pretrained(folder).eval()(input_ids=ids).last_hidden_state[0].mean(0)
    expected = (hidden / hidden.norm()).numpy()
    assert FolderEncoder(folder).encode([text])[0] == pytest.approx(expected, abs=1e-5)


def test_policy_checkpoint_can_be_used_as_encoder(tiny_run):
    checkpoint = sorted((tiny_run / "checkpoints").iterdir())[-1]
    index = DenseIndex(PASSAGES, FolderEncoder(checkpoint))
    for passage in PASSAGES:
        assert index.search(passage, 1) == [passage]


@pytest.mark.parametrize("broken", [None, "{}", '{"model_type": "no-such-type"}'])
def test_folder_without_a_model_raises_user_error(tmp_path, broken):
    if broken is not None:
        (tmp_path / "config.json").write_text(broken)
    with pytest.raises(UserError, match=str(tmp_path)):
        FolderEncoder(tmp_path)


# Hybrid


def test_reciprocal_rank_fusion_equals_hand_computed_order():
    """Places 1: 1/61 + 1/63, 2: 1/62 + 1/61, 3: 1/63, 4: 1/62."""
    assert RRF_K == 60
    assert fuse([[1, 2, 3], [2, 4, 1]]) == [2, 1, 4, 3]
    assert fuse([[7, 3], [3, 7]]) == [3, 7]
    assert fuse([[], []]) == []


def test_hybrid_ranking_equals_fusion_of_both_rankings():
    hybrid = HybridIndex(PassageIndex(PASSAGES), DenseIndex(PASSAGES, LetterEncoder()))
    words, meaning = (
        PassageIndex(PASSAGES).ranking("dog", 100),
        DenseIndex(PASSAGES, LetterEncoder()).ranking("dog", 100),
    )
    assert hybrid.ranking("dog", 6) == fuse([words, meaning])
    assert hybrid.search("dog", 2) == [PASSAGES[i] for i in fuse([words, meaning])[:2]]
    assert hybrid.search("zzzz", 1) != []


def test_fusing_indices_over_different_passages_raises():
    with pytest.raises(ValueError, match="the same passages"):
        HybridIndex(PassageIndex(PASSAGES), PassageIndex(PASSAGES[:2]))


def test_ranking_has_the_requested_depth_and_search_order():
    rng = random.Random(0)
    passages = [" ".join(rng.choices("abcdefgh", k=5)) for _ in range(300)]
    index = PassageIndex(passages)
    deep = index.ranking("a b", 100)
    assert len(deep) == 100
    assert len(set(deep)) == 100
    assert [passages[i] for i in deep[:10]] == index.search("a b", 10)


# In the world


@pytest.mark.parametrize("method", ["dense", "hybrid"])
def test_search_world_supports_dense_and_hybrid_methods(method, folder, monkeypatch):
    from ludus.worlds.search import world as module

    few = PassageIndex(PASSAGES)
    monkeypatch.setattr(module, "_index", lambda: few)
    monkeypatch.setattr(module, "passage_values", lambda: dict.fromkeys(PASSAGES))
    world = make_search_world({"method": method, "encoder": str(folder)}, ToolLimits())
    assert type(world.index) is {"dense": DenseIndex, "hybrid": HybridIndex}[method]
    found = world.tool.function(query=PASSAGES[3], k=1)
    assert found == PASSAGES[3]


def test_default_method_is_bm25_and_hybrid_requires_an_encoder():
    assert make_search_world({}, ToolLimits()).settings.method == "bm25"
    assert isinstance(SearchWorld().index, PassageIndex)
    with pytest.raises(ConfigError, match=r"env\.settings\.method \(= 'hybrid'\) needs an encoder"):
        make_search_world({"method": "hybrid"}, ToolLimits())


def test_search_tool_returns_the_found_passage():
    assert search_tool(DenseIndex(PASSAGES, LetterEncoder()), 2).function(query="a dog", k=1) == "a dog"


# Fetch

CORPUS = {
    "https://www.birds.org/wren": "The wren is small.",
    "https://birds.org/owl/": "\n".join(f"Line {n} of the owl." for n in range(200)),
    "https://trees.org/oak": "",
}


def fetch(**arguments):
    action = Action(Message(role="assistant", content=""), (ToolCall("1", "fetch", arguments),))
    (outcome,) = asyncio.run(ToolExecutor([fetch_tool(CORPUS)]).run(action))
    return outcome


@pytest.mark.parametrize(
    "url", ["https://www.birds.org/wren", "birds.org/wren", "http://Birds.org/wren/#nest", " www.birds.org/wren"]
)
def test_a_page_is_found_by_any_spelling_of_its_address(url):
    assert fetch(url=url).output == "The wren is small."


def test_pages_of_a_long_text_concatenate_to_the_text():
    first = fetch(url="birds.org/owl")
    assert first.output.startswith("[https://birds.org/owl/, page 1 of 3]\nLine 0 of")
    assert not first.truncated
    pages = [fetch(url="birds.org/owl", page=n).output.split("\n", 1)[1] for n in (1, 2, 3)]
    assert "".join(pages) == CORPUS["https://birds.org/owl/"]
    late = fetch(url="birds.org/owl", page=4)
    assert (late.status, late.output) == (
        ToolStatus.RAISED,
        "Error: https://birds.org/owl/ has 3 pages; there is no page 4",
    )


@pytest.mark.parametrize("text", ["", "x" * 100, "word " * 50, "line\n" * 40, "a b\nc" * 33])
def test_pages_are_split_at_line_or_word_boundaries(text):
    pages = split_pages(text, 30)
    assert "".join(pages) == text
    assert max(map(len, pages)) <= 30
    if text.startswith("line"):
        assert all(page.endswith("\n") for page in pages[:-1])
    if text.startswith("word"):
        assert all(page.endswith(" ") for page in pages[:-1])


def test_unknown_address_suggests_similar_ones():
    outcome = fetch(url="https://birds.org/wrne")
    assert outcome.status is ToolStatus.RAISED
    assert outcome.output.startswith(
        "Error: there is no page 'https://birds.org/wrne'. Near ones: https://www.birds.org/wren"
    )
    assert "https://trees.org/oak" in fetch(url="wikipedia.org/oak").output
    assert fetch(url="###").output.endswith("Search for the page first.")


def test_equivalent_addresses_in_a_corpus_are_rejected():
    with pytest.raises(UserError, match=r"are equivalent: http://a\.org and https://a\.org/"):
        fetch_tool({"http://a.org": "x", "https://a.org/": "y"})


def test_a_page_may_be_fetched_again_after_a_fault():
    assert fetch_tool(CORPUS).traits == Traits(latency="instant", idempotent=True)


def test_corpus_is_loaded_from_a_folder_or_jsonl_file(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.html").write_text("<head><title>t</title></head><p>1&nbsp;&amp; <b>2</b></p><p>3")
    (tmp_path / "c.md").write_text("# Four\n")
    (tmp_path / "d.png").write_bytes(b"\xff")
    assert load_corpus(tmp_path) == {"a/b.html": "1 & 2\n3", "c.md": "# Four\n"}
    lines = tmp_path / "pages.jsonl"
    lines.write_text(json.dumps({"url": "u", "text": "five\nsix"}) + "\n")
    assert load_corpus(lines) == {"u": "five\nsix"}
    for bad in ("nonsense", '{"url": "u"}', '{"url": 1, "text": "x"}', '{"url": "u", "text": "x"}\n' * 2):
        lines.write_text(bad)
        with pytest.raises(UserError, match="line"):
            load_corpus(lines)
    with pytest.raises(UserError, match="cannot be read"):
        load_corpus(tmp_path / "none.jsonl")


def test_html_text_excludes_scripts_styles_and_comments():
    page = "<html><style>p {}</style><script>alert('<p>')</script><!-- no --><h1>Yes</h1><br>x &lt; y</html>"
    assert text_of_html(page) == "Yes\nx < y"
