"""GRPO on multi-turn tool use in one file: what `ludus train search` does, read from top to bottom.

    python examples/one_file.py --steps 15 --model FOLDER       # default: the packaged cold start

A small language model answers questions such as "In which country is the city that AIRPORT serves?". It writes
`<tool_call>` JSON, reads the passages from the search tool, and continues until it writes an answer. Attempts at
the same question form a group; those with a reward above the mean of their group are reinforced. For
readability, the following parts of the full system are left out:

- world: eleven of fourteen kinds of questions, and the reward for good form;
- tools and chat: other templates and call formats, deadlines, protection against control tokens;
- sampling: a cache across turns, and independence of the other episodes in the batch;
- learning: other algorithms, KL to a reference, and corrections for the mismatch of sampler and learner;
- the run: checkpoints, resuming, rollout files, alarms and intervals.

`tests/test_one_file.py` compares it with the full system: questions, tokens, advantages, loss, gradient.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import time
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, NamedTuple

import bm25s
import torch
from torch import Generator, Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_TURNS, MAX_NEW_TOKENS, MAX_TOKENS = 6, 64, 640  # turns per episode; tokens per turn; tokens per episode
EPS_LOW, EPS_HIGH = 0.2, 0.28  # the ratio of new to old probability is clipped to [0.8, 1.28]
MICROBATCH, SAMPLING_BATCH = 8, 96  # episodes in one forward pass

SYSTEM = "Answer the question. Search until you know."
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}, "k": {"type": "integer"}}}
SEARCH = {"name": "search", "description": "Search the encyclopedia.", "parameters": PARAMETERS}
FAMILIES = ("airport/city", "airport/city/country", "airport/city/population")
Search = Callable[[str, int], str]
Logprobs = Sequence[list[float]]  # of all tokens of each episode except the first


class Hop(NamedTuple):
    relation: str
    subject: str
    query: str
    value: str
    aliases: list[str]
    passage: str


@dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[str, ...]  # all spellings that count
    family: str
    split: str


def plain(text: str) -> str:  # without accents
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def build_world() -> tuple[list[Question], list[str]]:
    """Return questions about airports that serve a city with a unique name, and the passages that answer them."""
    packed = resources.files("ludus.worlds.search") / "data" / "questions.jsonl.xz"
    rows, *splits = map(json.loads, lzma.decompress(packed.read_bytes()).decode().split("\n"))
    hops = [Hop(*row) for row in rows]
    questions, passages = [], []
    for split, asked in zip(("train", "validation", "test"), splits, strict=False):
        for family, _, text, places in asked:
            if family in FAMILIES:
                last = hops[places[-1]]
                questions.append((places[0], Question(text, (last.value, *last.aliases), family, split)))
    stated = {(hop.relation, hop.subject): hop.passage for hop in hops}
    for hop in hops:
        if hop.relation == "city":  # which an airport serves
            passages += [hop.passage, *(stated[other, hop.value] for other in ("country", "population", "timezone"))]
    return [question for _, question in sorted(questions, key=lambda pair: pair[0])], list(dict.fromkeys(passages))


def make_search(passages: Sequence[str]) -> Search:
    """Return a BM25 search over the passages; ties are in the order of the passages."""

    def words(text: str) -> list[str]:
        return re.findall(r"[^\W_]+", plain(text.casefold()))

    index = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    index.index([words(p) for p in passages], show_progress=False)

    def search(query: str, k: int = 2) -> str:
        known = [word for word in words(query) if word in index.vocab_dict]
        scores = torch.from_numpy(index.get_scores(known)) if known else torch.zeros(len(passages))
        best = scores.argsort(descending=True, stable=True)[: max(1, min(k, 10))].tolist()
        return "\n".join(passages[i] for i in best if scores[i] > 0) or "No passage matches."

    return search


def normalise(text: str) -> str:
    """Return the text in lower case without accents, punctuation, articles and extra spaces."""
    bare = "".join(c for c in plain(text).casefold() if unicodedata.category(c)[0] not in "PS")
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split()) or bare.strip()


@dataclass
class Episode:
    question: Question
    tokens: list[int]
    mask: list[bool]  # True on sampled tokens: only these are trained
    answer: str = ""
    done: bool = False
    reward: float = 0.0
    advantage: float = 0.0


class Agent(NamedTuple):
    model: Any
    tokenizer: Any
    search: Search


def prompt_tokens(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    tools = [{"type": "function", "function": SEARCH}]
    text = tokenizer.apply_chat_template(messages, tools, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def observation_tokens(tokenizer: Any, outputs: Sequence[str]) -> list[int]:
    """Return the tokens that the template puts between two turns. Sampled tokens are never decoded and encoded
    again, because the tokens might change."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "MARK"}]
    messages += [{"role": "tool", "content": output} for output in outputs]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text.partition("MARK" + tokenizer.eos_token)[2], add_special_tokens=False)


def call_tool(call: str, search: Search) -> str:
    """Run one call. Return errors as observations, so that the model can correct them."""
    try:
        parsed = json.loads(call)
        name, query, k = parsed["name"], parsed["arguments"]["query"], parsed["arguments"].get("k", 2)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"Error: this is no call of search: {error}."
    if name != "search" or not isinstance(query, str) or not isinstance(k, int):
        return "Error: the only tool is search(query: string, k: integer)."
    return search(query, k)


def take_turn(agent: Agent, episode: Episode, action: list[int]) -> None:
    """Append a sampled action and, unless it ends the episode, the output of the tool."""
    episode.tokens += action
    episode.mask += [True] * len(action)
    calls = re.findall(r"<tool_call>(.*?)</tool_call>", text := agent.tokenizer.decode(action), re.DOTALL)
    if action[-1] != agent.tokenizer.eos_token_id:
        episode.done = True  # truncated at the token limit: no answer
    elif calls:
        observation = observation_tokens(agent.tokenizer, [call_tool(c, agent.search) for c in calls])
        episode.tokens += observation
        episode.mask += [False] * len(observation)
        episode.done = len(episode.tokens) + MAX_NEW_TOKENS > MAX_TOKENS
    else:
        episode.done = True
        episode.answer = text.removesuffix(agent.tokenizer.eos_token).rpartition("</think>")[2].strip()


def play(agent: Agent, questions: Sequence[Question], generator: Generator | None) -> list[Episode]:
    """Run and score an episode for each question, turn by turn; greedy if there is no generator."""
    prompts = [prompt_tokens(agent.tokenizer, q.text) for q in questions]
    episodes = [Episode(q, p, [False] * len(p)) for q, p in zip(questions, prompts, strict=True)]
    for _ in range(MAX_TURNS):
        going = [e for e in episodes if not e.done]
        for part in (going[i : i + SAMPLING_BATCH] for i in range(0, len(going), SAMPLING_BATCH)):
            actions = sample_actions(agent, [e.tokens for e in part], generator)
            for episode, action in zip(part, actions, strict=True):
                take_turn(agent, episode, action)
    for e in episodes:
        e.reward = float(normalise(e.answer) in {normalise(a) for a in e.question.answers} - {""})
    return episodes


@torch.no_grad()
def sample_actions(agent: Agent, histories: list[list[int]], generator: Generator | None) -> list[list[int]]:
    """Sample an action after each history, including the end-of-turn token, of at most MAX_NEW_TOKENS."""
    end, width, cache = agent.tokenizer.eos_token_id, max(map(len, histories)), None
    tokens = torch.tensor([[end] * (width - len(h)) + h for h in histories])
    seen = torch.tensor([[0] * (width - len(h)) + [1] * len(h) for h in histories])
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    actions: list[list[int]] = [[] for _ in histories]
    rows = torch.arange(len(histories))  # unfinished histories
    for _ in range(MAX_NEW_TOKENS):
        out = agent.model(tokens, seen, positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, p = out.past_key_values, out.logits[:, -1].softmax(-1)
        chosen = p.argmax(-1, True) if generator is None else torch.multinomial(p, 1, generator=generator)
        for row, token in zip(rows.tolist(), chosen[:, 0].tolist(), strict=True):
            actions[row].append(token)
        going = torch.nonzero(chosen[:, 0] != end)[:, 0]
        if len(going) == 0:
            break
        cache.batch_select_indices(going)
        rows, tokens, positions = rows[going], chosen[going], positions[going, -1:] + 1
        seen = torch.cat([seen[going], torch.ones_like(tokens)], dim=1)
    return actions


def advantages(rewards: Sequence[float], group_size: int) -> list[float | None]:
    """Return `(r - mean) / (std + 1e-6)` in each group; None if all rewards of the group are equal."""
    groups = torch.tensor(rewards, dtype=torch.float64).view(-1, group_size)
    scores = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, correction=1, keepdim=True) + 1e-6)
    equal = (groups == groups[:, :1]).all(1)
    return [None if equal[i] else score for i, row in enumerate(scores.tolist()) for score in row]


def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Return `[B, L]`, padded with zeros on the right, where no real token of a causal model attends to them."""
    length = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], dtype=dtype)


def score_tokens(model: Any, episodes: Sequence[Episode]) -> Tensor:
    """Return the log-probabilities of all tokens except the first, given the tokens before them, `[B, L - 1]`."""
    tokens = padded([e.tokens for e in episodes], torch.int64)
    logprobs = model(input_ids=tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(2, tokens[:, 1:, None])[:, :, 0]


def clipped_loss(model: Any, episodes: Sequence[Episode], old: Logprobs | None) -> Tensor:
    """Return the loss, summed over the sampled tokens. `old` is None if the weights have not changed since
    sampling: the ratio is then 1, and only its gradient matters."""
    new = score_tokens(model, episodes)
    mask = padded([e.mask for e in episodes], torch.bool)[:, 1:]
    before = new.detach() if old is None else padded(old, new.dtype)
    advantage = torch.tensor([e.advantage for e in episodes], dtype=new.dtype)[:, None]
    ratio = torch.where(mask, new - before, 0.0).exp()
    clipped = ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH)
    return -torch.minimum(ratio * advantage, clipped * advantage)[mask].sum()


def accumulate_gradient(model: Any, episodes: Sequence[Episode], old: Logprobs | None = None) -> float:
    """Add the gradient of the batch to `.grad`, a few episodes at a time; return the loss. It is the mean over all
    sampled tokens of the batch, independent of the split into microbatches."""
    num_tokens = sum(sum(e.mask) for e in episodes)
    order = sorted(range(len(episodes)), key=lambda i: len(episodes[i].tokens))
    total = 0.0
    for part in (order[i : i + MICROBATCH] for i in range(0, len(order), MICROBATCH)):
        loss = clipped_loss(model, [episodes[i] for i in part], old and [old[i] for i in part]) / num_tokens
        loss.backward()
        total += loss.item()
    return total


def learn(model: Any, optimizer: torch.optim.Optimizer, episodes: Sequence[Episode], epochs: int) -> str:
    """Run optimizer steps on one batch; return a text to print."""
    old = None
    if epochs > 1:
        with torch.no_grad():
            old = [score_tokens(model, [e])[0].tolist() for e in episodes]
    for _ in range(epochs):
        loss = accumulate_gradient(model, episodes, old)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return f"loss {loss:+.4f}  gradient norm {norm:.3f}"


def evaluate(agent: Agent, questions: Sequence[Question]) -> str:
    """Return the greedy success by kind of question."""
    rewards = defaultdict(list)
    for episode in play(agent, questions, None):
        rewards[episode.question.family].append(episode.reward)
    return "  ".join(f"{family} {sum(r) / len(r):.1%} of {len(r)}" for family, r in sorted(rewards.items()))


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default=resources.files("ludus.recipes") / "search" / "cold_start")
    numbers = {"steps": 15, "tasks": 12, "group-size": 8, "epochs": 1, "test": 192, "seed": 0, "threads": 1}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rng, generator = random.Random(args.seed), Generator().manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(str(args.model)).float().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    questions, passages = build_world()
    agent = Agent(model, AutoTokenizer.from_pretrained(str(args.model)), make_search(passages))
    train = [q for q in questions if q.split == "train"]
    held_out = rng.sample([q for q in questions if q.split == "test"], args.test)  # other airports
    print(f"before: {evaluate(agent, held_out)}")
    for step in range(1, args.steps + 1):
        begin = time.perf_counter()
        batch = [q for q in rng.sample(train, args.tasks) for _ in range(args.group_size)]
        episodes = play(agent, batch, generator)
        rewards = [e.reward for e in episodes]
        compared = zip(episodes, advantages(rewards, args.group_size), strict=True)
        kept = [replace(e, advantage=a) for e, a in compared if a is not None]
        learned = learn(model, optimizer, kept, args.epochs) if kept else "nothing to learn from"
        said = f"reward {sum(rewards) / len(rewards):.3f}  trained {len(kept)}/{len(episodes)}  {learned}"
        print(f"step {step}: {said}  {time.perf_counter() - begin:.1f} s")
    print(f"after:  {evaluate(agent, held_out)}")


if __name__ == "__main__":
    main()
