"""Make the data of the environment `swe`.

    python -m generators.swe fetch FOLDER NAME[==VERSION] ...
    python -m generators.swe bugs FOLDER ARCHIVE ... [--wanted 20] [--tries 60] [--seed 0]
    python -m generators.swe assemble FOLDER CATALOGUE --validation NAME ... --test NAME ...
    python -m generators.swe describe FOLDER CATALOGUE
    python -m generators.swe check FOLDER CATALOGUE

FOLDER holds source distributions and the bugs found in each, one file of JSON lines per package; a package whose file
exists is not mined again. `assemble` writes the catalogue of them all. `describe` runs the tests of the bugs of a
catalogue again and rewrites its levels, issues and survey. `check` grades the alternative repairs of its tasks: right
ones that differ from the solver's. The shipped catalogue is src/ludus/worlds/swe/data, and `ludus env prepare swe`
fetches its archives to ~/.cache/ludus/swe.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from generators.swe.alternative_solutions import other_repairs
from generators.swe.assemble import assemble, describe_all
from generators.swe.mine import Plan, mine, save_found

from ludus.envs.sources import download
from ludus.sandbox import open_sandbox
from ludus.worlds.swe.grader import SECONDS, grade
from ludus.worlds.swe.tasks import case_of, load_catalogue


def arguments() -> argparse.Namespace:
    """Return the arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m generators.swe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="act", required=True)
    fetching, mining, assembling, describing, checking = (
        commands.add_parser(name) for name in ("fetch", "bugs", "assemble", "describe", "check")
    )
    for command in (fetching, mining, assembling, describing, checking):
        command.add_argument("folder", type=Path)
    fetching.add_argument("packages", nargs="+")
    mining.add_argument("archives", nargs="+", type=Path)
    for name, value in (("wanted", Plan.wanted), ("tries", Plan.tries), ("seed", Plan.seed)):
        mining.add_argument(f"--{name}", type=int, default=value)
    for command in (assembling, describing, checking):
        command.add_argument("catalogue", type=Path)
    assembling.add_argument("--validation", nargs="*", default=[])
    assembling.add_argument("--test", nargs="*", default=[])
    return parser.parse_args()


def main() -> None:
    """Run the command."""
    given = arguments()
    if given.act == "fetch":
        for requirement in given.packages:
            print(download(requirement, given.folder))
    elif given.act == "bugs":
        mine_all(given.folder, given.archives, Plan(given.wanted, given.tries, given.seed))
    elif given.act == "assemble":
        print(assemble(given.folder, given.catalogue, {"validation": given.validation, "test": given.test}))
    elif given.act == "describe":
        print(asyncio.run(describe_all(given.catalogue, given.folder)))
    else:
        print(asyncio.run(check(given.folder, given.catalogue)))


def mine_all(folder: Path, archives: Sequence[Path], plan: Plan) -> None:
    """Mine packages one after the other, except those that have been mined."""
    for archive in archives:
        target = folder / f"{archive.name.removesuffix('.tar.gz')}.jsonl"
        if not target.exists():
            save_found(target, archive, *asyncio.run(mine(archive, plan, print)))


async def check(folder: Path, catalogue: Path) -> str:
    """Grade the alternative repairs of all tasks; `folder` has the archives."""
    held, sandbox = load_catalogue(catalogue), open_sandbox()
    refused, num = [], 0
    for bug in held.bugs:
        problem = case_of(bug, held.packages[bug.package], folder, SECONDS).load()
        for texts in other_repairs(problem):
            tree = {**problem.shown, **{path: text.encode() for path, text in texts.items()}}
            found = await grade(sandbox, problem, tree)
            refused += [] if all(found.passed.values()) else [f"{bug.id}: {found.doubt or 'tests fail'}"]
            num += 1
    await sandbox.close()
    return "\n".join([f"{num - len(refused)} of {num} alternative repairs pass", *refused])


if __name__ == "__main__":
    main()
