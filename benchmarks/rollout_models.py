"""Models of the rollout benchmark, as folders that every system loads."""

from __future__ import annotations

import sys
from pathlib import Path

SMALL = {
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
"""3.1 million parameters."""
TINY = SMALL | {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "initializer_range": 0.3,
}
HALF_BILLION = SMALL | {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "head_dim": 64,
    "initializer_range": 0.02,
}
"""0.5 billion parameters, the sizes of Qwen2.5-0.5B; for a GPU."""
ONE_AND_A_HALF_BILLION = HALF_BILLION | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "head_dim": 128,
}
"""1.5 billion parameters, the sizes of Qwen2.5-1.5B; for a GPU."""
SHAPES = {"small": SMALL, "tiny": TINY, "0.5b": HALF_BILLION, "1.5b": ONE_AND_A_HALF_BILLION}
SMOLLM2 = "smollm2"


def make(name: str, folder: Path) -> Path:
    """Return the folder of a model, written at the first call: a Qwen3 with random weights, or SmolLM2-135M."""
    if name == SMOLLM2:
        from ludus.engines.models.smollm2 import materialise_smollm2

        return materialise_smollm2(Path.home() / ".cache" / "ludus" / SMOLLM2)
    target = folder / name
    if not (target / "config.json").is_file():
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SHAPES[name])).save_pretrained(target)
    return target


def vocabulary(name: str) -> int:
    """Return the number of token ids that the workload may use."""
    return 49_152 if name == SMOLLM2 else int(SHAPES[name]["vocab_size"])


if __name__ == "__main__":
    print(make(sys.argv[1], Path(sys.argv[2])))
