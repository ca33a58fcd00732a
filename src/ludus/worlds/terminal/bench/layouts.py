"""The two layouts of a task's folder: the first Terminal-Bench's (`task.yaml`), and Harbor's (`task.toml`).

Terminal-Bench                            Harbor, Terminal-Bench 2
task.yaml   `instruction`, `difficulty`   instruction.md, task.toml: `[metadata]`, `[verifier]`
Dockerfile, next to the files it copies   environment/Dockerfile, next to them
run-tests.sh   grades by its exit code    tests/test.sh   writes /logs/verifier/reward.txt or reward.json
solution.sh                               solution/solve.sh
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ludus.errors import ConfigError

_APART: Final = ("tests", "solution.sh", "solution.yaml", "run-tests.sh", "task.yaml", "Dockerfile")
_TIMEOUT_S: Final = 120.0
_HARBOR_TIMEOUT_S: Final = 600.0
"""Default and maximum time of Harbor's verifier."""


@dataclass(frozen=True, slots=True)
class BenchLayout:
    """The parts of a task's folder.

    `context` is the folder that the Dockerfile copies from. `script` grades if there are no pytest tests, within
    `timeout_s`. `needs` are the reasons why the task cannot run without a container.
    """

    text: str
    category: str
    difficulty: str
    context: Path
    script: Path
    solution: Path
    timeout_s: float = _TIMEOUT_S
    needs: tuple[str, ...] = ()

    @property
    def apart(self) -> tuple[str, ...]:
        """Names in the context that are never copied to the initial files."""
        return ("Dockerfile",) if self.rewards else _APART

    @property
    def rewards(self) -> bool:
        """Whether the script writes a reward file."""
        return self.script.name == "test.sh"


def read_layout(place: Path) -> BenchLayout:
    """Return the layout of a task's folder. Raises ConfigError if it cannot be read."""
    return _harbor(place) if (place / "task.toml").is_file() else _terminal_bench(place)


def _terminal_bench(place: Path) -> BenchLayout:
    yaml = importlib.import_module("yaml")
    try:
        data = yaml.safe_load((place / "task.yaml").read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{place / 'task.yaml'} cannot be read: {error}.", "Fix the file.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{place / 'task.yaml'} is not a mapping.", "Fix the file.")
    text = data.get("instruction") or _described(data.get("descriptions"))
    return BenchLayout(
        text if isinstance(text, str) else "",
        str(data.get("category") or "bench"),
        str(data.get("difficulty")),
        place,
        place / "run-tests.sh",
        place / "solution.sh",
    )


def _described(data: object) -> object:
    """Return the description with the key `base`, or the first one."""
    if not isinstance(data, list):
        return None
    found = {str(one.get("key")): one.get("description") for one in data if isinstance(one, dict)}
    return found.get("base") or next(iter(found.values()), None)


def _harbor(place: Path) -> BenchLayout:
    try:
        data = tomllib.loads((place / "task.toml").read_text("utf-8"))
        instruction = place / "instruction.md"
        text = instruction.read_text("utf-8") if instruction.is_file() else ""
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{place / 'task.toml'} cannot be read: {error}.", "Fix the file.") from error
    metadata, verifier, environment = (_table(data, key) for key in ("metadata", "verifier", "environment"))
    timeout_s = verifier.get("timeout_sec", _HARBOR_TIMEOUT_S)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise ConfigError(f"{place / 'task.toml'}: verifier.timeout_sec is {timeout_s!r}.", "Fix the file.")
    return BenchLayout(
        text,
        str(metadata.get("category") or "bench"),
        str(metadata.get("difficulty")),
        place / "environment",
        place / "tests/test.sh",
        place / "solution/solve.sh",
        min(float(timeout_s), _HARBOR_TIMEOUT_S),
        tuple(_needs(place, data, environment)),
    )


def _needs(place: Path, data: Mapping[str, object], environment: Mapping[str, object]) -> list[str]:
    """Return the requirements that only a container can meet."""
    folder, found = place / "environment", list[str]()
    if data.get("steps"):
        found.append("it has several steps")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / name).is_file():
            found.append(f"environment/{name}: services in other containers")
    image = environment.get("docker_image")
    if image and not (folder / "Dockerfile").is_file():
        found.append(f"environment.docker_image: the image {image}")
    if environment.get("gpus"):
        found.append("environment.gpus: a GPU")
    if environment.get("mcp_servers"):
        found.append("environment.mcp_servers: MCP servers")
    return found


def _table(data: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}
