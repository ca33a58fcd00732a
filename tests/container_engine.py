"""A fake Docker or Podman that runs the inner command of `docker run` in bubblewrap."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ENGINE = r"""#!{python}
import json, os, signal, sys
from itertools import pairwise
from pathlib import Path

given, names = sys.argv[1:], Path("{folder}", "names")
with open("{folder}/log", "a") as log:
    print(json.dumps(given), file=log)
if given[0] == "rm":
    os.kill(int((names / given[-1]).read_text()), signal.SIGKILL)
if given[0] == "run":
    own, inner = given[: given.index("image")], given[given.index("image") + 1 :]
    names.mkdir(exist_ok=True)
    (names / own[own.index("--name") + 1]).write_text(str(os.getpid()))
    {instead}
    words = "--unshare-all --as-pid-1 --cap-drop ALL --clearenv --setenv PATH /usr/bin --ro-bind /usr /usr "
    words += "--symlink usr/lib /lib --symlink usr/lib64 /lib64 --symlink usr/bin /bin --proc /proc "
    words = [*words.split(), "--dev", "/dev"]
    for option, value in pairwise(own):
        if option == "--env":
            words += ["--setenv", *value.split("=")]
        if option == "--tmpfs":
            words += ["--tmpfs", value.partition(":")[0]]
        if option == "--workdir":
            words += ["--chdir", value]
    os.execvp("bwrap", ["bwrap", *words, *inner])
"""


def put_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, instead: str = "pass", name: str = "docker") -> Path:
    """Put the fake engine first on PATH; return the file to which it logs its arguments, one JSON list per line.

    `instead` is code that runs before the command, or replaces it. The only image is `image`.
    """
    log = folder / "log"
    log.touch()
    script = folder / name
    script.write_text(ENGINE.format(python=sys.executable, folder=folder, instead=instead))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log
