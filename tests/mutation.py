"""Mutation testing: random single-line changes of the core, each run against the tests of its module.

    python tests/mutation.py --count 40 --seed 0            # about an hour on two cores
    python tests/mutation.py --only src/ludus/rollouts/ledger.py:120

A mutation changes one comparison, operator, constant, boolean or returned value in a function of the folders in
`CORE`, except in code that runs only on a GPU. It is applied to a copy of the repository. First run the tests of the
mirrored folder and those that name the module; if none fails, the whole default suite runs.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ("algorithms", "chat", "engines/embedded", "envs", "evaluation", "rewards", "rollouts", "sandbox/local", "tools")
CORE += tuple(f"training/{name}" for name in ("batches", "collection", "credit", "learner", "rl", "run"))
GPU_ONLY = ("src/ludus/engines/embedded/paged_kernels.py",)
LIMIT_S = 1800
OPPOSITES = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}
OPPOSITES |= {ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
OPPOSITES |= {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutation:
    """`new` in place of the characters `start` to `end` of a line."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Change the file below `root`."""
        file = root / self.path
        lines = file.read_text("utf-8").split("\n")
        text = lines[self.line - 1].encode()
        lines[self.line - 1] = (text[: self.start] + self.new.encode() + text[self.end :]).decode()
        file.write_text("\n".join(lines), "utf-8")

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.old}  ->  {self.new}"


def mutations(path: Path) -> Iterator[Mutation]:
    """Yield the mutations of the functions of a file, except in annotations, docstrings and `zip(strict=True)`."""
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    keywords = (node for node in ast.walk(tree) if isinstance(node, ast.keyword))
    strict = {keyword.value for keyword in keywords if keyword.arg == "strict"}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    new = None if node in strict else changed(node)
                    if new is not None and node.lineno == node.end_lineno:
                        old = ast.get_source_segment(text, node) or ""
                        at = (node.lineno, node.col_offset, node.end_col_offset or 0)
                        yield Mutation(path.relative_to(ROOT).as_posix(), *at, old, new)


def changed(node: ast.AST) -> str | None:
    """Return the source of a changed node, or None if there is no mutation of it."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in OPPOSITES:
            return ast.unparse(ast.Compare(node.left, [OPPOSITES[type(operator)]()], node.comparators))
        case ast.BinOp() if type(node.op) in OPPOSITES:
            return f"({ast.unparse(ast.BinOp(node.left, OPPOSITES[type(node.op)](), node.right))})"
        case ast.BoolOp():
            return f"({ast.unparse(ast.BoolOp(OPPOSITES[type(node.op)](), node.values))})"
        case ast.UnaryOp(op=ast.Not()):
            return f"bool({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            return str(not node.value)
        case ast.Constant(value=int() | float()):
            return repr(node.value + 1)
    return None


def tests_near(path: str) -> list[str]:
    """Return the test files of the mirrored folder and those that name the module."""
    module = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    folder = ROOT / "tests" / Path(path).parent.relative_to("src/ludus")
    while not folder.is_dir():
        folder = folder.parent
    files = sorted(file for file in (ROOT / "tests").rglob("test_*.py") if "swe_fixture" not in file.parts)
    named = [file for file in files if module in file.read_text("utf-8")]
    mirrored = [file for file in files if folder != ROOT / "tests" and folder in file.parents]
    return [file.relative_to(ROOT).as_posix() for file in dict.fromkeys(named + mirrored)]


def killed(mutation: Mutation) -> str:
    """Return which tests failed with the mutation: "near", "suite", "timeout", or "" if none did."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", ".bench", "runs", ".*_cache"))
        mutation.apply(copy)
        near = tests_near(mutation.path)
        try:
            if near and fails(copy, near):
                return "near"
            return "suite" if fails(copy, ["tests"]) else ""
        except subprocess.TimeoutExpired:
            return "timeout"


def fails(root: Path, tests: list[str]) -> bool:
    """Return whether a test fails. Raises TimeoutExpired if the tests do not end within `LIMIT_S`."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    deselected = ["--deselect", "tests/test_house.py"]
    done = subprocess.run([*command, *deselected], cwd=root, env=environment, capture_output=True, timeout=LIMIT_S)
    return done.returncode not in (0, 5)  # 5: no test was collected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="PATH:LINE: the mutations of one line")
    args = parser.parse_args()
    files = [file for folder in CORE for file in sorted((ROOT / "src/ludus" / folder).rglob("*.py"))]
    every = [mutation for file in files for mutation in mutations(file) if mutation.path not in GPU_ONLY]
    drawn = random.Random(args.seed).sample(every, args.count)
    if args.only:
        drawn = [m for m in every if f"{m.path}:{m.line}" == args.only]
    alive = 0
    with ThreadPoolExecutor(2) as pool:
        for mutation, how in zip(drawn, pool.map(killed, drawn), strict=True):
            alive += not how
            print(f"{how or 'ALIVE':6} {mutation}", flush=True)
    print(f"{len(drawn) - alive} of {len(drawn)} mutations fail a test.")
    return alive


if __name__ == "__main__":
    sys.exit(main())
