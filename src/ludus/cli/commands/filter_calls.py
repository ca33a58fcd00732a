"""Remove the calls of dialogues that do not make what follows easier to predict (Toolformer's filter)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from ludus.cli.arguments import model_settings
from ludus.cli.ui.terminal import load_libraries, make_console, print_line
from ludus.config.load import load_config
from ludus.errors import UserError
from ludus.training.datasets.files import FileDialogue, read_sft_data, row_of


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Filter a file. Raises UserError for unusable data, a model without a chat template, or an existing output."""
    if args.output.exists():
        raise UserError(f"{args.output} exists.", "Choose another file.")
    if args.window < 1:
        raise UserError(f"--window is {args.window}, but must be at least 1.")
    records = read_sft_data(args.file)
    config = load_config(None, [*model_settings(args.model), *overrides])
    load_libraries()
    from ludus.engines.models.loading import load_model, load_tokenizer
    from ludus.training.datasets.call_filter import NextMessageLosses, filter_calls
    from ludus.training.learner.logprobs import LogprobScorer
    from ludus.training.run.preflight import model_path
    from ludus.training.run.session import make_renderer

    path = model_path(config)
    tokenizer = load_tokenizer(path, needs_template=config.env.rendering == "chat")
    model = load_model(path, config.model.dtype, config.model.device).eval()
    losses = NextMessageLosses(LogprobScorer(model), make_renderer(config.env, tokenizer, model), args.window)
    lines, gains, rejected = list[str](), list[float](), 0
    for record in records:
        if isinstance(record, FileDialogue):
            found = filter_calls(record, losses, args.margin)
            record, rejected = found.dialogue, rejected + found.num_rejected
            gains += found.gains
        row = {key: value for key, value in row_of(record).items() if value is not None}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    args.output.write_text("".join(lines), "utf-8")
    mean = sum(gains) / len(gains) if gains else 0.0
    text = f"{len(gains)} calls compared, {rejected} removed; the mean gain is {mean:.3g} nats per token."
    print_line(make_console(), f"{args.output}: {len(records)} records. {text}")
