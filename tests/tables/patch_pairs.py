"""Patches: (text, oracle, value). ACCEPTED have 1, REJECTED are in the wrong format."""

from difflib import SequenceMatcher

from ludus.rewards.code.patches import Patch


def diff(path, *lines, at=1):
    """A patch of one file with one hunk, its counts worked out."""
    old = sum(line[0] in " -" for line in lines)
    new = sum(line[0] in " +" for line in lines)
    body = "\n".join(lines)
    return f"--- a/{path}\n+++ b/{path}\n@@ -{at},{old} +{at},{new} @@\n{body}\n"


ONE = diff("a.py", " def f():", "-    return 1", "+    return 2")
OTHER = diff("b.py", "-x = 1", "+x = 2", at=9)
NEW = "--- /dev/null\n+++ b/new.py\n@@ -0,0 +1,2 @@\n+x = 1\n+y = 2\n"
GONE = "--- a/old.py\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-x = 1\n-y = 2\n"
GIT = f"diff --git a/a.py b/a.py\nindex 123..456 100644\n{ONE}"
NO_NEWLINE = "\\ No newline at end of file\n"
BARE_END = f"--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x\n{NO_NEWLINE}+y\n{NO_NEWLINE}"
SHORT_HEADER = "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x\n+y\n"
FENCES = diff("a.md", "-```", "+```python")
P_ONE, P_BOTH = Patch(ONE), Patch(ONE + OTHER)

ACCEPTED = [
    (ONE, P_ONE),
    (ONE.rstrip("\n"), P_ONE),
    (f"\n\n{ONE}\n\n", P_ONE),
    (GIT, P_ONE),
    (ONE, Patch(GIT)),
    (f"```diff\n{ONE}```", P_ONE),
    (f"```\n{ONE}```\n", P_ONE),
    (f"Here is the patch:\n\n```diff\n{ONE}```\nIt returns 2.", P_ONE),
    (f"The patch:\n- it is short\n```diff\n{ONE}```\n- done", P_ONE),
    (ONE.replace("a/", "").replace("b/", ""), P_ONE),
    (ONE.replace("@@\n", "@@ class C:\n"), P_ONE),
    (ONE.replace("--- a/a.py", "--- a/a.py\t2024-01-01"), P_ONE),
    (f"{ONE}-- \n2.39.0\n", P_ONE),
    (ONE + OTHER, P_BOTH),
    (OTHER + ONE, P_BOTH),
    (NEW, Patch(NEW)),
    (GONE, Patch(GONE)),
    (BARE_END, Patch(BARE_END)),
    (SHORT_HEADER, Patch(SHORT_HEADER)),
    (FENCES, Patch(FENCES)),
    (ONE.replace("\n", "\r\n"), P_ONE),
]
REJECTED = [
    ("", P_ONE),
    ("I would return 2.", P_ONE),
    ("return 2", P_ONE),
    ("-    return 1\n+    return 2", P_ONE),
    ("--- a/a.py\n+++ b/a.py\n", P_ONE),
    ("--- a/a.py\n", P_ONE),
    ("@@ -1,2 +1,2 @@\n-x\n+y\n", P_ONE),
    (ONE.replace("+++ b/a.py\n", ""), P_ONE),
    (ONE.replace("-1,2", "-1,3"), P_ONE),
    (ONE.replace("+1,2", "+1,1"), P_ONE),
    (ONE.replace("@@ -1,2 +1,2 @@", "@@"), P_ONE),
    (ONE.replace("@@ -1,2 +1,2 @@", "@@ ... @@"), P_ONE),
    (ONE.replace("@@ -1,2 +1,2 @@\n", ""), P_ONE),
    (ONE.replace("-    return 1\n", ""), P_ONE),
    (f"{ONE}+    return 3\n", P_ONE),
    (f"{ONE} and so on", P_ONE),
    (ONE.replace("-    return 1\n+    return 2", "     return 1\n     return 2"), P_ONE),
    (f"```diff\n{ONE}- and more\n```\n```diff\n{OTHER}```", P_ONE),
    ("<<<<<<< SEARCH\n1\n=======\n2\n>>>>>>> REPLACE", P_ONE),
    ("```python\ndef f():\n    return 2\n```", P_ONE),
    ("x" * 500_000, P_ONE),
    (ONE.replace("-1,2", "-1,99999999999999"), P_ONE),
]


def ratio(one, other):
    return SequenceMatcher(None, one, other, autojunk=False).ratio()


CHANGE = "@@ -1,2 +1,2 @@\n def f():\n-    return 1\n+    return 2"
BETWEEN = [
    (OTHER, P_ONE, 0.0),
    (ONE, P_BOTH, 0.5),
    (ONE + OTHER, P_ONE, 0.5),
    (ONE.replace("a.py", "c.py"), P_ONE, 0.0),
    (ONE.replace("return 2", "return 3"), P_ONE, 1 - 1 / len(CHANGE)),
    (
        ONE.replace("-    return 1\n+    return 2", "+    return 2\n-    return 1"),
        P_ONE,
        ratio(CHANGE.replace("-    return 1\n+    return 2", "+    return 2\n-    return 1"), CHANGE),
    ),
    (ONE.replace("@@ -1,2 +1,2 @@", "@@ -2,2 +2,2 @@"), P_ONE, 1 - 2 / len(CHANGE)),
]
