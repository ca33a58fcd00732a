"""Vision-language models: image tokens, and their embeddings inside the model.

The input embedding of such a model computes the embedding of an image token from the image that the token names, so
that engine and learner pass images as token ids. This is exact for models that only replace embeddings, with causal
attention and one position per token, such as LLaVA, Idefics3 and SmolVLM. Others are rejected by a comparison when they
are loaded.
"""

from __future__ import annotations

import inspect
import io
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from ludus.errors import UserError
from ludus.images import IMAGE_IDS, MAX_PLACES, Image, ImageToken, image_of_digest

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from transformers import BatchFeature, PreTrainedModel

_CACHED_IMAGES = 256
_CACHED_PIXEL_BYTES = 2**28
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE_TOLERANCE = 0.1
"""Largest accepted difference in log-probability, for logits of a usual size."""


class Processor(Protocol):
    """Methods of a processor of transformers that are used here."""

    image_token: str
    image_token_id: int
    chat_template: str | None

    def __call__(self, *, text: str, images: Sequence[Picture], **kwargs: object) -> BatchFeature: ...

    def save_pretrained(self, folder: str) -> object: ...


class ImageTokens:
    """The tokens and pixels of images for a model with this processor."""

    def __init__(self, processor: Processor) -> None:
        self.processor = processor
        self.text, self.token_id = str(processor.image_token), processor.image_token_id
        self.expand = lru_cache(_CACHED_IMAGES)(self._expand)
        self._inputs = OrderedDict[Image, Mapping[str, Tensor]]()
        self._num_bytes = 0

    def inputs(self, image: Image) -> Mapping[str, Tensor]:
        """Return `pixels` of an image alone, kept for the latest images. Raises UserError as `pixels`."""
        found = self._inputs.pop(image, None)
        if found is None:
            found = self.pixels(image)
            self._num_bytes += _size(found)
        self._inputs[image] = found
        while self._num_bytes > _CACHED_PIXEL_BYTES:
            self._num_bytes -= _size(self._inputs.popitem(last=False)[1])
        return found

    def pixels(self, image: Image, before: str = "", after: str = "") -> Mapping[str, Tensor]:
        """Return the model inputs of a text with one image. Raises UserError if the processor rejects the image."""
        try:
            text = before + self.text + after
            given: Mapping[str, Tensor] = self.processor(
                text=text, images=[image.picture()], return_tensors="pt", add_special_tokens=False
            )
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"The model's processor rejects an image: {error}.", "Check its size.") from error
        return given

    def _expand(self, image: Image) -> tuple[int, ...]:
        return self.named(self.inputs(image)["input_ids"][0].tolist(), image)

    def named(self, ids: Sequence[int], image: Image) -> tuple[int, ...]:
        """Return ids in which the placeholders are the tokens of the image. Raises UserError if there are too many."""
        if ids.count(self.token_id) > MAX_PLACES:
            raise UserError(f"An image takes more than {MAX_PLACES} tokens.", "Scale it down.")
        places = iter(range(MAX_PLACES))
        return tuple(ImageToken(image, next(places)) if i == self.token_id else i for i in ids)


class ImageEmbedding(nn.Embedding):
    """Input embedding of text tokens and image tokens. The features of images are kept until a weight changes."""

    images: ImageTokens
    _owner: tuple[PreTrainedModel]
    _features: OrderedDict[int, Tensor]
    _weights: int

    def attach(self, model: PreTrainedModel, processor: Processor) -> None:
        """Compute the features of images with `model`, which contains this module."""
        self.images, self._owner = ImageTokens(processor), (model,)  # in a tuple: the model is not a submodule
        self._features, self._weights = OrderedDict(), -1

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_features": OrderedDict(), "_weights": -1}

    def forward(self, input: Tensor) -> Tensor:
        """Return embeddings `[..., H]` of ids `[...]`."""
        is_image = input >= IMAGE_IDS
        if not bool(is_image.any()):
            return super().forward(input)
        rows = super().forward(torch.where(is_image, 0, input))
        names, places = (input - IMAGE_IDS) // MAX_PLACES, input % MAX_PLACES
        for digest, features in self._features_of(sorted(set(names[is_image].tolist()))).items():
            own = is_image & (names == digest)
            rows = rows.index_put((own,), features[places[own]].to(rows.dtype))
        return rows

    def _features_of(self, digests: Sequence[int]) -> Mapping[int, Tensor]:
        """Return the features `[N, H]` of images: of all together for a gradient, otherwise of each by itself."""
        if torch.is_grad_enabled():
            return dict(zip(digests, self._compute([image_of_digest(one) for one in digests]), strict=True))
        weights = sum(parameter._version for parameter in self._owner[0].parameters())
        if weights != self._weights:
            self._features.clear()
            self._weights = weights
        found: dict[int, Tensor] = {}
        for digest in digests:
            own = self._features.pop(digest, None)
            found[digest] = self._features[digest] = self._compute([image_of_digest(digest)])[0] if own is None else own
            while len(self._features) > _CACHED_IMAGES:
                self._features.popitem(last=False)
        return found

    def _compute(self, images: Sequence[Image]) -> list[Tensor]:
        """Return the features of images, in one pass for those whose inputs have the same shapes."""
        model = self._owner[0]
        names = inspect.signature(model.get_image_features).parameters
        groups: dict[Hashable, dict[int, Mapping[str, Tensor]]] = {}
        for number, image in enumerate(images):
            inputs = {name: value for name, value in self.images.inputs(image).items() if name in names}
            groups.setdefault(_group_of(inputs, image), {})[number] = inputs
        found: dict[int, Tensor] = {}
        for group in groups.values():
            joined = {name: torch.cat([one[name] for one in group.values()]) for name in next(iter(group.values()))}
            output = model.get_image_features(**_placed(joined, model)).pooler_output
            parts = [output] if isinstance(output, Tensor) else list(output)
            found |= zip(group, torch.cat([part.flatten(0, -2) for part in parts]).chunk(len(group)), strict=True)
        return [found[number] for number in range(len(images))]


def _group_of(inputs: Mapping[str, Tensor], image: Image) -> Hashable:
    """Return what images in one pass share: shapes, and the values that may change the number of tokens.

    An image of zeros is alone: some models take it for padding.
    """
    known = [v.shape if v.is_floating_point() else (v.shape, v.numpy().tobytes()) for v in inputs.values()]
    return (*inputs, *known, *(image.digest for v in inputs.values() if not v.any()))


def _size(inputs: Mapping[str, Tensor]) -> int:
    return sum(value.nbytes for value in inputs.values())


def image_tokens(model: PreTrainedModel) -> ImageTokens | None:
    """Return the image tokens of a vision-language model, None for a text model."""
    embedding = model.get_input_embeddings()
    return embedding.images if isinstance(embedding, ImageEmbedding) else None


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part whose attention processes tokens: the model itself if it has no other."""
    part: PreTrainedModel = model if image_tokens(model) is None else model.get_decoder()
    return part


def other_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers outside `text_part`, which process images."""
    own = set(text_part(model).modules())
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module not in own}
    return [] if image_tokens(model) is None else sorted(layers)


def enable_images(model: PreTrainedModel, processor: Processor) -> None:
    """Let a vision-language model accept image tokens. Raises UserError if that is not exact for it."""
    embedding, name = model.get_input_embeddings(), type(model).__name__
    hint = "Models with causal attention and one position per token are supported, such as LLaVA and SmolVLM."
    if "mrope_section" in str(model.config.get_text_config().to_dict().get("rope_parameters")):
        raise UserError(f"{name} cannot be used with images: its positions have several dimensions.", hint)
    if type(embedding) is not nn.Embedding:
        raise UserError(f"{name} has an input embedding of an unsupported class.", hint)
    embedding.__class__ = ImageEmbedding
    assert isinstance(embedding, ImageEmbedding)
    embedding.attach(model, processor)
    try:
        difference = _trial(model, embedding.images)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{name} cannot be used with images: {error}.", hint) from error
    if not difference < _TOLERANCE.get(model.dtype, _COARSE_TOLERANCE):
        text = f"passes over image tokens and over pixels differ by {difference:.2g} in log-probability"
        raise UserError(f"{name} cannot be used with images: {text}.", hint)


@torch.no_grad()
def _trial(model: PreTrainedModel, images: ImageTokens) -> float:
    """Return the largest difference in log-probability from the model's own pass over a text with an image, relative to
    the standard deviation of the log-probabilities if that is below 1."""
    from PIL import Image as Pictures

    file = io.BytesIO()
    Pictures.linear_gradient("L").resize((64, 48)).save(file, "PNG")
    image = Image.of(file.getvalue())
    inputs = dict(_placed(images.pixels(image, "One two ", " three four"), model))
    ids = images.named(inputs["input_ids"][0].tolist(), image)
    expected = model(**inputs).logits[0].double().log_softmax(-1)
    found = model(input_ids=torch.tensor([ids], device=model.device)).logits[0].double().log_softmax(-1)
    return float((expected - found).abs().max() / expected.std().clamp(max=1.0))


def _placed(inputs: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the inputs on the model's device, and numbers in its type."""
    return {k: v.to(model.device, model.dtype if v.is_floating_point() else v.dtype) for k, v in inputs.items()}
