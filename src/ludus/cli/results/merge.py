"""`ludus merge`: merge the weights of models that were trained apart from one base."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cli.ui.terminal import load_libraries, make_console, print_line
from ludus.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Write the merged model to `--out`."""
    weights = args.weights or [1.0] * len(args.models)
    if len(args.models) < 2 or len(weights) != len(args.models):
        raise UserError(f"{len(args.models)} models and {len(weights)} weights are given.", "Give two or more of each.")
    if (args.method == "linear" and sum(weights) <= 0) or min(weights) < 0:
        raise UserError("The weights are negative or sum to 0.", "Give weights of 0 or more.")
    if (args.base is None) != (args.method == "linear"):
        hint = "linear has no base; task_arithmetic and ties need the model that both runs started from."
        raise UserError(f"--method {args.method} and --base do not fit.", hint)
    if not 0 < args.density <= 1:
        raise UserError(f"--density is {args.density:g}.", "Set a share above 0 and up to 1.")
    if args.out.exists():
        raise UserError(f"{args.out} exists.", "Choose another folder with --out.")
    load_libraries()
    from ludus.engines.models.loading import load_model, load_tokenizer, save_model
    from ludus.engines.models.merging import merge_weights

    paths = [_weights_path(path) for path in args.models]
    tokenizers = [load_tokenizer(str(path), needs_template=False) for path in paths]
    if any(one.get_vocab() != tokenizers[0].get_vocab() for one in tokenizers):
        raise UserError("The models have different vocabularies.", "Merge models that started from the same one.")
    first = load_model(str(paths[0]), device="cpu")

    def weights_of(path: Path) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in load_model(str(path), device="cpu").named_parameters()}

    models = [{name: p.detach() for name, p in first.named_parameters()}, *map(weights_of, paths[1:])]
    base = None if args.base is None else weights_of(_weights_path(args.base))
    try:
        merged = merge_weights(models, weights, args.method, base, args.density)
    except ValueError as error:
        raise UserError(f"The models cannot be merged: {error}.", "Merge models of one architecture.") from error
    for name, parameter in first.named_parameters():
        parameter.data.copy_(merged[name])
    save_model(first, tokenizers[0], args.out)
    print_line(make_console(), f"{args.out}: {args.method} merge of {len(paths)} models")


def _weights_path(path: Path) -> Path:
    """Return the newest checkpoint of a run folder, or the path itself."""
    from ludus.training.run.run_dir import list_checkpoints

    found = list_checkpoints(path / "checkpoints")
    return found[-1][1] if found else path
