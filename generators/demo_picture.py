"""Write the pictures of the README: the demo in a terminal as an animated SVG, and its learning curve.

    python -m generators.demo_picture          # a few minutes; needs the packages pyte and matplotlib

The first records `ludus train search` in a pseudo terminal of 80 columns; the time between two frames is at most
`MAX_PAUSE_S`. The second plots the metrics of that run.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import ludus
from ludus.config.environment import child_environment

ROOT = Path(__file__).parents[1]
COLUMNS, LINES = 80, 30
EVERY_S, MAX_PAUSE_S, LAST_S = 2.0, 0.12, 8.0
"""Seconds between recorded frames, maximum seconds of a frame, and seconds of the last one."""
CHAR, LINE, MARGIN = 8.4, 18.0, 16.0
"""Size of a character cell and the margin, in pixels."""
COLOURS = {
    "default": "#d4d4d4",
    "black": "#666666",
    "red": "#f14c4c",
    "green": "#23d18b",
    "brown": "#e5e510",
    "blue": "#3b8eea",
    "magenta": "#d670d6",
    "cyan": "#29b8db",
    "white": "#e5e5e5",
}


def record(command: Sequence[str], folder: Path) -> list[list[str]]:
    """Run a command in a pseudo terminal and return screens, each a list of lines as SVG text."""
    import pyte

    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    leader, follower = pty.openpty()
    environment = child_environment({"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)})
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=follower, stdout=follower, stderr=follower, close_fds=True
    )
    os.close(follower)
    frames: list[list[str]] = []
    last = 0.0
    while True:
        ready, _, _ = select.select([leader], [], [], 0.2)
        try:
            data = os.read(leader, 65536) if ready else b""
        except OSError:  # the end of a pseudo terminal
            break
        if data:
            stream.feed(data)
        if time.monotonic() - last > EVERY_S or process.poll() is not None:
            last = time.monotonic()
            frame = list(lines_of(screen))
            if not frames or frame != frames[-1]:
                frames.append(frame)
    process.wait()
    frames.append(list(lines_of(screen)))
    return frames


def lines_of(screen: object) -> Iterator[str]:
    """Yield the lines of a screen as SVG spans, one for each run of equal colour."""
    for row in range(LINES):
        cells = [screen.buffer[row][column] for column in range(COLUMNS)]  # type: ignore[attr-defined]
        spans, start = [], 0
        for end in range(1, COLUMNS + 1):
            if end == COLUMNS or (cells[end].fg, cells[end].bold) != (cells[start].fg, cells[start].bold):
                text = "".join(cell.data for cell in cells[start:end])
                if text.strip():
                    colour = COLOURS.get(cells[start].fg, f"#{cells[start].fg}")
                    weight = ' font-weight="bold"' if cells[start].bold else ""
                    spans.append(
                        f'<tspan x="{start * CHAR:.1f}" fill="{colour}"{weight}>{escape(text.rstrip())}</tspan>'
                    )
                start = end
        yield "".join(spans)


def animate(frames: Sequence[Sequence[str]]) -> str:
    """Return an SVG that shows the frames in turn, endlessly."""
    duration = MAX_PAUSE_S * (len(frames) - 1) + LAST_S
    width, height = COLUMNS * CHAR + 2 * MARGIN, LINES * LINE + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" xml:space="preserve">',
        '<rect width="100%" height="100%" rx="8" fill="#1e1e1e"/>',
        "<style>text{font:14px ui-monospace,Menlo,Consolas,monospace}g.f{visibility:hidden}</style>",
    ]
    for i, frame in enumerate(frames):
        begin, end = i * MAX_PAUSE_S / duration, (i + 1) * MAX_PAUSE_S / duration
        if i == len(frames) - 1:
            times, values = f"0;{begin:.5f};1", "hidden;visible;visible"
        elif i == 0:
            times, values = f"0;{end:.5f};1", "visible;hidden;hidden"
        else:
            times, values = f"0;{begin:.5f};{end:.5f};1", "hidden;visible;hidden;hidden"
        parts.append(
            f'<g class="f"><animate attributeName="visibility" calcMode="discrete" repeatCount="indefinite" '
            f'dur="{duration:.2f}s" keyTimes="{times}" values="{values}"/>'
        )
        for row, spans in enumerate(frame):
            if spans:
                y = MARGIN + (row + 1) * LINE - 4
                parts.append(f'<text transform="translate({MARGIN:.0f} {y:.0f})">{spans}</text>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Record the demo and write both pictures."""
    command = shutil.which("ludus", path=str(Path(sys.executable).parent)) or "ludus"
    out = ROOT / "docs" / "start"
    with tempfile.TemporaryDirectory() as folder:
        frames = record([command, "train", "search", "--evaluation.tasks", "512", *sys.argv[1:]], Path(folder))
        (out / "demo.svg").write_text(animate(frames), "utf-8")
        figure = ludus.load(Path(folder) / "runs" / "search-1").plot()
        figure.savefig(out / "learning_curve.svg", metadata={"Date": None})
    text = (out / "learning_curve.svg").read_text("utf-8")
    (out / "learning_curve.svg").write_text(re.sub(r"[ \t]+$", "", text, flags=re.M), "utf-8")


if __name__ == "__main__":
    main()
