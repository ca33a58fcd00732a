"""Checks of a new run that need neither torch nor a model: folder, algorithm, model, packages, tokenizer, disk."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ludus.algorithms.spec.resolve import algorithm_of
from ludus.config.paths import check_model_folder
from ludus.config.pipeline import StageKind
from ludus.config.schema import Config
from ludus.config.sections.model import ModelInitConfig
from ludus.diagnostics.metrics import step_metrics
from ludus.diagnostics.trackers import find_tracker
from ludus.engines.control_tokens import read_token
from ludus.engines.models import smollm2
from ludus.envs.registry import FACTORIES
from ludus.errors import StorageError, UserError, did_you_mean
from ludus.plugins import find_plugin
from ludus.recipes import list_recipes, recipe_folder
from ludus.training.run.run_dir import check_new

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
"""Ends of the names of the input embedding in the architectures of transformers."""


_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Trackers whose package and extra have their name."""


def check_new_run(config: Config, kind: StageKind) -> None:
    """Raise UserError if a new run would fail for a reason that is visible before torch and the model are loaded."""
    check_new(config)
    if kind == "rl":
        algorithm_of(config)
    elif config.model.roles or (config.model.lora is not None and config.model.lora.roles):
        setting = "model.roles" if config.model.roles else "model.lora.roles"
        raise UserError(f"{setting} needs agents, which only `ludus train` trains.", "Unset it.")
    check_extras(config)
    check_sources(config, kind)
    if config.rollout.agent.token_file is not None:
        read_token(Path(config.rollout.agent.token_file))
    if config.model.path == smollm2.NAME:
        smollm2.check_available()
    if config.model.from_scratch:
        check_disk(config, kind, num_saved(config, init_shapes(config.model.init)))
        return
    check_model_folder(model_path(config))
    if (folder := local_folder(model_path(config))) is None:
        return
    tensors = dict(tensor_shapes(folder))
    rows = next((shape[0] for name, shape in tensors.items() if name.endswith(_EMBEDDINGS)), None)
    if rows is not None:
        check_rows(str(folder), _num_tokens(folder / "tokenizer.json"), rows)
    check_disk(config, kind, num_saved(config, tensors))


def num_saved(config: Config, tensors: Mapping[str, Sequence[int]]) -> int:
    """Return the number of parameters in a checkpoint: all of the model, or those of its LoRA adapters."""
    lora = config.model.lora
    if lora is None:
        return sum(map(prod, tensors.values()))
    layers = {name.removesuffix(".weight"): shape for name, shape in tensors.items() if len(shape) == 2}
    if lora.target_modules == "all-linear":
        others = ("lm_head", *(name.removesuffix(".weight") for name in _EMBEDDINGS))
        names = [name for name in layers if not name.endswith(others)]
    else:
        names = [name for name in layers if name.rpartition(".")[2] in lora.target_modules]
    names = [name for name in names if block_index(name, lora.first_block) >= lora.first_block]
    return (1 + len(lora.roles)) * lora.rank * sum(sum(layers[name]) for name in names)


def block_index(layer: str, default: int) -> int:
    """Return the index of the transformer block that has a layer, by its name; `default` for a layer outside."""
    found = re.search(r"\.(\d+)\.", layer)
    return default if found is None else int(found[1])


def init_shapes(init: ModelInitConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the matrices of a new model (`build_tiny`) with a full vocabulary."""
    hidden, wide = init.hidden_size, init.intermediate_size
    kv = hidden // init.num_heads * init.num_kv_heads
    out_in = dict.fromkeys(("q_proj", "o_proj"), (hidden, hidden)) | dict.fromkeys(("k_proj", "v_proj"), (kv, hidden))
    out_in |= {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}
    layers = {f"layers.{n}.{name}.weight": shape for n in range(init.num_layers) for name, shape in out_in.items()}
    return {"embed_tokens.weight": (init.vocab_size, hidden), **layers}


def model_path(config: Config) -> str:
    """Return the policy's path: the configured one, or the world's packaged cold start."""
    if config.model.path is not None:
        return config.model.path
    if config.env.name.endswith(".py") and not Path(config.env.name).is_file():
        raise UserError(f"The file {config.env.name} of env.name does not exist.", "Check the path.")
    folder = next((recipe.cold_start for recipe in list_recipes() if recipe.name == config.env.name), None)
    if folder is None or not folder.is_dir():
        raise UserError(
            f"model.path is not set, and no cold start is packaged for env.name = {config.env.name!r}.",
            f"{did_you_mean(config.env.name, FACTORIES)}Set --model.path to a checkpoint or a model name. "
            "A small model that calls tools is packaged: --model.path "
            f"{recipe_folder('search') / 'cold_start'}",
        )
    if config.env.rendering != "chat":
        hint = f"Train one with tags: `ludus sft {config.env.name} --env.rendering {config.env.rendering}`."
        raise UserError("The packaged cold start uses its chat template, not tags.", hint)
    return str(folder)


def local_folder(path: str) -> Path | None:
    """Return the folder of a model, which may be the cache of the hub; None if it must be downloaded or created."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path, "config.json")
    except HFValidationError:  # loading the model reports the name
        return None
    return Path(found).parent if isinstance(found, str) else None


def check_plugins(config: Config) -> None:
    """Raise ConfigError for an engine, tracker or metric that is missing or has the wrong parameters."""
    if config.engine.plugin:
        find_plugin("engines", config.engine.plugin, "engine.plugin", ())
    for name in config.run.trackers:
        find_tracker(name)
    step_metrics(config.run.metrics)


def check_extras(config: Config) -> None:
    """Raise UserError if a setting needs a package of an extra that is not installed."""
    folder = Path(config.model.path or "")
    adapters = config.model.path is not None and (folder / "adapter_config.json").is_file()
    guided = config.rollout.guided_tools and not config.engine.is_external
    needed = (
        (config.model.lora is not None, "model.lora", "peft", "lora"),
        (adapters, f"model.path = {config.model.path!r}, which holds only adapters,", "peft", "lora"),
        (guided, "rollout.guided_tools", "llguidance", "guided"),
        (config.cluster.kind == "ray", "cluster.kind = 'ray'", "ray", "cluster"),
        *((name in config.run.trackers, f"The tracker {name} of run.trackers", name, name) for name in _TRACKERS),
    )
    for applies, what, package, extra in needed:
        if applies and find_spec(package) is None:
            hint = f"Install it: pip install 'ludus[{extra}]'."
            raise UserError(f"{what} needs the package {package}, which is not installed.", hint)


def check_sources(config: Config, kind: StageKind) -> None:
    """Raise UserError for training data of the stage in a file or a run that does not exist."""
    data, run = {
        "sft": (config.sft.data, None),
        "preference": (config.preference.data, config.preference.run),
        "reward-model": (config.reward_model.data, config.reward_model.run),
    }.get(kind, (None, None))
    if data and (Path(data).is_absolute() or data.endswith((".jsonl", ".json"))) and not Path(data).exists():
        raise UserError(f"{data} does not exist.", "Check the path.")
    if run and not (Path(run) / "config.toml").is_file():
        raise UserError(f"{run} is not a run folder: it has no config.toml.", "Check the path.")


def tensor_shapes(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield names and shapes from the headers of safetensors files; loading the model reports damaged ones."""
    for file in sorted(folder.glob("*.safetensors")):
        with suppress(OSError, SafetensorError), safe_open(file, "numpy") as data:
            names = data.keys()
            yield from [(name, data.get_slice(name).get_shape()) for name in names]


def check_rows(path: str, num_tokens: int, num_rows: int) -> None:
    """Raise UserError if the tokenizer of the model `path` has more tokens than the model's embedding has rows."""
    if num_tokens > num_rows:
        text = f"The tokenizer of {path} has {num_tokens} tokens, but the embedding of the model has {num_rows} rows."
        raise UserError(text, "Use the tokenizer that the model was trained with, or resize its embedding.")


def _num_tokens(file: Path) -> int:
    """Return the largest token id of a tokenizer.json plus 1; 0 if the file is missing or has another format."""
    try:
        data = json.loads(file.read_text("utf-8"))
        vocabulary = data["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        return 1 + max(int(number) for number in (*ids, *(token["id"] for token in data.get("added_tokens", ()))))
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def check_disk(config: Config, kind: StageKind, num_parameters: int) -> None:
    """Raise StorageError if the disk has no room for the checkpoints of a run, estimated from the model's size."""
    section = "training" if kind == "rl" else kind.replace("-", "_")
    kept: int = dict(config)[section].keep_checkpoints
    need = (kept + 1) * num_parameters * bytes_per_parameter(config)  # a new one before pruning
    folder = Path(config.run.dir or "runs").absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if need > free:
        raise StorageError(
            f"The checkpoints of this run need about {need / 1e9:.3g} GB, but {existing} has {free / 1e9:.3g} GB free.",
            f"Free some space, set --run.dir to another disk, or lower {section}.keep_checkpoints ({kept}).",
        )


def bytes_per_parameter(config: Config) -> int:
    """Return the bytes of a parameter in a checkpoint: weight, AdamW's two moments, a float32 copy if there is one."""
    weight = {"float32": 4, "bfloat16": 2, "float64": 8}[config.model.dtype]
    return weight + 3 * 4 if config.model.dtype == "bfloat16" and config.model.master_weights else 3 * weight
