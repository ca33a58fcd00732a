"""What the agents with long first prompts share: tasks, demonstrations in the format of their SDK, and training.

Programs whose first prompt has thousands of tokens need a model with such a context. `train` makes one of 0.3 million
parameters, with attention to a window of 384 tokens: the agent runs against a server with scripted replies, which
records the requests of the SDK; a tokenizer and a model are trained on them (SFT), and then the agent is trained by
RL. The demonstrations are flawed: 60 % answer with the first of two numbers.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, permutations
from pathlib import Path
from threading import Thread

import ludus
from ludus.chat.tokenizer import train_tokenizer
from ludus.config.schema import Config
from ludus.config.sections.model import ModelInitConfig
from ludus.engines.models.loading import build_tiny

NAMES = (
    "Alder",
    "Ash",
    "Aspen",
    "Beech",
    "Birch",
    "Box",
    "Cedar",
    "Elder",
    "Elm",
    "Fir",
    "Hazel",
    "Holly",
    "Larch",
    "Lime",
    "Maple",
    "Oak",
    "Pine",
    "Rowan",
    "Spruce",
    "Yew",
)
SHARE_FLAWED = 0.6
INIT = ModelInitConfig(
    vocab_size=1536,
    hidden_size=64,
    intermediate_size=192,
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    context_tokens=16384,
)
WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 384,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention"] * INIT.num_layers,
}
"""A token attends to the 384 tokens before it: the task and the dialogue, and the end of the system message."""
LIMITS = {"max_turns": 8, "max_tokens_per_turn": 96, "max_seq_len": 16000, "concurrency": 16}


def _tasks() -> dict[str, list[dict]]:
    rng = random.Random(0)
    words = {"sum": sum, "larger": max, "smaller": min}
    found = []
    for first, second in permutations(NAMES, 2):
        for word, answer in words.items():
            numbers = dict(zip((first, second), rng.sample(range(10, 100), 2), strict=True))
            found.append({"word": word, "numbers": numbers, "answer": str(answer(numbers.values()))})
    rng.shuffle(found)
    return {"train": found[:740], "validation": found[740:840], "test": found[840:]}


TASKS = _tasks()


def reward(task: dict, answer: object) -> float:
    return float(str(answer).strip() == task["answer"])


@contextmanager
def scripted_server(next_reply: Callable[[dict], dict]) -> Iterator[str]:
    """Run a server of chat completions whose messages are those that a function returns for the body of a request."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            message = {"role": "assistant", **next_reply(body)}
            choice = {
                "index": 0,
                "message": message,
                "finish_reason": "tool_calls" if "tool_calls" in message else "stop",
            }
            usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
            head = {"id": "scripted", "object": "chat.completion", "created": 0, "model": "policy"}
            data = json.dumps({**head, "choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def demonstrations(agent, script, tasks, seed: int = 0) -> list[dict]:
    """Return a dialogue for each request that the agent sends while the replies are those of a script.

    `script(task, flawed)` lists the replies. Earlier replies are in the form in which the SDK returns them, and only
    the last message is trained.
    """
    rng, found = random.Random(seed), []
    for task in tasks:
        replies = iter(script(task, rng.random() < SHARE_FLAWED))

        def next_reply(body: dict, replies: Iterator[dict] = replies) -> dict:
            reply = next(replies)
            earlier = [{**_message(one), "train": False} for one in body["messages"] if one["role"] == "assistant"]
            messages = [earlier.pop(0) if one["role"] == "assistant" else _message(one) for one in body["messages"]]
            last = {"role": "assistant", **reply}
            last["content"] += last.pop("stop", "")
            found.append({"messages": [*messages, last], "tools": body.get("tools", [])})
            return {name: value for name, value in reply.items() if name != "stop"}

        with scripted_server(next_reply) as url:
            agent(task, url, "key")
    return found


def _message(given: dict) -> dict:
    """Return the fields of a message that are rendered, with its text in one part."""
    kept = {name: given[name] for name in ("role", "content", "tool_calls", "tool_call_id") if given.get(name)}
    if isinstance(kept.get("content"), list):
        kept["content"] = "".join(part["text"] for part in kept["content"])
    return {"content": "", **kept}


def cold_start(agent, script, tasks, folder: Path, seed: int) -> Path:
    """Train a tokenizer and a small model on demonstrations, in a folder, and return the checkpoint's.

    The model learns to copy names and the task without instructions first, and then behind ends of them, which fill
    its window.
    """
    found = demonstrations(agent, script, tasks, seed)
    messages = [message for one in found for message in one["messages"]]
    texts = ((message["content"], json.dumps(message.get("tool_calls", ""))) for message in messages)
    tokenizer = train_tokenizer(chain.from_iterable(texts), INIT.vocab_size)
    model = build_tiny(INIT, tokenizer, seed)
    model.config.update(WINDOW)
    checkpoint = folder / "random"
    for part in (tokenizer, model):
        part.save_pretrained(checkpoint)
    print(f"{len(found)} demonstrations, {model.num_parameters():,} parameters")
    rng = random.Random(seed)
    short = [*map(_shortened, found), *_repetitions(found, rng)]
    phases = {
        "short": (short, 1500, 3e-3),
        "tails": ([_shortened(one, rng.randrange(1500)) for one in found * 4], 500, 2e-3),
    }
    for name, (dialogues, steps, learning_rate) in phases.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(one) + "\n" for one in dialogues))
        sft = {"data": str(data), "steps": steps, "batch_size": 16, "learning_rate": learning_rate}
        run = ludus.sft(
            Config(),
            model=str(checkpoint),
            sft=sft | {"microbatch_tokens": 16384, "checkpoint_every": 50},
            rollout=LIMITS,
            run={"dir": str(folder / f"sft-{name}"), "seed": seed, "threads": 1},
        )
        checkpoint = run.checkpoint
    return checkpoint


def _shortened(dialogue: dict, num_chars: int = 0) -> dict:
    """Return a dialogue with the last paragraph of the user's first message, and the ends of the texts before it."""
    system = [one for one in dialogue["messages"] if one["role"] == "system" and num_chars]
    first, *rest = (one for one in dialogue["messages"] if one["role"] != "system")
    kept = [{**one, "content": one["content"][-num_chars:]} for one in system]
    task = len(first["content"].rpartition("\n\n")[2])
    return {**dialogue, "messages": [*kept, {**first, "content": first["content"][-task - num_chars :]}, *rest]}


def _repetitions(dialogues: list[dict], rng: random.Random) -> Iterator[dict]:
    """Yield as many dialogues that repeat random words of the tasks, from which a small model learns to copy."""
    words = sorted({word for one in dialogues for word in _shortened(one)["messages"][0]["content"].split()})
    for _ in dialogues:
        text = " ".join(rng.sample(words, 10))
        yield {"messages": [{"role": role, "content": text} for role in ("user", "assistant")]}


def train(agent, script, tasks=TASKS, reward=reward):
    """Train an agent with the settings of the command line, and print its held-out success before and after.

    The tasks of the cold start are `tasks["demonstrations"]`, or 300 of training.
    """
    parser = argparse.ArgumentParser(description=agent.__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("runs/long-prompt"))
    parser.add_argument("--model", help="a cold start, instead of training one")
    args = parser.parse_args()
    shown = tasks.get("demonstrations", tasks["train"][:300])
    model = args.model or cold_start(agent, script, shown, args.dir, args.seed)
    run = ludus.train(
        agent,
        {split: tasks[split] for split in ("train", "validation", "test")},
        reward,
        model=str(model),
        training={"steps": args.steps, "prompts_per_step": 8, "learning_rate": 2e-4, "microbatch_tokens": 16384},
        algorithm={"group_size": 8},
        rollout=LIMITS,
        evaluation={
            "tasks": 100,
            "tasks_before": 64,
            "tasks_during": 8,
            "every": args.steps,
            "splits": ["test"],
            "temperatures": [0.0],
        },
        run={"dir": str(args.dir / f"rl-{args.seed}"), "seed": args.seed, "threads": 1},
    )
    for one in run.evaluations:
        if one.plan.split == "test":
            found = f"{one.rate:.1%} [{one.interval.low:.1%}, {one.interval.high:.1%}] of {one.plan.num_tasks} tasks"
            print(f"step {one.plan.step}: {found}")
    return run
