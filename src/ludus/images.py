"""Images in messages, and their tokens.

A message holds its images as data URLs; each `<image>` in its content marks the place of one (`content_parts`). In
token sequences an image is a run of `ImageToken`: integers that no vocabulary contains, made from the hash of the image
file and the place within the image. Equal ids mean equal embeddings, so caches of prefixes, rows and packing treat them
like other tokens. Models compute their embeddings from the image (`ludus.engines.models.vision`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self
from weakref import WeakValueDictionary

from ludus.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

    from ludus.types import Message

IMAGE_MARK: Final = "<image>"
"""Place of an image in the content of a message."""
IMAGE_IDS: Final = 2**62
"""Ids of image tokens are at least this; ids of a vocabulary are less."""
MAX_PIXELS: Final = 2**24
MAX_PLACES: Final = 2**16
"""Maximum number of tokens of an image."""
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_HASH_BITS: Final = 46


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class Image:
    """An encoded image file. Equal files are the same object while one exists."""

    data: bytes
    digest: int
    checked: list[bool] = field(default_factory=list)
    """Not empty if the file was decoded."""

    @classmethod
    def of(cls, data: bytes) -> Image:
        """Return the image with this file, not decoded. Raises UserError for an equal hash of another file."""
        digest = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> (64 - _HASH_BITS)
        found = _KNOWN.setdefault(digest, cls(data, digest))
        if found.data != data:
            raise UserError(f"Two images have the hash {digest:012x}.", "Encode one of them differently.")
        return found

    def __reduce__(self) -> tuple[object, ...]:
        return Image.of, (self.data,)

    def __repr__(self) -> str:
        return f"Image({self.digest:012x}, {len(self.data)} bytes)"

    def picture(self) -> Picture:
        """Decode the image to RGB. Raises UserError if that fails, it is too large, or pillow is missing."""
        try:
            from PIL import Image as Pictures
        except ImportError as error:
            raise UserError("Images need the package pillow.", "Install it: pip install 'ludus[vision]'.") from error
        try:
            with Pictures.open(io.BytesIO(self.data), formats=_FORMATS) as opened:
                if opened.width * opened.height > MAX_PIXELS:
                    size = f"{opened.width}x{opened.height} pixels"
                    raise UserError(f"An image has {size}; the limit is {MAX_PIXELS} in all.", "Scale it down.")
                return opened.convert("RGB")
        except (OSError, ValueError, SyntaxError, EOFError, Pictures.DecompressionBombError) as error:
            hint = f"Supported formats: {', '.join(_FORMATS)}."
            raise UserError(f"An image cannot be decoded: {error}.", hint) from error

    def describe(self) -> str:
        """Return the size and hash for transcripts."""
        try:
            picture = self.picture()
        except UserError:
            return f"[image {self.digest:012x}]"
        return f"[image {picture.width}x{picture.height} {self.digest:012x}]"


_KNOWN: WeakValueDictionary[int, Image] = WeakValueDictionary()  # interned, as strings are; keeps none alive


class ImageToken(int):
    """Id of one token of an image; it keeps the image alive."""

    image: Image

    def __new__(cls, image: Image, place: int) -> Self:
        token = super().__new__(cls, IMAGE_IDS | image.digest * MAX_PLACES | place)
        token.image = image
        return token

    def __reduce__(self) -> tuple[object, ...]:
        return ImageToken, (self.image, place_of(self))


def digest_of(token: int) -> int:
    """Return the hash of an image token's image."""
    return (token - IMAGE_IDS) // MAX_PLACES


def place_of(token: int) -> int:
    """Return the place of an image token within its image."""
    return token % MAX_PLACES


def image_of_digest(digest: int) -> Image:
    """Return the image with this hash. Raises UserError if no record holds it."""
    found = _KNOWN.get(digest)
    if found is None:
        raise UserError(f"The image {digest:012x} is not available.", "Its tokens were kept without their messages.")
    return found


def image_url(data: bytes, kind: str = "png") -> str:
    """Return the data URL of an image file, as a message holds it."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def read_image(url: object) -> Image:
    """Return the image of a data URL. Raises UserError for another URL and for invalid or too large images."""
    head, comma, body = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        shown = str(url)[:60]
        raise UserError(f"An image is {shown!r}, not a data URL.", "Write it as data:image/png;base64,...")
    try:
        image = Image.of(base64.b64decode(body, validate=True))
    except (binascii.Error, ValueError) as error:
        raise UserError(f"The data URL of an image is invalid: {error}.") from error
    if not image.checked:
        image.picture()
        image.checked.append(True)
    return image


def content_parts(message: Message) -> list[str | Image]:
    """Split the content of a message into texts and images.

    If the content does not mark a place for each image, its marks are text, and the images come before it.
    """
    images = [read_image(url) for url in message.get("images", ())]
    texts = message["content"].split(IMAGE_MARK)
    if not images:
        return [message["content"]]
    if len(texts) != len(images) + 1:
        return [*images, message["content"]]
    return [texts[0], *(part for pair in zip(images, texts[1:], strict=True) for part in pair)]


def from_openai(parts: Sequence[tuple[str, str]]) -> tuple[str, list[str]]:
    """Return content and images for OpenAI content parts, given as pairs ("text", text) or ("image_url", data URL)."""
    content = "".join(IMAGE_MARK if kind == "image_url" else value for kind, value in parts)
    return content, [value for kind, value in parts if kind == "image_url"]


def to_openai(message: Message) -> Mapping[str, object]:
    """Return the message with its images as OpenAI content parts; unchanged if it has none."""
    if not message.get("images"):
        return message
    urls = iter(message["images"])
    parts: list[dict[str, object]] = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": next(urls)}}
        for part in content_parts(message)
        if part
    ]
    return {**{name: value for name, value in message.items() if name != "images"}, "content": parts}


def describe_content(message: Message) -> str:
    """Return the content with a description in the place of each image."""
    if not message.get("images"):
        return message["content"]
    return "".join(part if isinstance(part, str) else part.describe() for part in content_parts(message))


def restore_tokens(tokens: Sequence[int], messages: Iterable[Message]) -> tuple[int, ...]:
    """Return tokens read from a file with the image tokens that belong to the images of the messages."""
    images = {image.digest: image for m in messages for url in m.get("images", ()) for image in [read_image(url)]}
    found: list[int] = []
    for token in tokens:
        image = images.get(digest_of(token)) if token >= IMAGE_IDS else None
        found.append(token if image is None else ImageToken(image, place_of(token)))
    return tuple(found)
