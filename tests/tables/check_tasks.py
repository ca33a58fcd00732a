"""Tasks in the manner of HumanEval, written for these tests: helpers in the prompt, loops with random
arguments, results of several types, tolerances, and asserts that look at a result otherwise than by ==."""

MEAN = {
    "task_id": "Own/0",
    "entry_point": "mean",
    "prompt": 'def mean(xs):\n    """The mean of the numbers.\n    >>> mean([1, 2])\n    1.5\n    """\n',
    "canonical_solution": "    return sum(xs) / len(xs)\n",
    "test": (
        "def check(candidate):\n"
        "    assert abs(candidate([1, 2]) - 1.5) < 1e-6\n"
        "    assert abs(candidate([3.0, 4.0, 8.0]) - 5.0) < 1e-6\n"
    ),
}
INVERSE = {
    "task_id": "Own/1",
    "entry_point": "decode",
    "prompt": (
        "def encode(text):\n"
        '    """Rotate by a third."""\n'
        "    cut = len(text) // 3\n"
        "    return text[cut:] + text[:cut]\n\n\n"
        "def decode(text):\n"
        '    """Undo encode."""\n'
    ),
    "canonical_solution": ("    cut = len(text) - len(text) // 3\n    return text[cut:] + text[:cut]\n"),
    "test": (
        "METADATA = {}\n\n\n"
        "def check(candidate):\n"
        "    from random import choice, randint\n"
        "    import string\n"
        "    for _ in range(20):\n"
        "        text = ''.join(choice(string.ascii_lowercase) for _ in range(randint(1, 20)))\n"
        "        assert candidate(encode(text)) == text\n"
    ),
}
ROOT = {
    "task_id": "Own/2",
    "entry_point": "zero_of",
    "prompt": (
        "import math\n\n\n"
        "def line(a, b, x):\n"
        "    return a * x + b\n\n\n"
        "def zero_of(a, b):\n"
        '    """Where line(a, b, x) is 0."""\n'
    ),
    "canonical_solution": "    return -b / a\n",
    "test": (
        "import random\n\n\n"
        "def check(candidate):\n"
        "    rng = random.Random(7)\n"
        "    for _ in range(15):\n"
        "        a, b = rng.randint(1, 9), rng.randint(-9, 9)\n"
        "        assert math.fabs(line(a, b, candidate(a, b))) < 1e-4\n"
    ),
}
PAIR = {
    "task_id": "Own/3",
    "entry_point": "split_signs",
    "prompt": 'def split_signs(xs):\n    """Negative numbers and the others, as two sorted lists."""\n',
    "canonical_solution": ("    return sorted(x for x in xs if x < 0), sorted(x for x in xs if x >= 0)\n"),
    "test": (
        "def check(candidate):\n"
        "    assert candidate([3, -1, 0]) == ([-1], [0, 3]), 'a mix'\n"
        "    assert candidate([]) == ([], [])\n"
        "    low, high = candidate([5, -5, -7])\n"
        "    assert low == [-7, -5] and len(high) == 1\n"
        "    assert isinstance(candidate([1]), tuple)\n"
        "    assert tuple(candidate([2, 1])[1]) == (1, 2)\n"
    ),
}
WORDS = {
    "task_id": "Own/4",
    "entry_point": "initials",
    "prompt": "def initials(names):\n    '''How many names begin with each letter.'''\n",
    "canonical_solution": (
        "    counts = {}\n"
        "    for name in names:\n"
        "        counts[name[0]] = counts.get(name[0], 0) + 1\n"
        "    return counts\n"
    ),
    "test": (
        "def check(candidate):\n"
        "    assert candidate(['ann', 'al', 'bo']) == {'a': 2, 'b': 1}\n"
        "    assert candidate([]) == {}\n"
        "    assert not candidate([]) and candidate(['x'])['x'] == 1\n"
    ),
}
TRUTH = {
    "task_id": "Own/5",
    "entry_point": "is_sorted",
    "prompt": 'def is_sorted(xs):\n    """Whether no number is smaller than the one before."""\n',
    "canonical_solution": "    return all(a <= b for a, b in zip(xs, xs[1:]))\n",
    "test": (
        "def check(candidate):\n"
        "    assert candidate([1, 2, 2]) is True\n"
        "    assert candidate([2, 1]) is False, 'falls'\n"
        "    assert not candidate([1, 3, 2])\n"
        "    assert candidate([]) == True\n"
    ),
}
TASKS = (MEAN, INVERSE, ROOT, PAIR, WORDS, TRUTH)

CHEATS = {
    "sys.exit": "import sys\nsys.exit(0)\n",
    "os._exit": "import os\nos._exit(0)\n",
    "always equal": (
        "class Same(object):\n"
        "    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "    def __bool__(self): return True\n"
        "    __lt__ = __le__ = __gt__ = __ge__ = __eq__\n"
        "    def __sub__(self, other): return 0\n"
        "    def __abs__(self): return 0\n"
        "    def __hash__(self): return 0\n"
        "def {entry}(*args, **kwargs):\n    return Same()\n"
    ),
    "equal text": (
        "class Text(str):\n"
        "    def __eq__(self, other): return True\n"
        "    __hash__ = str.__hash__\n"
        "def {entry}(*args, **kwargs):\n    return Text('')\n"
    ),
    "patched builtins": (
        "import builtins, json\n"
        "builtins.AssertionError = ValueError\n"
        "builtins.abs = lambda x: 0\n"
        "builtins.isinstance = lambda *a: True\n"
        "builtins.all = lambda xs: True\n"
        'json.dumps = lambda *a, **k: \'{{"number": 0, "value": true, "verdict": true}}\'\n'
        "def {entry}(*args, **kwargs):\n    return None\n"
    ),
    "prints the protocol": (
        "import sys\n"
        "frame = sys._getframe()\n"
        "while frame is not None:\n"
        "    for value in list(frame.f_locals.values()):\n"
        "        if hasattr(value, 'send') and hasattr(value, 'nonce'):\n"
        "            for number in range(40):\n"
        "                value.send({{'number': number, 'value': True}})\n"
        "            value.send({{'test': 'check', 'verdict': True, 'open': False}})\n"
        "            for kind in ('passed', 'verdict', 'ok'):\n"
        "                value.send({{kind: True}})\n"
        "    frame = frame.f_back\n"
        "print('PASSED', 'passed', '1.0')\n"
        "import os\nos._exit(0)\n"
    ),
    "reads the tests": (
        "import gc, glob, sys\n"
        "found = {{}}\n"
        "texts = [t for t in gc.get_objects() if isinstance(t, str)]\n"
        "for path in glob.glob('/box/*') + glob.glob('/tmp/*') + glob.glob('/proc/self/cmdline'):\n"
        "    try:\n        texts.append(open(path).read())\n    except Exception:\n        pass\n"
        "for module in list(sys.modules.values()):\n"
        "    texts += [str(v) for v in vars(module).values() if isinstance(v, (str, dict))]\n"
        "def {entry}(*args, **kwargs):\n"
        "    for text in texts:\n"
        "        at = text.find('candidate(' + repr(args)[1:-1].rstrip(','))\n"
        "        if at >= 0 and '==' in text[at:]:\n"
        "            try:\n"
        "                return eval(text[at:].split('==', 1)[1].split('\\n')[0])\n"
        "            except Exception:\n                pass\n"
        "    return None\n"
    ),
    "empty body": "def {entry}(*args, **kwargs):\n    pass\n",
    "endless": "def {entry}(*args, **kwargs):\n    while True: pass\n",
}
"""Programs that do nothing of the task; `{entry}` is the name of the function."""
