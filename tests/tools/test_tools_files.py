"""Files and patches in the folder of a sandbox session, with the real sandbox."""

import difflib
import random
import shutil
import subprocess

import pytest

from ludus.sandbox.base import Limits, Snapshot
from ludus.tools.base import ToolError
from ludus.tools.files import apply_patch_tool, files_tools, lines_of, patched_files, path_of, read_patch, replaced
from ludus.types import ToolStatus
from tests.tools.test_tools_sandbox import ask, inside

FILES = {"a.py": b"one\ntwo\nthree\n", "d/b.py": b"import os\n", "raw": b"\xff\xfe"}


def test_files_are_listed_read_written_edited_and_searched():
    async def act(_, workspace):
        tools = {tool.name: tool for tool in files_tools(workspace)}
        await workspace.run("import os; os.symlink('/etc/hostname', 'link'); os.chmod('a.py', 0o755)")
        steps = (
            ("list_files", {}),
            ("list_files", {"pattern": "*.py"}),
            ("read_file", {"path": "/box/a.py"}),
            ("read_file", {"path": "./a.py", "first": 2, "last": 9}),
            ("write_file", {"path": "new/c.txt", "text": "größe\n"}),
            ("edit_file", {"path": "a.py", "old": "two\n", "new": "2\n"}),
            ("search_files", {"pattern": "^(2|größe|import .*)$"}),
            ("search_files", {"pattern": "nowhere", "files": "*.py"}),
        )
        said = [await ask(tools[name], **arguments) for name, arguments in steps]
        inside_it = await workspace.run("import os; print(open('a.py').read(), os.access('a.py', os.X_OK))")
        return said, inside_it.text

    said, inside_it = inside(act, files=FILES)
    assert [text for status, text in said if status is ToolStatus.OK] == [
        "a.py (14)\nd/b.py (10)\nraw (2)",
        "a.py (14)\nd/b.py (10)",
        "one\ntwo\nthree\n",
        "[lines 2 to 3 of 3]\ntwo\nthree",
        "wrote new/c.txt",
        "edited a.py",
        "a.py:2: 2\nd/b.py:1: import os\nnew/c.txt:1: größe",
        "[no match in 2 files]",
    ]
    assert inside_it == "one\n2\nthree\n True\n"


def test_errors_of_files_are_reported():
    async def act(_, workspace):
        tools = {tool.name: tool for tool in files_tools(workspace)}
        await workspace.run("import os; os.symlink('/tmp', 'out')")
        steps = (
            ("read_file", {"path": "../etc/passwd"}, "is not a path in the working folder"),
            ("write_file", {"path": "d/" * 33 + "x", "text": ""}, "at most 32 folders deep"),
            ("read_file", {"path": "/etc/passwd"}, "is not a path in the working folder"),
            ("read_file", {"path": "b.py"}, "Did you mean d/b.py?"),
            ("read_file", {"path": "d"}, "Did you mean d/b.py?"),
            ("read_file", {"path": "raw"}, "no UTF-8 text"),
            ("read_file", {"path": "a.py", "first": 4}, "the file has 3"),
            ("write_file", {"path": "out/x", "text": ""}, "link"),
            ("edit_file", {"path": "a.py", "old": "e", "new": ""}, "more than once"),
            ("edit_file", {"path": "a.py", "old": "four", "new": ""}, "does not occur"),
            ("search_files", {"pattern": "("}, "missing ), unterminated subpattern"),
            ("search_files", {"pattern": "(a+)+b"}, "took longer than 2 s"),
        )
        return [(await ask(tools[name], **arguments), words) for name, arguments, words in steps]

    limits = Limits(wall_s=2, files_out=50)
    for (status, text), words in inside(act, files={**FILES, "long": b"a" * 60}, limits=limits):
        assert (status, words in text) == (ToolStatus.RAISED, True) or words == "link", text
        assert status is ToolStatus.RAISED


def test_too_many_files_are_reported_and_the_session_continues():
    async def act(_, workspace):
        tools = {tool.name: tool for tool in files_tools(workspace)}
        await workspace.run("x = 5\nfor n in range(4): open(f'f{n}', 'w').close()")
        return await ask(tools["list_files"]), (await workspace.run("x")).text

    (status, text), kept = inside(act, limits=Limits(files_out=3))
    assert (status, kept) == (ToolStatus.RAISED, "5\n")
    assert "exceed its limits" in text


@pytest.mark.parametrize(("first", "last"), [(0, None), (3, 2), (5, 9)])
def test_line_range_outside_the_file_raises(first, last):
    with pytest.raises(ToolError, match="there are no lines"):
        lines_of("a\nb\n", first, last)


def test_overlapping_matches_count_as_more_than_one():
    with pytest.raises(ToolError, match="more than once"):
        replaced("aaa", "aa", "b")


@pytest.mark.parametrize("path", ["", "/", "..", "a/../../b", "a\0b", "/box", "/boxes/a", "a/"])
def test_paths_outside_the_working_folder_raise(path):
    with pytest.raises(ToolError):
        path_of(path)


# patches


def diff(before, after, name="f", context=3):
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", n=context)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def test_difflib_patches_produce_the_new_text():
    rng = random.Random(1)
    for _ in range(300):
        before = "".join(f"{rng.randrange(6)}\n" for _ in range(rng.randrange(1, 25)))
        after = "".join(
            line if rng.random() < 0.8 else rng.choice(["", "new\n", line + "x\n"])
            for line in before.splitlines(keepends=True)
        )
        before, after = (text[: -1 if rng.random() < 0.3 else None] for text in (before, after))
        if before == after or not after or not before:
            continue
        for context in (0, 1, 3):
            given = read_patch(diff(before, after, context=context))
            made = patched_files(Snapshot({"f": before.encode()}), given).files
            assert made == {"f": after.encode()}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git to write patches")
def test_git_patch_creates_changes_and_removes_files(tmp_path):
    def git(*words):
        who = ["-c", "user.name=n", "-c", "user.email=e"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True)

    git("init", "-q")
    (tmp_path / "old").write_text("1\n2\n")
    (tmp_path / "kept").write_text("a\nb\nc")
    git("add", "-A")
    git("commit", "-qm", "x")
    (tmp_path / "old").unlink()
    (tmp_path / "kept").write_text("a\nB\nc")
    (tmp_path / "new").write_text("n\n\n")
    git("add", "-A")
    patch = git("diff", "--cached", "--no-renames").stdout

    async def act(_, workspace):
        said = await ask(apply_patch_tool(workspace), patch=patch)
        return said, await workspace.snapshot()

    said, after = inside(act, files={"old": b"1\n2\n", "kept": b"a\nb\nc"})
    assert said == (ToolStatus.OK, "changed kept\nmade new\nremoved old")
    assert after.files == {"kept": b"a\nB\nc", "new": b"n\n\n"}


TEXT = "def f():\n    return 1\n\n\ndef g():\n    return 1\n"


def patch_of(head, *lines, name="f"):
    return "\n".join([f"--- a/{name}", f"+++ b/{name}", head, *lines]) + "\n"


def test_hunk_with_wrong_line_number_is_applied_at_the_only_match():
    patch = patch_of("@@ -9,1 +9,1 @@", "-def f():", "+def h():") + "@@ -10,1 +10,1 @@\n-    return 1\n+    return 2\n"
    made = patched_files(Snapshot({"f": TEXT.encode()}), read_patch(patch)).files
    assert made["f"].decode() == TEXT.replace("f()", "h()").replace("return 1", "return 2", 1)


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ("no diff", "this is not a unified diff"),
        (patch_of("@@ -3,1 +3,1 @@", "-    return 1", "+    return 2"), "fits at several places"),
        (patch_of("@@ -1,1 +1,1 @@", "-def x():", "+def y():"), "does not fit"),
        (patch_of("@@ -1,1 +1,1 @@", "-def f()", "+def y():"), "does not fit"),
        (patch_of("@@ -1,2 +1,1 @@", "-def f():", "+def y():"), "says 2 old and 1 new lines, and has 1 and 1"),
        (patch_of("@@ 1 @@", "-def f():"), "is not a hunk header"),
        (patch_of("@@ -99,0 +99,1 @@", "+more"), "does not have"),
        (patch_of("@@ -1 +1 @@", "-a", "+b", name="../x"), "is not a path in the working folder"),
        (patch_of("@@ -1 +1 @@", "-a", "+b", name="none"), "there is no file 'none'"),
        ("--- /dev/null\n+++ b/f\n@@ -0,0 +1,1 @@\n+x\n", "already exists"),
        ("--- a/f\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-def f():\n", "does not hold all of its lines"),
        ("--- a/f\n+++ b/f\n", "without a hunk"),
        ("@@ -1 +1 @@\n-a\n+b\n", "before it"),
        ("rename from f\nrename to g\n", "are not applied"),
    ],
)
def test_invalid_patch_raises_with_the_reason(patch, words):
    with pytest.raises(ToolError) as caught:
        patched_files(Snapshot({"f": TEXT.encode()}), read_patch(patch))
    assert words in str(caught.value)


SCENE = """
git init -q . && git config user.email a@b && git config user.name a && printf 'one\n' > old.txt
git add old.txt && git commit -qm first && git gc -q && mkdir -p empty sub shut && ln -s old.txt link
mkfifo pipe; printf 'x' > shut/secret; chmod 600 shut/secret; chmod 751 shut
printf 'deep' > $(mkdir -p $(printf 'd/%.0s' $(seq 36)); printf 'd/%.0s' $(seq 36))file
cd sub; printf 'here\n' > here.txt
"""
LOOK = "cat here.txt; cd ..; git fsck && git status --short old.txt new.txt; ls -ld empty | cut -c1; "
LOOK += "readlink link; test -p pipe && stat -c %a shut/secret shut; cat $(printf 'd/%.0s' $(seq 36))file"


def test_patch_that_moves_a_file_leaves_other_files_unchanged():
    async def act(_, workspace):
        await workspace.run(SCENE)
        moves = patch_of("@@ -1 +1 @@", "-one", "+two", name="old.txt").replace("+++ b/old", "+++ b/new")
        said = await apply_patch_tool(workspace).function(patch=moves)
        return said, await workspace.run(LOOK), await workspace.run("cat new.txt; ls old.txt")

    said, looked, moved = inside(act, kind="shell")
    assert said == "moved old.txt to new.txt"
    told = [" D old.txt", "?? new.txt", "d", "old.txt", "600", "751", "deep"]
    assert (looked.text.splitlines(), looked.exit) == (["here", *told], 0)
    assert (moved.text, moved.exit) == ("two\n", 2)


def test_a_moved_program_stays_executable():
    patch = "--- a/f\n+++ b/g\n@@ -1 +1 @@\n-a\n+b\n"
    after = patched_files(Snapshot({"f": b"a\n"}, frozenset({"f"})), read_patch(patch))
    assert (after.files, after.executable) == ({"g": b"b\n"}, {"g"})
