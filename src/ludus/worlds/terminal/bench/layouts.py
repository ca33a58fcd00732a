"""The two layouts of a task's folder: Terminal-Bench's first one (`task.yaml`), and Harbor's (`task.toml`).

Terminal-Bench                            Harbor, Terminal-Bench 2
task.yaml   `instruction`, `difficulty`   instruction.md, task.toml: `[metadata]`, `[verifier]`
Dockerfile, beside the files it copies    environment/Dockerfile, beside them
run-tests.sh   judges by its exit code    tests/test.sh   writes /logs/verifier/reward.txt or reward.json
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
"""What Harbor's verifier may take unless the task says otherwise, and the most that it may take here."""


@dataclass(frozen=True, slots=True)
class BenchLayout:
    """A task as its folder lays it out.

    `context` is the folder that the Dockerfile copies from. `script` judges if no tests of pytest do, in the
    time `timeout_s`. `needs` are the reasons why the task cannot run without a container.
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
        """Names in the context that are never among the files of the beginning."""
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
        said = yaml.safe_load((place / "task.yaml").read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{place / 'task.yaml'} cannot be read: {error}.", "Mend the file.") from error
    if not isinstance(said, dict):
        raise ConfigError(f"{place / 'task.yaml'} is not a mapping.", "Mend the file.")
    text = said.get("instruction") or _described(said.get("descriptions"))
    return BenchLayout(
        text if isinstance(text, str) else "",
        str(said.get("category") or "bench"),
        str(said.get("difficulty")),
        place,
        place / "run-tests.sh",
        place / "solution.sh",
    )


def _described(said: object) -> object:
    """The description with the key `base`, or the first one."""
    if not isinstance(said, list):
        return None
    found = {str(one.get("key")): one.get("description") for one in said if isinstance(one, dict)}
    return found.get("base") or next(iter(found.values()), None)


def _harbor(place: Path) -> BenchLayout:
    try:
        said = tomllib.loads((place / "task.toml").read_text("utf-8"))
        told = place / "instruction.md"
        text = told.read_text("utf-8") if told.is_file() else ""
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{place / 'task.toml'} cannot be read: {error}.", "Mend the file.") from error
    metadata, verifier, environment = (_table(said, key) for key in ("metadata", "verifier", "environment"))
    timeout_s = verifier.get("timeout_sec", _HARBOR_TIMEOUT_S)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise ConfigError(f"{place / 'task.toml'}: verifier.timeout_sec is {timeout_s!r}.", "Mend the file.")
    return BenchLayout(
        text,
        str(metadata.get("category") or "bench"),
        str(metadata.get("difficulty")),
        place / "environment",
        place / "tests/test.sh",
        place / "solution/solve.sh",
        min(float(timeout_s), _HARBOR_TIMEOUT_S),
        tuple(_needs(place, said, environment)),
    )


def _needs(place: Path, said: Mapping[str, object], environment: Mapping[str, object]) -> list[str]:
    """What only a container could have."""
    folder, found = place / "environment", list[str]()
    if said.get("steps"):
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


def _table(said: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = said.get(key)
    return value if isinstance(value, dict) else {}
