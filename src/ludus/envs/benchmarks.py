r"""Published task sets as a table: the fields of question and answer, how to read the answer, and the verifier.

`own_record` converts a row to a record of `ludus.rewards.truth_records`, which becomes a task. SWE-bench has its own
reader (`ludus.worlds.swe.tasks`). Sources of the formats, by name: arXiv:1809.09600 (hotpotqa), 1906.00300 (nq: the
open version; also rows of the full set), 2110.14168 (gsm8k), 2103.03874 (math), 2311.12983 (gaia), 2504.12516
(browsecomp), 2406.12045 (tau-bench).
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ludus.envs.task_files import SPLITS, Record, RecordError, load_tasks, text_field
from ludus.rewards.extract import boxes
from ludus.types import JSON, Task

BenchmarkName = Literal["own", "aime", "browsecomp", "gaia", "gsm8k", "hotpotqa", "math", "nq"]
_NUMBER: Final = re.compile(r"[-+]?[\d,]*\.?\d+")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Published format of a task set.

    `question` lists alternative names of its field, and `decode` decrypts it. `answer` returns the answer of a row, or
    None if the row has none; `type` names its verifier, `text` for a list of accepted texts. `split` applies to rows
    without one; if it is empty, a hash of the question decides. `family` lists alternative fields of the label by which
    evaluations report success.
    """

    fields: str
    question: tuple[str, ...]
    answer: Callable[[Record], JSON]
    type: str
    split: str = ""
    family: tuple[str, ...] = ()
    decode: Callable[[Record, str], str] = lambda record, text: text


def own_record(name: BenchmarkName, row: Record) -> dict[str, JSON] | None:
    """Return the record of a row in the format of a benchmark; None if its answer is hidden or it has a file.

    Raises RecordError if a field is missing or invalid.
    """
    form = BENCHMARKS[name]
    question, answer = form.decode(row, _question(row, form)), form.answer(row)
    if answer is None:
        return None
    label = next((row[key] for key in form.family if row.get(key) is not None), name)
    split = row.get("split") if row.get("split") in SPLITS else form.split
    of_type = "text" if isinstance(answer, list) else form.type
    record: dict[str, JSON] = {"question": question, "answer": answer, "type": of_type, "family": str(label)}
    return record | ({"split": split} if split else {})


def _question(row: Record, form: Benchmark) -> str:
    for key in form.question:
        value = row.get(key)
        if isinstance(value, dict):  # NQ's full set
            value = value.get("text")
        if isinstance(value, str) and value.strip():
            return value.strip()
    raise RecordError(f"its fields are {', '.join(row)}, and the format has {form.fields}")


def _number_after_hashes(row: Record) -> JSON:
    _, hashes, answer = text_field(row, "answer").rpartition("####")
    if not hashes:
        raise RecordError('"answer" has no "####"')
    return answer.strip()


def _boxed(row: Record) -> JSON:
    r"""Return the field `answer`, or the last box of the solution, which may be `\boxed 2`."""
    if isinstance(given := row.get("answer"), str):
        return given
    solution = text_field(row, "solution")
    if found := boxes(solution):
        return found[-1]
    if bare := re.findall(r"\\boxed\s+([^$]+)", solution):
        return str(bare[-1]).strip()
    raise RecordError('"solution" has no \\boxed{}')


def _plain_answer(row: Record) -> JSON:
    value = next((row[name] for name in ("answer", "Answer") if row.get(name) is not None), None)
    if not isinstance(value, str | int | float):
        raise RecordError("answer or Answer is not a text or a number")
    return str(value)


def _one_text(row: Record) -> JSON:
    return [text_field(row, "answer")]


def _short_answers(row: Record) -> JSON:
    """Return the accepted answers of a question of NQ; None if the annotators found no short one."""
    given = next((row[key] for key in ("answer", "answers", "golden_answers") if row.get(key) is not None), None)
    if isinstance(given, str):
        return [given]
    if isinstance(given, list):
        return given or None
    annotations = row.get("annotations")
    if not isinstance(annotations, dict):
        raise RecordError(f"its fields are {', '.join(row)}, and the format has {BENCHMARKS['nq'].fields}")
    answers = annotations.get("short_answers")
    texts = [one.get("text") for one in answers if isinstance(one, dict)] if isinstance(answers, list) else []
    return list(dict.fromkeys(itertools.chain.from_iterable(one for one in texts if isinstance(one, list)))) or None


def _gaia(row: Record) -> JSON:
    """Return a number, or the list of a text; None if the answer is hidden (`?`) or the task has a file."""
    answer = text_field(row, "Final answer").strip()
    if row.get("file_name") or answer in ("?", ""):
        return None
    number = answer.strip("$% ")
    return number if _NUMBER.fullmatch(number) else [answer]


def decrypt(text: str, password: str) -> str:
    """Decrypt a field of BrowseComp: base64 of the XOR with the SHA-256 of the canary, repeated. Raises RecordError."""
    try:
        data = base64.b64decode(text, validate=True)
        key = itertools.cycle(hashlib.sha256(password.encode()).digest())
        return bytes(a ^ b for a, b in zip(data, key, strict=False)).decode()
    except ValueError as error:
        raise RecordError(f"it cannot be decrypted with its canary: {error}") from None


BENCHMARKS: Final[Mapping[BenchmarkName, Benchmark]] = {
    "aime": Benchmark(
        "problem (or question) and answer",
        ("problem", "Problem", "question", "Question"),
        _plain_answer,
        "number",
        "test",
    ),
    "browsecomp": Benchmark(
        "problem, answer and canary",
        ("problem",),
        lambda row: [decrypt(text_field(row, "answer"), text_field(row, "canary"))],
        "text",
        "test",
        ("problem_topic",),
        decode=lambda row, text: decrypt(text, text_field(row, "canary")),
    ),
    "gaia": Benchmark("Question and Final answer", ("Question",), _gaia, "number", "test", ("Level",)),
    "gsm8k": Benchmark("question and answer (#### 42)", ("question",), _number_after_hashes, "number"),
    "hotpotqa": Benchmark("question and answer", ("question",), _one_text, "text", family=("type",)),
    "math": Benchmark(
        r"problem and solution (with \boxed{}) or answer",
        ("problem",),
        _boxed,
        "expression",
        family=("type", "subject"),
    ),
    "nq": Benchmark(
        "question and answer (or answers, golden_answers, annotations)", ("question",), _short_answers, "text"
    ),
}
"""Formats by the name in `env.settings.format` of the world `math`."""


@dataclass(frozen=True, slots=True)
class TauBenchTruth:
    """Truth of a task of tau-bench: the calls that change the database, and texts that the answer must contain.

    `instruction` is for the simulated user; the policy does not see it.
    """

    user_id: str
    instruction: str
    actions: tuple[tuple[str, Mapping[str, JSON]], ...]
    outputs: tuple[str, ...]


def load_tau_bench(path: Path) -> dict[str, tuple[Task, ...]]:
    """Return the tasks of a file of tau-bench rows by split, `test` for rows without one.

    The tasks have truths and no prompt, since the user who begins the dialogue is not simulated here. Raises UserError,
    with the line, for an invalid row.
    """
    return load_tasks(path, _tau_task, "A row has user_id, instruction, actions (name and kwargs) and outputs.")


def _tau_task(row: Record, line: int) -> Task:
    actions, outputs, calls = row.get("actions"), row.get("outputs"), []
    if not isinstance(actions, list) or not isinstance(outputs, list):
        raise RecordError('"actions" or "outputs" is not a list')
    for one in actions:
        arguments = one.get("kwargs") if isinstance(one, dict) else None
        if not isinstance(one, dict) or not isinstance(arguments, dict):
            raise RecordError('an action has no "name" and "kwargs"')
        calls.append((text_field(one, "name"), arguments))
    split = str(row.get("split", "test"))
    truth = TauBenchTruth(
        text_field(row, "user_id"), text_field(row, "instruction"), tuple(calls), tuple(map(str, outputs))
    )
    return Task(f"{split}:line-{line}", (), truth, {"split": split, "family": "tau-bench"})
