"""The one-file example and the full system verify each other."""

import importlib.util
import random
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ludus.algorithms.spec.resolve import PRESETS
from ludus.config.sections.training import TrainingConfig
from ludus.envs.tool_env import ToolEnv
from ludus.rewards.base import Reward
from ludus.rewards.exact_match import ExpectedAnswers, exact_match, normalise
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.rollouts.scheduler import Episode
from ludus.tools.search import PassageIndex, search_tool
from ludus.training.batches.rows import row_of_trajectory
from ludus.training.credit.advantages import assign_credit
from ludus.training.learner.learner import CachedLogprobs, Learner, LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer, model_precision
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.types import Message, Segment, StopReason, Task, Trajectory
from ludus.worlds.search.questions import all_questions, passage_values
from ludus.worlds.search.world import SearchWorld
from small_worlds import call as call_text
from small_worlds import end_token, play, renderer, scripted, tokenizer

FILE = Path(__file__).parent.parent / "examples" / "one_file.py"
FAMILIES = ("airport/city", "airport/city/country", "airport/city/population")
PASSAGES = (
    "Agen Airport is an airport. It serves Agen and has the code LFBA.",
    "Agen is a city in the country of France.",
    "Agen has a population of 35690 people.",
)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@cache
def one():
    spec = importlib.util.spec_from_file_location("one_file", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["one_file"] = module
    spec.loader.exec_module(module)
    return module


@cache
def world():
    return one().build_world()


def tiny(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.4,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).to(dtype).eval()


def agent(model=None):
    return one().Agent(model, tokenizer(), one().make_search(PASSAGES))


def ragged_trajectories(num=20, seed=3):
    """Chains of one to three turns, with observations in the middle and lengths of all kinds."""
    rng = random.Random(seed)
    made = []
    for sample in range(num):
        segments = [Segment("prompt", some_tokens(rng, 3, 9))]
        for turn in range(rng.randrange(1, 4)):
            if turn:
                segments.append(Segment("observation", some_tokens(rng, 1, 6), turn - 1))
            action = some_tokens(rng, 1, 7)
            segments.append(Segment("action", action, turn, logprobs=(-1.0,) * len(action)))
        reward = float(rng.random() < 0.5)
        made.append(Trajectory("t", sample, tuple(segments), (), StopReason.ANSWERED, reward=reward))
    return made


def some_tokens(rng, low, high):
    return tuple(rng.randrange(len(tokenizer())) for _ in range(rng.randrange(low, high)))


def as_episodes(trajectories, advantages):
    return [
        one().Episode(None, list(t.token_ids), list(t.action_mask), advantage=a)
        for t, a in zip(trajectories, advantages, strict=True)
    ]


def learner(model, **settings):
    optimizer = Optimizer(model, OptimizerSettings.from_config(TrainingConfig(), 10))
    return Learner(LogprobScorer(model), optimizer, PRESETS["grpo"], LearnerSettings(microbatch_tokens=64, **settings))


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_one_file_has_at_most_330_lines():
    assert FILE.read_text("utf-8").count("\n") <= 330


@pytest.mark.pages
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_questions_equal_those_of_the_search_world(split):
    pools = all_questions(split)
    real = {(f, q.text, frozenset(q.answers)) for f in FAMILIES for q in pools[f]}
    own = {(q.family, q.text, frozenset(q.answers)) for q in world()[0] if q.split == split}
    assert own == real


@pytest.mark.pages
def test_passages_are_a_sufficient_subset_of_the_search_world():
    own = set(world()[1])
    assert own <= set(passage_values())
    hops = [h for f in FAMILIES for q in all_questions("test")[f] for h in q.hops]
    assert {hop.passage for hop in hops} <= own


@pytest.mark.slow
def test_search_results_equal_those_of_the_search_tool():
    passages = world()[1]
    own, real = one().make_search(passages), search_tool(PassageIndex(passages)).function
    questions = random.Random(0).sample(world()[0], 40)
    for query in [q.text for q in questions] + [a for q in questions for a in q.answers] + ["", "zzz", "é"]:
        assert own(query) == real(query)
        assert own(query, 5) == real(query, 5)


@pytest.mark.slow
def test_answer_normalisation_equals_that_of_the_verifier():
    for text in {a for q in world()[0] for a in q.answers} | {"  The Île-de-France! ", "a", "", "«An» x_y"}:
        assert one().normalise(text) == normalise(text)


def test_prompt_tokens_equal_those_of_the_renderer():
    """The tool's schema does not depend on the passages that it searches."""
    question = "Which city does Agen Airport serve?"
    real = renderer().prompt(SearchWorld().opening(question), [search_tool(PassageIndex(PASSAGES))])
    assert tuple(one().prompt_tokens(tokenizer(), question)) == real


@pytest.mark.parametrize("outputs", [["No passage matches."], ["two\nlines ", "and another call's"]])
def test_observation_tokens_equal_those_of_the_renderer(outputs):
    messages = [Message(role="tool", content=output, tool_call_id="c", name="search") for output in outputs]
    assert tuple(one().observation_tokens(tokenizer(), outputs)) == renderer().observation(messages)


def search_call(query, **more):
    return call_text("search", query=query, **more)


DIALOGUES = {
    "two searches": [
        search_call("Agen Airport"),
        "<think>Find it.</think>\n" + search_call("Agen city", k=1),
        "France",
    ],
    "two calls in a turn": [search_call("Agen") + "\n" + search_call("35690"), "<think>So.</think>\n france."],
    "wrong": [search_call("Agen Airport"), "Agen"],
    "nothing found": [search_call("zzz"), "the France"],
    "an empty answer": [search_call("Agen"), " "],
    "to the last turn": [search_call("Agen")] * 6,
}


@pytest.mark.parametrize("name", DIALOGUES)
def test_dialogue_tokens_mask_and_reward_equal_the_full_system(name):
    """The full system plays a script; the one file takes the actions that came of it."""
    lines = DIALOGUES[name]
    question = "In which country is the city that Agen Airport serves?"
    prompt = (Message(role="system", content=one().SYSTEM), Message(role="user", content=question))
    task = Task("t", prompt, ExpectedAnswers(("France",)))
    real = play(scripted(lines), world=SearchToolWorld(), task=task, max_tokens=2000)
    mine = agent()
    episode = one().Episode(None, one().prompt_tokens(tokenizer(), question), [])
    episode.mask = [False] * len(episode.tokens)
    for segment in real.segments:
        if segment.kind == "action":
            assert not episode.done
            one().take_turn(mine, episode, list(segment.tokens))
            if episode.tokens[-1] != end_token():
                episode.done = False  # only its own token limit, which the script is not about
    turns = [s for s in real.segments if s.kind == "action"]
    shown = len(real.token_ids)  # the full system does not show what comes after the last turn
    assert tuple(episode.tokens[:shown]) == real.token_ids
    assert tuple(episode.mask[:shown]) == real.action_mask
    assert len(turns) <= one().MAX_TURNS
    assert float(one().normalise(episode.answer) in {"france"}) == real.rewards["exact_match"]


class SearchToolWorld:
    """A world with the search tool over the few passages."""

    def environment(self, task):
        rewards = (Reward("exact_match", exact_match, outcome=True),)
        return ToolEnv((search_tool(PassageIndex(PASSAGES)),), rewards)


@pytest.mark.parametrize(
    "call",
    [
        "no json",
        '{"name": "search"}',
        '{"name": "search", "arguments": []}',
        '{"name": "search", "arguments": {"query": 3}}',
        '{"name": "search", "arguments": {"query": "Agen", "k": "two"}}',
        '{"name": "find", "arguments": {"query": "Agen"}}',
        "[1]",
        "null",
    ],
)
def test_malformed_tool_call_returns_an_error_observation(call):
    assert one().call_tool(call, agent().search).startswith("Error: ")


def test_action_without_end_token_ends_the_episode_without_answer():
    episode = one().Episode(None, [1, 2], [False, False])
    one().take_turn(agent(), episode, tokenizer().encode("France"))
    assert (episode.done, episode.answer) == (True, "")
    assert episode.mask == [False, False] + [True] * (len(episode.tokens) - 2)


def test_advantages_and_dropped_groups_equal_the_full_system():
    rewards = [0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.3, 0.1, 0.2, 0.2]
    base = ragged_trajectories(len(rewards))
    task = Task("t", (), None)
    episodes = [
        Episode(RolloutKey(1, f"t{i // 4}", i % 4), task, replace(t, reward=reward))
        for i, (t, reward) in enumerate(zip(base, rewards, strict=True))
    ]
    credits = assign_credit([episodes[i : i + 4] for i in range(0, len(rewards), 4)], PRESETS["grpo"])
    real = [c.advantage if c.outcome is RolloutOutcome.TRAINED else None for c in credits]
    own = one().advantages(rewards, 4)
    assert [a is None for a in own] == [a is None for a in real]
    assert [a for a in own if a is not None] == pytest.approx([a for a in real if a is not None], abs=1e-12)
    assert sum(a is None for a in own) == 8


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("moved", [False, True])
def test_loss_and_gradient_equal_those_of_the_learner(dtype, moved):
    """With `moved`, the weights have left those that sampled, some tokens beyond the clip range."""
    trajectories = ragged_trajectories()
    advantages = [random.Random(t.sample).uniform(-2, 2) for t in trajectories]
    episodes = as_episodes(trajectories, advantages)
    mine, theirs = tiny(dtype), tiny(dtype)
    old = proximal = None
    if moved:
        other = tiny(dtype)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
            with model_precision(other):
                scores = [one().score_tokens(other, [e])[0] for e in episodes]
        old = [s.tolist() for s in scores]
        proximal = [torch.cat([s.new_zeros(1), s]) for s in scores]
    with model_precision(mine):
        loss = one().accumulate_gradient(mine, episodes, old)
    rows = [row_of_trajectory(t, a) for t, a in zip(trajectories, advantages, strict=True)]
    statistics, _ = learner(theirs).gradient(rows, CachedLogprobs(proximal))
    assert loss == pytest.approx(statistics.loss, abs=TOLERANCE[dtype])
    assert (0.1 < statistics.clip.fraction < 0.9) == moved
    for (name, own), real in zip(gradients(mine).items(), gradients(theirs).values(), strict=True):
        torch.testing.assert_close(own, real, rtol=0, atol=TOLERANCE[dtype], msg=name)
        assert own.abs().max() > 1e-4, name


def test_weights_after_two_updates_equal_those_of_the_learner():
    trajectories = ragged_trajectories()
    advantages = [random.Random(t.sample).uniform(-2, 2) for t in trajectories]
    mine, theirs = tiny(), tiny()
    adamw = torch.optim.AdamW(mine.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    one().learn(mine, adamw, as_episodes(trajectories, advantages), epochs=2)
    rows = [row_of_trajectory(t, a) for t, a in zip(trajectories, advantages, strict=True)]
    learner(theirs, epochs=2).train(rows, seed=0)
    start = tiny().state_dict()
    for name, own in mine.state_dict().items():
        torch.testing.assert_close(own, theirs.state_dict()[name], rtol=0, atol=1e-7, msg=name)
        assert (own - start[name]).abs().max() > 1e-4


@pytest.mark.slow
def test_batched_greedy_decoding_equals_decoding_one_by_one(monkeypatch):
    """Ragged histories, of which some end early."""
    monkeypatch.setattr(one(), "MAX_NEW_TOKENS", 12)
    model, rng = tiny(), random.Random(5)
    histories = [list(some_tokens(rng, 2, 30)) for _ in range(10)]
    free = [greedy(model, history, 12, end=-1) for history in histories]
    end = free[0][3]
    ending = OtherEndTokenizer(end)
    expected = [greedy(model, history, 12, end) for history in histories]
    assert len({len(action) for action in expected}) > 1
    assert one().sample_actions(one().Agent(model, ending, None), histories, None) == expected


class OtherEndTokenizer:
    """A tokenizer that ends turns with another token."""

    def __init__(self, end):
        self.eos_token_id = end


@torch.no_grad()
def greedy(model, history, num, end):
    tokens = list(history)
    while len(tokens) < len(history) + num and (len(tokens) == len(history) or tokens[-1] != end):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(history) :]


def test_sampled_token_frequencies_match_the_model_probabilities(monkeypatch):
    monkeypatch.setattr(one(), "MAX_NEW_TOKENS", 1)
    model, histories = tiny(), [[5, 7, 11]] * 4000
    generator = torch.Generator().manual_seed(0)
    drawn = one().sample_actions(one().Agent(model, OtherEndTokenizer(-1), None), histories, generator)
    shares = torch.bincount(torch.tensor(drawn)[:, 0], minlength=len(tokenizer())) / 4000
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[5, 7, 11]])).logits[0, -1].softmax(-1)
    assert 0.05 < expected.max() < 0.95
    assert (shares - expected).abs().max() < 0.03


@pytest.mark.slow
def test_main_runs_on_a_checkpoint(tmp_path, monkeypatch, capsys):
    """A model that knows nothing gets no reward, so this checks the way and not the learning."""
    tiny(torch.float32).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(one(), "MAX_NEW_TOKENS", 4)
    made = world()
    monkeypatch.setattr(one(), "build_world", lambda: made)
    words = ["one_file.py", "--model", str(tmp_path), "--steps", "2", "--tasks", "2", "--group-size", "3"]
    monkeypatch.setattr(sys, "argv", [*words, "--test", "6"])
    one().main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["before:", "step", "step", "after:"]
    assert "reward 0.000  trained 0/6  nothing to learn from" in lines[1]


def test_update_raises_likelihood_of_rewarded_trajectories():
    """Two groups of two attempts; the better attempt of each becomes likelier, the worse less likely."""
    model = tiny(torch.float32)
    trajectories = ragged_trajectories(4)
    own = one().advantages([1.0, 0.0, 0.0, 1.0], 2)
    episodes = as_episodes(trajectories, own)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)

    def weighed():
        with torch.no_grad():
            scores = [one().score_tokens(model, [e])[0][torch.tensor(e.mask[1:])].sum() for e in episodes]
        return sum(float(s) * e.advantage for s, e in zip(scores, episodes, strict=True))

    before = weighed()
    one().learn(model, adamw, episodes, epochs=1)
    assert weighed() > before + 1e-3


@pytest.mark.learning
def test_fifteen_steps_improve_two_hop_success(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["one_file.py", "--steps", "15"])
    one().main()
    lines = capsys.readouterr().out.splitlines()
    before, after = (two_hop_rate(lines[i]) for i in (0, -1))
    assert after > before + 0.25, (lines[0], lines[-1])


def two_hop_rate(line):
    """Successes over questions of both kinds of two hops, in a line of an evaluation."""
    found = re.findall(r"airport/city/\w+ ([\d.]+)% of (\d+)", line)
    return sum(float(rate) / 100 * int(num) for rate, num in found) / sum(int(num) for _, num in found)
