"""What serving a model takes besides the application: what clients hear of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ludus.chat.render import TemplateRenderer
from ludus.gateway.service import Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def served_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    root: str,
    renderer: TemplateRenderer | None,
) -> Model:
    """A model under a name, as clients see it; `root` is where it came from."""
    return Model(
        name=name,
        root=root,
        created=int(time.time()),
        tokenizer=tokenizer,
        end_ids=_end_ids(model, tokenizer),
        vocab_size=model.get_input_embeddings().num_embeddings,
        longest_token=max(map(len, tokenizer.get_vocab()), default=1),
        renderer=renderer,
    )


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a text, by the model's generation settings and its tokenizer."""
    given = model.generation_config.eos_token_id if model.generation_config is not None else None
    listed = [given] if isinstance(given, int) else list(given or ())
    own = tokenizer.eos_token_id
    return tuple(dict.fromkeys([*listed, *([own] if isinstance(own, int) else [])]))
