"""Clone the solver of the world `gui` from trees, screenshots, and both, with a small vision-language model.

    python benchmarks/gui_cloning.py

The solver's episodes are recorded once in Chromium with trees and screenshots, and cut after the choice of a file; the
other arms see a part of each observation. The first seed tries each rate of --rates; the other seeds use the rate with
the best accuracy on the first --choice held-out tasks, which the table does not contain. Runs are kept in --folder.
An action is accurate if greedy decoding after the solver's earlier actions returns it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch

from correction import SEEDS, over
from ludus import api
from ludus.chat.tokenizer import train_tokenizer
from ludus.engines.models.loading import load_model, load_tokenizer
from ludus.envs.tool_env import ToolLimits
from ludus.evaluation.stats import paired_difference
from ludus.training.datasets.files import read_dialogues
from ludus.training.datasets.sources import dialogue_segments
from ludus.training.run.session import make_renderer
from ludus.types import Message
from ludus.worlds.apps.world import make_gui_world

WORLD = {"num_tasks": 1600, "levels": [1, 4], "families": ["files", "highlight"], "viewport": [320, 320]}
ARMS = {"tree": "browser", "screenshot": "screenshot", "both": "both"}
"""Observations by arm; that of `tree` is read from Chromium, so that all arms have the same actions."""
CHOICES = {f"click {number}" for number in range(8, 14)}  # files follow the menu and the folders on their page
SHOWN = {"all actions": "", "highlighted file chosen": "highlight", "named file chosen": "files"}
SIDE, PATCH, SCALE = 64, 8, 2  # pixels of the input and of a patch, patches by side of an image token
Rates = Mapping[str, Mapping[str, float]]  # of SHOWN, by task


def record(path: Path, split: str, num: int) -> None:
    """Append the solver's episodes on the first `num` tasks of a split that the file does not have."""
    done = len(path.read_bytes().splitlines()) if path.is_file() else 0
    if done >= num:
        return
    world = make_gui_world({**WORLD, "observation": "both"}, ToolLimits())
    tasks = world.tasks(split)[done:num]
    with path.open("a", encoding="utf-8") as file, ThreadPoolExecutor(world.episodes_at_once) as pool:
        for task, shown in zip(tasks, pool.map(world.expert, tasks), strict=True):
            file.write(json.dumps({"messages": shown.messages, "task": task.id}) + "\n")
            file.flush()
    asyncio.run(world.close())


def observed(message: Message, arm: str) -> Message:
    """Return a message of an episode as an arm sees it, as the world shows it with the observation of the arm."""
    if message["role"] != "user" or arm == "both":
        return message
    if arm == "tree":
        return Message(role="user", content=message["content"].removesuffix("\n<image>"))
    instruction, _, page = message["content"].partition("\n")
    first = f"{instruction}\n" if page.startswith("# Desktop") else ""
    return Message(role="user", content=f"{first}Screenshot of 320 x 320 pixels.\n<image>", images=message["images"])


def family_of(messages: Sequence[Message]) -> str:
    """Return the family of an episode's task."""
    return "files" if "the file" in messages[1]["content"] else "highlight"


def write_arm(source: Path, arm: str, num: int, families: Sequence[str]) -> Path:
    """Write the first `num` episodes of a file up to the choice of a file, as an arm sees them; return the new file."""
    path = source.with_name("-".join([source.stem, arm, str(num), *families]) + ".jsonl")
    if not path.is_file():
        with source.open(encoding="utf-8") as lines, path.open("w", encoding="utf-8") as file:
            for one in map(json.loads, islice(lines, num)):
                end = 1 + next(i for i, message in enumerate(one["messages"]) if message["content"] in CHOICES)
                if family_of(one["messages"]) in families:
                    shown = [observed(message, arm) for message in one["messages"][:end]]
                    file.write(json.dumps({**one, "messages": shown}) + "\n")
    return path


def make_model(folder: Path, file: Path, seed: int) -> Path:
    """Write a new Idefics3 model (SigLIP-like and Llama) of 0.7 million parameters, its tokenizer and processor."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessor, Idefics3Processor

    lines = file.read_text("utf-8").splitlines()[:100]
    tokenizer = train_tokenizer((m["content"] for line in lines for m in json.loads(line)["messages"]), 512)
    marks = ["<|im_start|>", "<image>", "<fake_token_around_image>", "<global-img>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    size, white = {"longest_edge": SIDE}, {"image_mean": [1.0] * 3, "image_std": [0.25] * 3}  # white pixels become 0
    pixels = Idefics3ImageProcessor(size=size, max_image_size=size, do_image_splitting=False, **white)
    processor = Idefics3Processor(pixels, tokenizer, image_seq_len=(SIDE // PATCH // SCALE) ** 2)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    limits = {"vocab_size": len(tokenizer), "num_key_value_heads": 4, "max_position_embeddings": 2048}
    config = Idefics3Config(
        vision_config=vision | {"image_size": SIDE, "patch_size": PATCH},
        text_config=text | limits | ids | {"model_type": "llama"},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=SCALE,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    for part in (Idefics3ForConditionalGeneration(config), processor, tokenizer):
        part.save_pretrained(folder)
    return folder


def run(args: argparse.Namespace, arm: str, rate: float, seed: int) -> Rates:
    """Return the rates on the held-out tasks after fine-tuning an arm; train and measure it if missing."""
    name = f"{arm}-rate{rate:g}-{args.steps}x{args.batch}-of{args.demonstrations}-{'-'.join(args.families)}-seed{seed}"
    kept, folder = args.folder / f"{name}.json", args.folder / name
    if not kept.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        train, held_out = (args.folder / f"{split}.jsonl" for split in ("train", "validation"))
        trained = api.sft(
            "gui",
            model=str(make_model(args.folder / f"model-{seed}", train, seed)),
            env={"settings": {**WORLD, "num_tasks": 10, "observation": ARMS[arm]}},
            sft={"steps": args.steps, "batch_size": args.batch, "learning_rate": rate, "warmup_steps": 20}
            | {"data": str(write_arm(train, arm, args.demonstrations, args.families)), "microbatch_tokens": 8192},
            run={"dir": str(folder), "seed": seed, "threads": 1},
        )
        kept.write_text(json.dumps(accuracy(trained, write_arm(held_out, arm, args.tasks, args.families))))
    return json.loads(kept.read_text())


@torch.no_grad()
def accuracy(trained: api.Run, file: Path) -> Rates:
    """Return the rates of accurate actions in the episodes of a file, by task."""
    model, tokenizer = load_model(str(trained.checkpoint), device="cpu"), load_tokenizer(str(trained.checkpoint))
    renderer = make_renderer(trained.config.env, tokenizer, model)
    found: dict[str, dict[str, float]] = {}
    for one in read_dialogues(file):
        segments, right, at = dialogue_segments(renderer, one), [], 0
        likeliest = model(input_ids=torch.tensor([[i for s in segments for i in s.tokens]])).logits[0].argmax(-1)
        for segment in segments:
            if segment.kind == "action":
                right.append(tuple(likeliest[at - 1 : at - 1 + len(segment.tokens)].tolist()) == segment.tokens)
            at += len(segment.tokens)
        found[one.task] = {"": sum(right) / len(right), family_of(one.messages): float(right[-1])}
    return found


def mean(found: Rates, kind: str, tasks: Sequence[str]) -> float:
    """Return the mean of a rate of `SHOWN` over tasks."""
    return sum(found[task][kind] for task in tasks) / len(tasks)


def report(found: Mapping[str, Sequence[Rates]], rates: Mapping[str, float], tasks: Sequence[str]) -> str:
    """Return a table of the rates over seeds, and the leads of `both`, paired over tasks."""
    arms = " | ".join(f"{arm} ({rates[arm]:g})" for arm in ARMS)
    lines = [f"| % of | {arms} | both less tree | both less screenshot |", "|---|---:|---:|---:|---:|---:|"]
    for name, kind in SHOWN.items():
        if not (own := [task for task in tasks if kind in found["both"][0][task]]):
            continue
        cells = [over([mean(one, kind, own) for one in found[arm]], 100.0, "") for arm in ARMS]
        means = {arm: {t: sum(one[t][kind] for one in runs) / len(runs) for t in own} for arm, runs in found.items()}
        for gap in (paired_difference(means["both"], means[arm]) for arm in ("tree", "screenshot")):
            low, high = 100 * gap.interval.low, 100 * gap.interval.high
            cells.append(f"{100 * gap.difference:+.1f} [{low:+.1f}, {high:+.1f}]")
        lines.append(f"| {name} ({len(own)} tasks) | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record the missing episodes, train the missing runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".bench/gui_cloning"))
    parser.add_argument("--demonstrations", type=int, default=450)
    parser.add_argument("--tasks", type=int, default=140, help="held-out tasks")
    parser.add_argument("--choice", type=int, default=20, help="of these, tasks that choose the learning rate")
    parser.add_argument("--families", nargs="+", choices=("files", "highlight"), default=["highlight"])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3])
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    for split, num in (("validation", args.tasks), ("train", args.demonstrations)):
        record(args.folder / f"{split}.jsonl", split, num)
    first = {arm: {rate: run(args, arm, rate, SEEDS[0]) for rate in args.rates} for arm in ARMS}
    tasks = list(next(iter(first["both"].values())))
    best = {arm: max(args.rates, key=lambda rate: mean(first[arm][rate], "", tasks[: args.choice])) for arm in ARMS}
    found: dict[str, list[Rates]] = {arm: [] for arm in ARMS}
    for seed in SEEDS:
        for arm in ARMS:
            found[arm].append(run(args, arm, best[arm], seed))
    print(report(found, best, tasks[args.choice :]))


if __name__ == "__main__":
    main()
