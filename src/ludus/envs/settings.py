"""A world's own settings (`env.settings`), checked against its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from ludus.errors import ConfigError, nearest_names

Settings = TypeVar("Settings", bound=BaseModel)


class WorldSettings(BaseModel):
    """Base of a world's settings: immutable, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def read_settings(schema: type[Settings], given: Mapping[str, object]) -> Settings:
    """Return the validated settings; the schema should forbid extra keys.

    The value `none` selects the default, unless it is one of the setting's choices (a `Literal`). Raises ConfigError
    with one sentence per mistake: the key, its value, and the nearest key or the valid values.
    """
    fields, hints = schema.model_fields, get_type_hints(schema)
    unset = {key for key in fields if given.get(key) == "none" and "none" not in get_args(hints[key])}
    explicit = {key: value for key, value in given.items() if key not in unset}
    try:
        return schema.model_validate_json(json.dumps(explicit), strict=True)  # lists may be tuples
    except ValidationError as error:
        problems = [_sentence(details, list(fields)) for details in error.errors()]
    known = ", ".join(fields)
    raise ConfigError("\n".join(dict.fromkeys(problems)), f"This world has the settings {known}.")


def _sentence(details: ErrorDetails, known: list[str]) -> str:
    key = ".".join(["env.settings", *map(str, details["loc"])])
    shown = f"{key} (= {details['input']!r})"
    if details["type"] != "extra_forbidden":
        return f"{shown}: it {details['msg'].removeprefix('Input ')}."
    near = nearest_names(str(details["loc"][-1]), known, cutoff=0.5)
    nearest = f"; the nearest is {' or '.join(f'env.settings.{name}' for name in near)}" if near else ""
    return f"{shown} is not a setting of this world{nearest}."
