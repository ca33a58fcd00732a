"""Time passes of the embedded engine in bfloat16 on a CPU, with packed weights and with torch's linear layers.

    python benchmarks/packed_linear.py

The model has the shapes of SmolLM2-135M, random weights and no adapters. Both ways alternate in one thread; figures are
medians.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ludus.engines.embedded.kv_cache import PAGE
from ludus.engines.embedded.model_runner import Chunk, RaggedForward, restore_linear
from ludus.engines.embedded.packed_linear import pack_linear

_LENGTH = 256


def main() -> None:
    """Print milliseconds for each number of decoding sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 48])
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49_152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).bfloat16().eval().requires_grad_(False)
    forward = RaggedForward(model, (max(args.rows) + 1) * _LENGTH // PAGE, _LENGTH, 1)
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    for rows in args.rows:
        table = np.arange(rows * _LENGTH // PAGE, dtype=np.int32).reshape(rows, -1)
        chunks = [Chunk((100 + row,), _LENGTH - 8, row) for row in range(rows)]
        seconds: dict[str, list[float]] = {"packed": [], "torch": []}
        for _ in range(args.repeats):
            for way, found in seconds.items():
                restore_linear(layers)
                if way == "packed":
                    pack_linear(model)
                forward.logits(chunks, table, np.arange(rows))  # packs
                begin = time.perf_counter()
                forward.logits(chunks, table, np.arange(rows))
                found.append(time.perf_counter() - begin)
        each = ", ".join(f"{way} {1e3 * median(found):.1f} ms" for way, found in seconds.items())
        print(f"{rows} sequences: {each}")


if __name__ == "__main__":
    main()
