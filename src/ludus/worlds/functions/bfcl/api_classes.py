"""The API classes of BFCL, from the package bfcl-eval, and the descriptions of functions in its format.

The package is installed by `pip install --no-deps bfcl-eval`; none of its pinned dependencies is needed. Its
modules are read as files and imported only in the sandbox.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import sys
import zipfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

from pydantic import BaseModel, Field, JsonValue

from ludus.envs.task_files import RecordError
from ludus.errors import UserError
from ludus.tools.base import FunctionSchema, ToolSchema
from ludus.types import JSON

_PACKAGE: Final = "bfcl_eval"
_SOURCES: Final = PurePosixPath("bfcl_eval/eval_checker/multi_turn_eval/func_source_code")
_DESCRIPTIONS: Final = PurePosixPath("bfcl_eval/data/multi_turn_func_doc")
_INSTALL: Final = {_PACKAGE: "pip install --no-deps bfcl-eval", "mpmath": "pip install mpmath"}
"""The packages that are sent to the sandbox, and the commands that install them."""
_TYPES: Final = {name: name for name in ("object", "number", "integer", "string", "boolean", "array")} | {
    "dict": "object",
    "float": "number",
    "double": "number",
    "long": "integer",
    "tuple": "array",
}
"""JSON schema types by their names in BFCL; others are not checked."""


class Description(BaseModel):
    """The description of a function."""

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, JsonValue] = {}


def read_schemas(described: Iterable[Description]) -> dict[str, ToolSchema]:
    """Return the descriptions of functions by name. Raises RecordError."""
    found: dict[str, ToolSchema] = {}
    for one in described:
        if one.name in found:
            raise RecordError(f"duplicate function {one.name!r}")
        schema = _schema(one.parameters)
        if not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
            raise RecordError(f'"parameters" of {one.name!r} is not a JSON schema')
        parameters = {"type": "object", "properties": {}, "required": [], **schema}
        function = FunctionSchema(name=one.name, description=one.description, parameters=parameters)
        found[one.name] = ToolSchema(type="function", function=function)
    return found


def _schema(given: JSON) -> JSON:
    """Return the schema with the type names of JSON schema, without unknown types."""
    if not isinstance(given, dict):
        return given
    schema = {key: _schema(value) if key == "items" else value for key, value in given.items() if key != "type"}
    if str(given.get("type")) in _TYPES:
        schema["type"] = _TYPES[str(given["type"])]
    if isinstance(properties := schema.get("properties"), dict):
        schema["properties"] = {name: _schema(one) for name, one in properties.items()}
    return schema


def _site_folder(package: str, reason: str) -> Path:
    """Return the folder in which a package is installed. Raises UserError if it is not."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{reason}, and {package.replace('_', '-')} is not installed.", _INSTALL[package])
    return Path(spec.submodule_search_locations[0]).parent


def _package_site() -> Path:
    return _site_folder(_PACKAGE, "BFCL's tasks of several turns run on its API classes")


def find_classes(names: Iterable[str]) -> dict[str, str]:
    """Return the names of the modules that define classes, by class.

    Raises RecordError for a class that is not in the package, has no descriptions, or needs a package that the
    sandbox lacks; UserError if bfcl-eval is not installed.
    """
    site = _package_site()
    found: dict[str, str] = {}
    for name in names:
        stem = _classes(site).get(name)
        if stem is None or not (site / _DESCRIPTIONS / f"{stem}.json").is_file():
            raise RecordError(f"its class {name!r} is not in the installed bfcl-eval")
        if lacking := sorted(_imports_of(site / _SOURCES / f"{stem}.py")[1] - _INSTALL.keys()):
            raise RecordError(f"its class {name!r} needs the package {lacking[0]!r}, which is not in the sandbox")
        found[name] = ".".join((*_SOURCES.parts, stem))
    return found


@cache
def _classes(site: Path) -> Mapping[str, str]:
    """Return the module, without its folder, that defines each class."""
    return {
        node.name: source.stem
        for source in sorted((site / _SOURCES).glob("*.py"))
        for node in ast.parse(source.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    }


def schemas_of(modules: Iterable[str]) -> dict[str, ToolSchema]:
    """Return the descriptions of the functions of modules by name. Raises RecordError if they cannot be read."""
    described: list[Description] = []
    for module in modules:
        path = _package_site() / _DESCRIPTIONS / f"{module.rpartition('.')[2]}.json"
        try:
            lines = path.read_text("utf-8").split("\n")
            described += [Description.model_validate_json(line) for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            raise RecordError(f"{path} cannot be read ({error})") from None
    return read_schemas(described)


@cache
def _imports_of(source: Path) -> tuple[frozenset[Path], frozenset[str]]:
    """Return the transitive imports of a module: modules of the package, itself included, and other packages."""
    modules, packages, pending = {source}, set[str](), [source]
    while pending:
        for node in ast.walk(ast.parse(pending.pop().read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in [node.module or ""] if isinstance(node, ast.ImportFrom) else names:
                sibling = source.with_name(f"{name.rpartition('.')[2]}.py")
                top = name.partition(".")[0]
                if top == _PACKAGE and sibling.is_file():
                    pending += {sibling} - modules
                    modules.add(sibling)
                elif top not in sys.stdlib_module_names:
                    packages.add(top)
    return frozenset(modules), frozenset(packages)


@cache
def archive(modules: frozenset[str]) -> bytes:
    """Return the modules and their imports as an importable archive.

    Raises UserError if a package that they need is not installed.
    """
    folder = _package_site() / _SOURCES
    needs = [_imports_of(folder / f"{module.rpartition('.')[2]}.py") for module in modules]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for parent in (_SOURCES, *_SOURCES.parents[:-1]):
            packed.writestr(f"{parent}/__init__.py", "")
        for path in sorted(frozenset[Path]().union(*(paths for paths, _ in needs))):
            packed.write(path, f"{_SOURCES}/{path.name}")
        for name in sorted(frozenset[str]().union(*(packages for _, packages in needs))):
            site = _site_folder(name, "A class of bfcl-eval needs another package")
            for path in sorted((site / name).rglob("*.py")):
                if "tests" not in path.parts:
                    packed.write(path, path.relative_to(site).as_posix())
    return buffer.getvalue()
