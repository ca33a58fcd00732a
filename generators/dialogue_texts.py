"""Write demonstrations of a recipe as plain texts, for a loss on all their tokens beside the dialogues.

    python -m generators.dialogue_texts shop 4000 shop_texts.jsonl
    ludus sft shop --from-scratch --sft.steps 1200 --sft.sources.demonstrations.weight 0.5 \
        --sft.sources.texts.data shop_texts.jsonl --sft.sources.texts.weight 0.5
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

from ludus.chat.render import TemplateRenderer
from ludus.config.load import load_config
from ludus.engines.models.loading import load_tokenizer
from ludus.envs.registry import build_world
from ludus.recipes import recipe_folder

SEED = 77


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("num", type=int, help="number of dialogues")
    parser.add_argument("path", type=Path)
    parser.add_argument("--without-prompt", action="store_true", help="leave out system messages and tools")
    args = parser.parse_args()
    config = load_config(args.recipe, [])
    world = build_world(config.env, config.rollout, config.sandbox)
    renderer = TemplateRenderer(load_tokenizer(str(recipe_folder("search") / "cold_start")))
    with args.path.open("w", encoding="utf-8") as file:
        for one in islice(world.demonstrations(SEED), args.num):
            messages, tools = one.messages, one.tools
            if args.without_prompt:
                messages, tools = [each for each in messages if each["role"] != "system"], ()
            text = renderer.text(messages, tools, generate=False)
            file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
