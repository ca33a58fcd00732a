"""Load, save and create models and tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from threading import Lock
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from ludus.config.paths import check_model_folder
from ludus.config.sections.model import ModelInitConfig
from ludus.engines.base import ROLE_ADAPTER, first_line
from ludus.engines.models import smollm2
from ludus.engines.models.lora import is_peft, role_adapters
from ludus.engines.models.vision import Processor, enable_images, image_tokens
from ludus.errors import StorageError, UserError, did_you_mean

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_AGREEMENT = {torch.float64: 1e-10, torch.float32: 1e-5}
_COARSE_AGREEMENT = 2e-2
"""Maximum relative difference; 16-bit types round twice in transformers and once here."""
_TRIAL_ROWS = 8


class FusedRMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich, arXiv:1910.07467), in one GPU
    kernel. The modules of transformers start about eight."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


def fuse_norms(model: nn.Module) -> int:
    """Switch the RMSNorm modules of transformers to `FusedRMSNorm`, if they agree on a random input, and return their
    number. The model's parameters are unchanged."""
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm") and "variance_epsilon" in vars(m)]
    agree = {kind: _agrees(next(m for m in norms if type(m) is kind)) for kind in {type(m) for m in norms}}
    fused = [m for m in norms if agree[type(m)]]
    for module in fused:
        module.__class__ = FusedRMSNorm
    return len(fused)


@torch.no_grad()
def _agrees(module: nn.Module) -> bool:
    weight, epsilon = module.weight, float(vars(module)["variance_epsilon"])
    if not isinstance(weight, Tensor) or weight.dim() != 1 or isinstance(module, FusedRMSNorm):
        return False
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(_TRIAL_ROWS, len(weight), generator=source).to(weight)
    expected, found = module(rows), rms_norm(rows, weight.shape, weight, epsilon)
    limit = _AGREEMENT.get(weight.dtype, _COARSE_AGREEMENT)
    return bool(((expected - found).abs() <= limit * expected.abs().max()).all())


DTypeName = Literal["float32", "bfloat16", "float64"]
DeviceName = Literal["auto", "cpu", "cuda"]

_DTYPES: dict[DTypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_HUB_TIMEOUT_S = 10.0

_MAX_MERGE_LOSS = 0.1
_TRIAL_TOKENS = 24
_PICKLE_HINT = "Unpickling them could execute code. Save them as safetensors."


def resolve_device(device: DeviceName) -> torch.device:
    """Return the torch device; `auto` is the GPU if there is one. Raises `UserError` for a missing GPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device is cuda, but PyTorch finds no CUDA device.", "Set model.device to auto or cpu.")
    return torch.device(device)


def resolve_model(path: str) -> str:
    """Return the folder of the model `smollm2`, created in the user's cache on the first call; or the path."""
    if path != smollm2.NAME:
        return path
    return str(smollm2.materialise_smollm2(smollm2.default_cache()))


_LOAD_LOCK = Lock()
"""Held while transformers loads a model: it replaces functions of torch meanwhile, which other threads would call."""


def hide_progress() -> None:
    """Disable the progress bars of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def load_model(path: str, dtype: DTypeName = "float32", device: DeviceName = "auto") -> PreTrainedModel:
    """Load a causal or vision-language model from a folder or a model name, in eval mode; an adapter folder is merged
    into its base model. Raises `UserError` if there is none, if tensors are missing, unexpected or of the wrong shape,
    or if the vision-language model lacks a processor or is not supported."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    target = resolve_device(device)
    path = resolve_model(path)
    if (Path(path) / "adapter_config.json").is_file():
        return _load_adapted(Path(path), dtype, device)
    config = _load_config(path)
    has_images = _has_images(config)
    if not has_images:
        _check_causal(path, config)
    processor = load_processor(path) if has_images else None
    with _LOAD_LOCK, _loading(f"The model {path}", "Check its weight files."):
        model, info = (AutoModelForImageTextToText if has_images else AutoModelForCausalLM).from_pretrained(
            path,
            config=config,
            dtype=_DTYPES[dtype],
            attn_implementation=None,  # SDPA if the architecture supports it (Gemma2 does not)
            local_files_only=_is_folder(path),
            trust_remote_code=False,
            weights_only=True,
            ignore_mismatched_sizes=True,  # reported below by name
            output_loading_info=True,
        )
    _check_weights(path, "lacks", info["missing_keys"])
    _check_weights(path, "has unexpected", info["unexpected_keys"])
    _check_weights(path, "has wrongly shaped", (mismatch[0] for mismatch in info["mismatched_keys"]))
    loaded: PreTrainedModel = model.to(target).eval()
    if loaded.device.type == "cuda":
        fuse_norms(loaded)
    if processor is not None:
        enable_images(loaded, processor)
    return loaded


def load_processor(path: str) -> Processor:
    """Load the processor of a vision-language model. Raises UserError if it or a package that it needs is missing."""
    from transformers import AutoProcessor

    if find_spec("PIL") is None:
        raise UserError(f"The model {path} needs the package pillow.", "Install it: pip install 'ludus[vision]'.")
    files = "processor_config.json or preprocessor_config.json"
    hint = f"The folder needs {files}; its packages are the extra vision. Install it: pip install 'ludus[vision]'."
    with _loading(f"The processor of {path}", hint):
        processor: Processor = AutoProcessor.from_pretrained(
            path, local_files_only=_is_folder(path), trust_remote_code=False
        )
        if not {"image_token", "image_token_id"} <= set(dir(processor)):
            raise ValueError("it has no image token")
    return processor


def num_positions(model: PreTrainedModel) -> int | None:
    """Return the maximum sequence length of a model, or None if its configuration does not state one."""
    name = "max_position_embeddings"
    config = model.config.get_text_config()
    found: int | None = config.to_dict().get(config.attribute_map.get(name, name))
    return found


def _load_adapted(folder: Path, dtype: DTypeName, device: DeviceName) -> PreTrainedModel:
    """Load an adapter's base model and merge it. Raises UserError if rounding loses much of its effect."""
    if find_spec("peft") is None:
        raise UserError(
            f"{folder} holds only adapters, which need the package peft.", "Install it: pip install 'ludus[lora]'."
        )
    if roles := sorted(path.name for path in folder.glob(f"{ROLE_ADAPTER}*")):
        raise UserError(
            f"{folder} holds an adapter for each of several roles, and a merged model has only one.",
            f"Choose the folder of a role: {folder / roles[0]}.",
        )
    from peft import PeftModel

    with _loading(f"The adapters in {folder}", "Use a full model."):
        base = json.loads((folder / "adapter_config.json").read_text("utf-8"))["base_model_name_or_path"]
        try:
            model = load_model(base, dtype, device)
        except UserError as error:
            raise UserError(
                f"{folder} holds only adapters, and their base model cannot be loaded: {error.message}", error.hint
            ) from error
        merged, lost = _merge_adapters(PeftModel.from_pretrained(model, str(folder)))
    if lost > _MAX_MERGE_LOSS:
        raise UserError(
            f"Merging the adapters in {folder} into {dtype} weights loses {lost:.0%} of their effect.",
            "Load it with model.dtype = float32, or train on the base model with model.lora.",
        )
    return merged.requires_grad_(True).eval()


@torch.no_grad()
def _merge_adapters(adapted: PeftModel) -> tuple[PreTrainedModel, float]:
    """Merge the adapters; return the model and the fraction of their effect on some logits that is lost."""
    vocabulary = adapted.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(_TRIAL_TOKENS, device=adapted.device)[None] * 7 % vocabulary
    adapted.eval()
    expected = adapted(input_ids=tokens, use_cache=False).logits.float()
    with adapted.disable_adapter():
        plain = adapted(input_ids=tokens, use_cache=False).logits.float()
    merged: PreTrainedModel = adapted.merge_and_unload()
    actual = merged(input_ids=tokens, use_cache=False).logits.float()
    effect = float((expected - plain).norm())
    return merged, float((expected - actual).norm()) / effect if effect else 0.0


def load_tokenizer(path: str, *, needs_template: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or a model name.

    Raises UserError if it cannot be loaded, or has no chat template although `needs_template` is set.
    """
    from transformers import AutoTokenizer

    path = resolve_model(path)
    _check_exists(path)
    with _loading(f"The tokenizer of {path}", "The folder needs tokenizer.json and tokenizer_config.json."):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=_is_folder(path), trust_remote_code=False
        )
    has_config = (Path(path) / "config.json").is_file() or (needs_template and not _is_folder(path))
    if not tokenizer.chat_template and has_config and _has_images(_load_config(path)):
        tokenizer.chat_template = load_processor(path).chat_template
    if needs_template and not tokenizer.chat_template:
        raise UserError(
            f"The tokenizer of {path} has no chat template.",
            "Use an instruction-tuned checkpoint, or set env.rendering to tags.",
        )
    return tokenizer


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a checkpoint for `from_pretrained`, with the tokenizer; for a PEFT model only the adapters, those of roles
    in folders of their names.

    `weights`, by name, replace the model's own. Raises StorageError.
    """
    from safetensors import SafetensorError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for config in model.peft_config.values() if is_peft(model) else ():
            if isinstance(config.target_modules, set):  # PEFT would write it in a different order per process
                config.target_modules = sorted(config.target_modules)
        model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
        for target in (folder, *(folder / name for name in role_adapters(model))):
            tokenizer.save_pretrained(target)
        if (images := image_tokens(model)) is not None:
            images.processor.save_pretrained(str(folder))
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"The model cannot be written to {folder}: {error}", "Free some space or choose another folder."
        ) from error


def build_tiny(scratch: ModelInitConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """Create a small random Qwen3 model in float32 on the CPU, with tied embeddings, deterministic in `seed`.

    The global random state is unchanged. Raises UserError if the vocabulary is too small.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if len(tokenizer) > scratch.vocab_size:
        raise UserError(
            f"The tokenizer has {len(tokenizer)} tokens, but model.init.vocab_size is {scratch.vocab_size}.",
            "Increase model.init.vocab_size.",
        )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=scratch.hidden_size,
        intermediate_size=scratch.intermediate_size,
        num_hidden_layers=scratch.num_layers,
        num_attention_heads=scratch.num_heads,
        num_key_value_heads=scratch.num_kv_heads,
        head_dim=scratch.hidden_size // scratch.num_heads,
        max_position_embeddings=scratch.context_tokens,
        initializer_range=scratch.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = Qwen3ForCausalLM(config).float()
    return model.eval()


@contextmanager
def _loading(what: str, hint: str) -> Iterator[None]:
    """Raise a UserError for the errors by which Hugging Face's libraries reject files."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    malformed = (EOFError, KeyError, TypeError, ValueError, StrictDataclassError, SafetensorError)
    try:
        yield
    except UnpicklingError as error:
        raise UserError(f"{what} cannot be loaded: it is a pickle of more than tensors.", _PICKLE_HINT) from error
    except (OSError, ImportError, RuntimeError, *malformed) as error:
        raise UserError(f"{what} cannot be loaded: {first_line(error)}.", hint) from error


def _load_config(path: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    _check_exists(path)
    if _is_folder(path) and not (Path(path) / "config.json").is_file():
        raise UserError(
            f"The folder {path} has no config.json, so it is not a model checkpoint.",
            "Set the path to the folder that holds config.json and the weights.",
        )
    with _loading(f"The model {path}", "Use a checkpoint folder or the name of a downloadable model."):
        return AutoConfig.from_pretrained(path, local_files_only=_is_folder(path), trust_remote_code=False)


def _check_exists(path: str) -> None:
    check_model_folder(path)
    if _is_folder(path):
        return
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:  # to fail fast on a misspelled name or a missing network
        if not isinstance(try_to_load_from_cache(path, "config.json"), str):
            HfApi().model_info(path, timeout=_HUB_TIMEOUT_S)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"The folder {path!r} does not exist, and the model hub has no model of that name.",
            f"{did_you_mean(path, [smollm2.NAME])}Check the spelling; a private model needs a login.",
        ) from error
    except Exception as error:  # boundary: the hub client's network errors differ by version
        raise UserError(
            f"The folder {path!r} does not exist, and the model hub cannot be reached: {first_line(error)}.",
            f"{did_you_mean(path, [smollm2.NAME])}Check the path or the network.",
        ) from error


def _has_images(config: PreTrainedConfig) -> bool:
    """Return whether a model is loaded with its vision part: no causal language model has its type."""
    from transformers.models.auto import modeling_auto

    kinds = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return config.model_type in kinds and config.model_type not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _check_causal(path: str, config: PreTrainedConfig) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal = {
        name
        for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for name in ((names,) if isinstance(names, str) else names)
    }
    classes = config.architectures or []
    has_text_part = any(name.endswith("ForConditionalGeneration") for name in classes)  # of a multimodal checkpoint
    fits = not classes or has_text_part or not causal.isdisjoint(classes)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or not fits:
        raise UserError(
            f"The model {path} is not a causal language model (it is {', '.join(classes) or config.model_type}).",
            "Use a checkpoint for text generation.",
        )


def _check_weights(path: str, fault: str, names: Iterable[str]) -> None:
    found = sorted(names)
    if found:
        shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise UserError(
            f"The checkpoint {path} {fault} weights ({len(found)}): {shown}.",
            "Its weight files do not match config.json.",
        )


def _is_folder(path: str) -> bool:
    return Path(path).is_dir()
