"""The house rules, checked with `ast`.

A finding is written `path:name rule`, where name is the dotted name of the function or class in its file, or
`module`. `house_exceptions.txt` lists the allowed findings, one per line, with the reason after a `#`; it may only
shrink. Each rule has a snippet below that violates it.
"""

import ast
import gc
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXCEPTIONS = Path(__file__).parent / "house_exceptions.txt"
NUM_EXCEPTIONS = 0
"""Number of findings in the exceptions file. Lower it if one is removed."""
ESCAPES = {"Any": 27, "type: ignore": 6, "noqa": 8}
"""Maximum uses of escape hatches of the checkers in the package. Lower these if the counts fall."""

FUNCTION_LINES, PARAMETERS, BRANCHES = 60, 6, 10
FOLDER_MODULES = 15
CLASS_LINES, FILE_LINES, CONFIG_FIELDS = 300, 600, 20

ORDER = (
    *(
        "types",
        "errors",
        "images",
        "plugins",
        "ipc",
        "untrusted",
        "recipes",
        "config",
        "sandbox",
        "tools",
        "chat",
        "engines",
        "rewards",
        "envs",
        "worlds",
    ),
    *(
        "rollouts",
        "gateway",
        "algorithms",
        "diagnostics",
        "evaluation",
        "judges",
        "training",
        "report",
        "viewer",
        "simulator",
        "cluster",
        "cli",
        "api",
        "__main__",
    ),
)
"""A folder of the package may import only from itself and from earlier ones."""

ENVIRONMENT_MODULE = "src/ludus/config/environment.py"
"""The only module that may read environment variables."""

FOREIGN = {
    "a path of one machine": r"(?<![\w.])/(work|tmp/[w])\b",
    "the number of an issue": r"(?i)\bissues? #",
    "a package registry": r"(?i)\b(pypi\.org|pythonhosted\.org|npmjs\.(org|com)|crates\.io)\b",
}
SPOKEN = ("src/**/*", "docs/**/*", "examples/**/*", "benchmarks/**/*", "*.md", "Makefile", "pyproject.toml")

Function = ast.FunctionDef | ast.AsyncFunctionDef
DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
READ = (
    *DEFINING,
    *(ast.Import, ast.ImportFrom, ast.Name, ast.Attribute, ast.Call, ast.Compare, ast.Match, ast.ExceptHandler),
)
"""Kinds of nodes that a rule looks at."""
BRANCHING = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


@dataclass(frozen=True)
class Module:
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def in_package(self) -> bool:
        return self.path.startswith("src/ludus/")

    @property
    def folder(self) -> str:
        """The folder of the module in the package; empty for the package's `__init__`."""
        first = self.path.removeprefix("src/ludus/").split("/")[0].removesuffix(".py")
        return "" if first == "__init__" else first

    @cached_property
    def definitions(self) -> list[tuple[str, Function | ast.ClassDef]]:
        """Functions and classes by dotted name."""
        return [(name, node) for name, node in self.nodes if isinstance(node, DEFINING)]

    @cached_property
    def nodes(self) -> list[tuple[str, ast.AST]]:
        """Nodes of the kinds `READ` with the name of their enclosing definition ("module" outside); definitions with
        their own.
        """
        found: list[tuple[str, ast.AST]] = []
        pending: list[tuple[str, ast.AST]] = [("", self.tree)]
        while pending:
            name, node = pending.pop()
            for child in children(node):
                inner = name
                if isinstance(child, READ):
                    if isinstance(child, DEFINING):
                        inner = f"{name}.{child.name}" if name else child.name
                    found.append((inner or "module", child))
                pending.append((inner, child))
        return found


def children(node: ast.AST) -> list[ast.AST]:
    """Return the child nodes that have children or names; a faster `ast.iter_child_nodes`."""
    found: list[ast.AST] = []
    for value in vars(node).values():
        if isinstance(value, list):
            found += [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
            found.append(value)
    return found


@dataclass(frozen=True)
class Finding:
    place: str
    detail: str = ""


@pytest.fixture(scope="module", autouse=True)
def uncollected_trees() -> Iterator[None]:
    """The syntax trees, millions of objects and none of them garbage, are freed before the tests of other files."""
    gc.disable()
    yield
    gc.enable()
    modules.cache_clear()


@cache
def modules() -> list[Module]:
    files = [
        f for top in ("src/ludus", "examples", "benchmarks", "generators") for f in sorted(ROOT.glob(f"{top}/**/*.py"))
    ]
    return [Module(f.relative_to(ROOT).as_posix(), f.read_text(encoding="utf-8")) for f in files]


def functions(module: Module) -> Iterator[tuple[str, Function]]:
    return ((name, node) for name, node in module.definitions if isinstance(node, Function))


def classes(module: Module) -> Iterator[tuple[str, ast.ClassDef]]:
    return ((name, node) for name, node in module.definitions if isinstance(node, ast.ClassDef))


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes under `node`, except those of functions and classes defined in it."""
    pending = [node]
    while pending:
        inner = [child for child in children(pending.pop()) if not isinstance(child, DEFINING)]
        yield from inner
        pending += inner


def everywhere(module: Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes that are no definitions, with the name of their enclosing definition."""
    return ((name, node) for name, node in module.nodes if not isinstance(node, DEFINING))


def num_lines(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def over(place: str, count: int, most: int) -> list[Finding]:
    return [Finding(place, f"{count}, at most {most}")] if count > most else []


def function_lines(module: Module) -> Iterator[Finding]:
    for name, node in functions(module):
        yield from over(name, num_lines(node), FUNCTION_LINES)


def is_gpu_kernel(node: Function) -> bool:
    """Whether a function is compiled by Triton, where arguments are addresses and sizes without Python types."""
    return any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)


def parameters(module: Module) -> Iterator[Finding]:
    for name, node in functions(module):
        if is_gpu_kernel(node):
            continue
        spec = node.args
        named = [a.arg for a in [*spec.posonlyargs, *spec.args] if a.arg not in ("self", "cls")]
        named += [a.arg for a in (spec.vararg, spec.kwarg) if a]
        # Pure tensor functions take tensors by name; a record of tensors would hide which ones they read.
        if module.folder != "algorithms":
            named += [a.arg for a in spec.kwonlyargs]
        yield from over(name, len(named), PARAMETERS)


def branches(module: Module) -> Iterator[Finding]:
    for name, node in functions(module):
        yield from over(name, sum(isinstance(inner, BRANCHING) for inner in own_nodes(node)), BRANCHES)


def class_lines(module: Module) -> Iterator[Finding]:
    for name, node in classes(module):
        yield from over(name, num_lines(node), CLASS_LINES)


def file_lines(module: Module) -> Iterator[Finding]:
    yield from over("module", module.text.count("\n"), FILE_LINES)


def config_fields(module: Module) -> Iterator[Finding]:
    for name, node in classes(module):
        if module.folder == "config" or name.endswith("Config"):
            yield from over(name, sum(isinstance(item, ast.AnnAssign) for item in node.body), CONFIG_FIELDS)


def annotations(module: Module) -> Iterator[Finding]:
    for name, node in functions(module) if module.in_package else ():
        spec = node.args
        named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *(a for a in (spec.vararg, spec.kwarg) if a)]
        bare = [a.arg for a in named if a.annotation is None and a.arg not in ("self", "cls")]
        if (bare or node.returns is None) and not is_gpu_kernel(node):
            yield Finding(name, ", ".join(bare) or "the result")


def imports(module: Module) -> Iterator[Finding]:
    if not module.in_package:
        return
    if module.folder and module.folder not in ORDER:
        yield Finding("module", f"{module.folder} has no place in ORDER")
        return
    allowed = ORDER[: ORDER.index(module.folder) + 1] if module.folder else ("api",)
    for place, node in everywhere(module):
        for target in imported(node):
            if target not in allowed:
                yield Finding(place, f"{module.folder or 'ludus'} imports {target}")


def imported(node: ast.AST) -> Iterator[str]:
    """Yield the folders of the package that a statement imports from."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        top = "." * node.level + (node.module or "")
        names = [f"ludus.{alias.name}" for alias in node.names] if top == "ludus" else [top]
    for name in names:
        if name.startswith("."):
            yield f"by a relative path ({name})"
        elif name.startswith("ludus.") and name != "ludus.__version__":
            yield name.split(".")[1]


def attribute_guesses(module: Module) -> Iterator[Finding]:
    """Types of the package declare their attributes, so `getattr` and `hasattr` are not needed."""
    for place, node in everywhere(module):
        if isinstance(node, ast.Call) and called(node) in ("getattr", "hasattr"):
            yield Finding(place, f"line {node.lineno}")


def environment_reads(module: Module) -> Iterator[Finding]:
    for place, node in everywhere(module) if module.path != ENVIRONMENT_MODULE else ():
        reads = (
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and ast.unparse(node.value) == "os"
        )
        pulls = isinstance(node, ast.ImportFrom) and node.module == "os"
        if reads or (pulls and {a.name for a in node.names} & {"environ", "getenv"}):
            yield Finding(place, f"line {node.lineno}")


def broad_excepts(module: Module) -> Iterator[Finding]:
    """A handler of all exceptions raises again, or its line has a comment `# boundary: reason`."""
    lines = module.text.splitlines()
    for place, node in everywhere(module):
        if isinstance(node, ast.Call) and called(node) == "suppress" and any(map(is_broad, node.args)):
            yield Finding(place, f"line {node.lineno}")
        if not isinstance(node, ast.ExceptHandler) or not (node.type is None or is_broad(node.type)):
            continue
        head = "\n".join(lines[node.lineno - 1 : node.body[0].lineno])
        excused = any(isinstance(inner, ast.Raise) for inner in own_nodes(node))
        if node.type is None or not (excused or re.search(r"#.*\bboundary: *\S", head)):
            yield Finding(place, f"line {node.lineno}")


def is_broad(caught: ast.expr) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def import_work(module: Module) -> Iterator[Finding]:
    """A module only defines names; it may also add dict literals to a registry."""
    for statement in module.tree.body:
        if not is_definition(statement):
            yield Finding("module", f"line {statement.lineno}: {ast.unparse(statement).splitlines()[0][:60]}")


def is_definition(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return True
        case ast.Assign(value=value) | ast.AnnAssign(value=value):
            reads = {"open", "read_text", "read_bytes", "load", "loads", "run", "import_module"}
            return not any(isinstance(n, ast.Call) and called(n) in reads for n in ast.walk(value or statement))
        case ast.Expr(value=ast.Call(args=[_, *_] as given, keywords=[])):
            return all(isinstance(argument, ast.Dict) for argument in given)
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.If(test=test):
            return ast.unparse(test) in ("TYPE_CHECKING", "__name__ == '__main__'")
    return False


def called(node: ast.Call) -> str:
    """Return the last part of the name of the called function; empty if it is the result of an expression."""
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


PARTS = {"advantage", "loss", "correction", "preset"}


def algorithm_names(module: Module) -> Iterator[Finding]:
    """The trainer reads the needs of a spec and never compares names of parts."""
    if not module.in_package or module.folder in ("algorithms", "config", "worlds"):
        return
    for place, node in everywhere(module):
        if isinstance(node, ast.Compare):
            compared, others = [node.left, *node.comparators], ast.walk(node)
            texts = [n.value for n in others if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        elif isinstance(node, ast.Match):
            patterns = [n for case in node.cases for n in ast.walk(case.pattern)]
            compared, texts = ([node.subject], [ast.unparse(n) for n in patterns if isinstance(n, ast.MatchValue)])
        else:
            continue
        names = {n.attr for n in compared if isinstance(n, ast.Attribute)}
        if names & PARTS and [text for text in texts if text != "none"]:
            yield Finding(place, f"line {node.lineno}: {', '.join(texts)}")


def docstrings(module: Module) -> Iterator[Finding]:
    if not module.in_package:
        return
    if ast.get_docstring(module.tree) is None:
        yield Finding("module")
    for node in module.tree.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        overload = any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)
        if ast.get_docstring(node) is None and not overload:
            yield Finding(node.name)


RULES = {
    "function-lines": function_lines,
    "parameters": parameters,
    "branches": branches,
    "class-lines": class_lines,
    "file-lines": file_lines,
    "config-fields": config_fields,
    "annotations": annotations,
    "imports": imports,
    "attribute-guesses": attribute_guesses,
    "environment-reads": environment_reads,
    "broad-excepts": broad_excepts,
    "import-work": import_work,
    "docstrings": docstrings,
    "algorithm-names": algorithm_names,
}


def exceptions() -> list[str]:
    lines = (line.partition("#")[0].strip() for line in EXCEPTIONS.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


@cache
def findings(rule: str) -> dict[str, str]:
    """Return all findings of a rule in the format of the exceptions file, with their details."""
    return {f"{m.path}:{f.place} {rule}": f.detail for m in modules() for f in RULES[rule](m)}


@pytest.mark.parametrize("rule", RULES)
def test_code_follows_the_house_rule(rule):
    broken = {entry: detail for entry, detail in findings(rule).items() if entry not in exceptions()}
    assert not broken, "\n" + "\n".join(f"{entry}  ({detail})" for entry, detail in broken.items())


def test_every_exception_is_still_needed():
    needed = {entry for rule in RULES for entry in findings(rule)}
    assert [entry for entry in exceptions() if entry not in needed] == []


def test_the_list_of_exceptions_only_shrinks():
    assert len(exceptions()) == NUM_EXCEPTIONS
    assert len(set(exceptions())) == NUM_EXCEPTIONS


def test_number_of_checker_suppressions_is_bounded():
    counts: Counter[str] = Counter()
    for module in modules():
        if module.in_package:
            counts["Any"] += sum(isinstance(n, ast.Name) and n.id == "Any" for _, n in module.nodes)
            counts["type: ignore"] += len(re.findall(r"#\s*type:\s*ignore", module.text))
            counts["noqa"] += len(re.findall(r"#\s*noqa", module.text))
    print(dict(counts))
    assert {name: n for name, n in counts.items() if n > ESCAPES[name]} == {}


PROSE = {
    "is no": (r"(?<!here )\bis no [a-z]", 3),
    "gives": (r"\b[Gg]ives?\b", 13),
    "anew": (r"\banew\b", 1),
    "of its own": (r"\bof its own\b", 1),
    "aloud": (r"\baloud\b", 0),
    "so many": (r"\b[Ss]o many\b", 0),
    "to be had": (r"\bto be had\b", 0),
}
"""Patterns to avoid, and how often docstrings may still have them. Lower these as they go."""


def test_docstrings_are_plain_english():
    nodes = (n for m in modules() if m.in_package for n in (m.tree, *(node for _, node in m.definitions)))
    text = "\n".join(ast.get_docstring(node) or "" for node in nodes)
    found = {name: len(re.findall(pattern, text)) for name, (pattern, _) in PROSE.items()}
    print(found)
    assert {name: n for name, n in found.items() if n > PROSE[name][1]} == {}


def foreign_words(text: str) -> list[str]:
    return [f"{what}: {hit[0]}" for what, pattern in FOREIGN.items() for hit in re.finditer(pattern, text)]


def test_repository_files_contain_no_foreign_words():
    found = {}
    for file in (f for pattern in SPOKEN for f in ROOT.glob(pattern)):
        if file.is_file() and file.suffix not in (".pyc", ".png", ".safetensors", ".npz", ".xz", ".zip"):
            found[str(file.relative_to(ROOT))] = foreign_words(file.read_text(encoding="utf-8", errors="replace"))
    assert found
    assert {path: words for path, words in found.items() if words} == {}


def duplicate_classes(found: Sequence[Module]) -> dict[str, list[str]]:
    """Return the names of public top-level classes that several modules define, with their modules."""
    places: dict[str, list[str]] = {}
    for module in found:
        for node in module.tree.body:
            if module.in_package and isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module.path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def test_no_public_class_name_is_used_twice():
    assert duplicate_classes(modules()) == {}
    twice = [Module(f"src/ludus/{name}.py", "class Command: ...\n") for name in ("a", "b")]
    assert duplicate_classes(twice) == {"Command": ["src/ludus/a.py", "src/ludus/b.py"]}


def test_module_count_per_folder_is_bounded():
    sizes = Counter(str(Path(m.path).parent) for m in modules() if m.in_package)
    assert {folder: n for folder, n in sizes.items() if n > FOLDER_MODULES} == {}


def crossings(found: Sequence[Module]) -> dict[str, dict[str, set[str]]]:
    """Return for each folder the imports between its sub-folders and modules, if one of the two is a sub-folder."""
    paths = {m.path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__"): m for m in found}
    edges: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for source, module in paths.items():
        for target in filter(None, (nearest_module(name, paths) for name in imported_names(module))):
            ours, theirs = source.split("/"), target.split("/")
            pairs = zip(ours, theirs, strict=False)
            shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
            if shared < min(len(ours), len(theirs)) and max(len(ours), len(theirs)) > shared + 1:
                edges["/".join(ours[:shared])][ours[shared]].add(theirs[shared])
    return edges


def imported_names(module: Module) -> Iterator[str]:
    """Yield the dotted names that a module imports, including imports in functions."""
    for _, node in everywhere(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def nearest_module(name: str, paths: Collection[str]) -> str | None:
    path = name.replace(".", "/")
    return next((one for one in (path, path.rpartition("/")[0]) if one in paths), None)


def cycles(edges: Mapping[str, set[str]]) -> set[str]:
    """Return the nodes that can reach themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            new = edges.get(left.pop(), set()) - seen
            seen |= new
            left += new
        return seen

    return {node for node in edges if node in reached(node)}


def test_every_data_file_is_in_the_wheel():
    package = ROOT / "src" / "ludus"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    shipped = {file for pattern in settings["package-data"]["ludus"] for file in package.glob(pattern)}
    data = {f for f in package.rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")}
    assert data
    assert data - shipped == set()


def test_subfolder_imports_have_no_cycles():
    edges = crossings([m for m in modules() if m.in_package])
    assert edges["ludus/training"]
    assert {folder: found for folder, inner in edges.items() if (found := cycles(inner))} == {}


def test_worlds_are_imported_only_by_the_registry():
    importers = {m.path for m in modules() if "worlds" in (t for _, n in everywhere(m) for t in imported(n))}
    assert [path for path in importers if path.startswith("src/ludus/") and "/worlds/" not in path] == []


def test_import_cycle_between_subfolders_is_detected():
    one = Module("src/ludus/rollouts/a/x.py", "from ludus.rollouts.b import y")
    two = Module("src/ludus/rollouts/b/y.py", "def f():\n    import ludus.rollouts.a.x")
    assert cycles(crossings([one, two])["ludus/rollouts"]) == {"a", "b"}
    assert cycles(crossings([one])["ludus/rollouts"]) == set()


LONG = "".join(f"    x = {n}\n" for n in range(60))
BREAKS = {
    "function-lines": f"def f():\n{LONG}",
    "parameters": "class C:\n    def f(self, a, b, c, /, d, *rest, e, **more): ...",
    "branches": "def f(a):\n" + "    if a: pass\n" * 11,
    "class-lines": "class C:\n" + "    x = 1\n" * 300,
    "file-lines": "x = 1\n" * 601,
    "config-fields": "class C:\n" + "".join(f"    x{n}: int = 1\n" for n in range(21)),
    "annotations": "def f(a: int, *b) -> int: ...",
    "imports": "def f():\n    from ludus.tools import base",
    "attribute-guesses": "def f(a):\n    return getattr(a, 'b', None)",
    "environment-reads": "import os\nHOME = os.environ['HOME']",
    "broad-excepts": "try:\n    x = 1\nexcept (ValueError, Exception):\n    x = 2",
    "import-work": "print('hello')",
    "docstrings": "class C: ...",
    "algorithm-names": "def f(a):\n    return a.algorithm.loss == 'gtpo'",
}
MORE_BREAKS = [
    ("annotations", "def f(a: int): ..."),
    ("annotations", "@jit\ndef f(a): ..."),
    ("imports", "from ludus import training"),
    ("imports", "import ludus.cli"),
    ("imports", "from . import schema"),
    ("imports", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ludus.engines.base import Engine"),
    ("environment-reads", "from os import getenv"),
    ("broad-excepts", "try:\n    x = 1\nexcept:  # boundary: none\n    raise"),
    ("broad-excepts", "try:\n    x = 1\nexcept Exception:  # boundary:\n    x = 2"),
    ("broad-excepts", "with contextlib.suppress(Exception):\n    x = 1"),
    ("import-work", "for x in range(3): pass"),
    ("import-work", "WORDS = Path('words').read_text()"),
    ("import-work", "register()"),
    ("docstrings", "'''Doc.'''\ndef f(): ..."),
    ("algorithm-names", "x = a.advantage in ('gae', 'vapo')"),
    ("algorithm-names", "match a.advantage:\n    case 'prime':\n        x = 1"),
]
KEEPS = [
    ("parameters", "class C:\n    def f(self, a, b, c, d, e, *, g): ..."),
    ("branches", "def f(a):\n" + "    if a: pass\n" * 10),
    ("imports", "from ludus import __version__\nfrom ludus.types import Task\nfrom ludus.config.schema import Config"),
    ("broad-excepts", "try:\n    x = 1\nexcept Exception as e:  # boundary: a tool's error\n    x = 2"),
    ("broad-excepts", "try:\n    x = 1\nexcept BaseException:\n    x = 2\n    raise"),
    ("broad-excepts", "try:\n    x = 1\nexcept ValueError:\n    x = 2"),
    (
        "import-work",
        "'''Doc.'''\nA = tuple(range(3))\nREGISTRY.update({'a': f})\nif __name__ == '__main__':\n    main()",
    ),
    ("docstrings", "'''Doc.'''\ndef _f(): ..."),
    ("algorithm-names", "x = a.correction != 'none' or a.loss_spec.has(Need.CLIP)"),
    ("docstrings", "'''Doc.'''\n@overload\ndef f(): ..."),
]


@pytest.mark.parametrize(("rule", "text"), [*BREAKS.items(), *MORE_BREAKS])
def test_rule_detects_violating_code(rule, text):
    assert list(
        RULES[rule](Module("src/ludus/tools/x.py" if rule == "algorithm-names" else "src/ludus/config/x.py", text))
    )


@pytest.mark.parametrize(("rule", "text"), KEEPS)
def test_rule_accepts_compliant_code(rule, text):
    assert list(RULES[rule](Module("src/ludus/config/x.py", text))) == []


def test_every_rule_has_a_violating_snippet():
    assert set(BREAKS) == set(RULES)


def test_a_tensor_function_may_take_many_tensors_by_name():
    text = "def f(a, *, b, c, d, e, g, h): ..."
    assert not list(parameters(Module("src/ludus/algorithms/x.py", text)))
    assert list(parameters(Module("src/ludus/rewards/x.py", text)))


@pytest.mark.parametrize("text", ["see /work/main", "cd /tmp/w", "as in issue #12", "from pypi.org/simple"])
def test_foreign_words_are_found(text):
    assert foreign_words(text)


@pytest.mark.parametrize("text", ["src/work/x", "/workers", "/tmp/words", "an issue with #1"])
def test_ordinary_words_are_not_foreign(text):
    assert foreign_words(text) == []
