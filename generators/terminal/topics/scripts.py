"""Tasks that ask for a script that runs other programs. They are graded with unseen programs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from generators.terminal.draw import prose, text_of, words
from generators.terminal.makers import TaskMaker

from ludus.worlds.terminal.checks import Check, has_text, only_files
from ludus.worlds.terminal.task import CommandCheck, TerminalTask


@dataclass(frozen=True)
class ScriptTrial:
    """One run of the script: existing files, command, output, exit code, and checks of the files afterwards."""

    files: dict[str, str]
    command: str
    stdout: str | None = None
    exit: int | None = None
    leaves: tuple[Check, ...] = ()


@dataclass(frozen=True)
class ScriptQuota:
    """A requested script: its text, a solution, example files, and hidden trials that grade it."""

    name: str
    text: str
    lines: tuple[str, ...]
    example: dict[str, str] = field(default_factory=dict)
    trials: tuple[ScriptTrial, ...] = ()


def _draft(wanted: ScriptQuota) -> TerminalTask:
    quoted = "\n".join(wanted.lines)
    steps = (f"cat > {wanted.name} <<'END'\n{quoted}\nEND",)
    runs = tuple(
        CommandCheck(
            f"trial {number} of {wanted.name}",
            trial.command,
            (wanted.name,),
            trial.files,
            trial.stdout,
            trial.exit,
            trial.leaves,
        )
        for number, trial in enumerate(wanted.trials, 1)
    )
    text = f"Write a bash script {wanted.name}, which is called in its folder as `bash {wanted.name}`"
    return TerminalTask(f"{text}{wanted.text}", wanted.example, steps, (), runs)


def _name(rng: random.Random) -> str:
    return f"{words(rng, 1)[0]}.sh"


def _job(say: str, status: int = 0, nap: str = "") -> str:
    """Return a small program."""
    return f"#!/bin/sh\n{f'sleep {nap}' if nap else ''}\necho {say}\nexit {status}\n"


def _status(rng: random.Random) -> TerminalTask:
    name = _name(rng)
    out = f"{words(rng, 1)[0]}.txt"
    trials = tuple(
        ScriptTrial({}, f"bash {name} {command}", leaves=(has_text(out, f"{code}\n"),))
        for command, code in (("true", 0), ("sh -c 'exit 7'", 7), (f"sh -c 'exit {rng.randint(20, 90)}'", None))
        if code is not None
    )
    code = rng.randint(20, 90)
    more = ScriptTrial(
        {}, f"bash {name} sh -c 'echo \"$0\"; exit {code}' 'a b'", "a b\n", leaves=(has_text(out, f"{code}\n"),)
    )
    text = (
        " COMMAND ARGUMENTS..., runs the command with its arguments "
        "(which may have blanks in them) and writes the command's exit "
        f"code to {out}."
    )
    return _draft(ScriptQuota(name, text, ('"$@"', f"echo $? > {out}"), trials=(*trials, more)))


def _apart(rng: random.Random) -> TerminalTask:
    name, (out, err) = _name(rng), (f"{word}.txt" for word in words(rng, 2))
    program = "#!/bin/sh\necho one\necho two >&2\necho three\nexit 3\n"
    text = (
        f", runs `sh job.sh`, writes what it prints to {out} and what it "
        f"writes to standard error to {err}, prints nothing itself, and "
        "ends with the exit code of job.sh."
    )
    trial = ScriptTrial(
        {"job.sh": program}, f"bash {name} 2>&1", "", 3, (has_text(out, "one\nthree\n"), has_text(err, "two\n"))
    )
    two = ScriptTrial(
        {"job.sh": _job("fine")}, f"bash {name} 2>&1", "", 0, (has_text(out, "fine\n"), has_text(err, ""))
    )
    lines = (f"sh job.sh > {out} 2> {err}",)
    return _draft(ScriptQuota(name, text, lines, {"job.sh": _job("hello")}, (trial, two)))


def _first_failure(rng: random.Random) -> TerminalTask:
    name, root = _name(rng), words(rng, 1)[0]
    text = (
        f", runs the scripts {root}/*.sh with sh, one after the other "
        "from A to Z, and stops at the first that fails, whose exit code "
        "becomes its own. Without a failure it ends with 0."
    )
    files = {f"{root}/{n}.sh": _job(n, status) for n, status in (("a", 0), ("b", 0), ("c", 4), ("d", 0))}
    good = {path: _job(path[-4]) for path in files}
    trials = (ScriptTrial(files, f"bash {name}", "a\nb\nc\n", 4), ScriptTrial(good, f"bash {name}", "a\nb\nc\nd\n", 0))
    lines = (f'for s in {root}/*.sh; do sh "$s" || exit $?; done',)
    return _draft(ScriptQuota(name, text, lines, {f"{root}/a.sh": _job("a"), f"{root}/b.sh": _job("b")}, trials))


def _all_failures(rng: random.Random) -> TerminalTask:
    name, root = _name(rng), words(rng, 1)[0]
    text = (
        f", runs all scripts {root}/*.sh with sh, from A to Z, what "
        "they print going nowhere. It prints for each its name without "
        'folder, a blank and "ok" or "failed CODE", and ends '
        "with the number of those that failed as its exit code."
    )
    files = {f"{root}/{n}.sh": _job(n, s) for n, s in (("ant", 0), ("bee", 2), ("cow", 0), ("dog", 9))}
    stdout = "ant.sh ok\nbee.sh failed 2\ncow.sh ok\ndog.sh failed 9\n"
    trials = (
        ScriptTrial(files, f"bash {name}", stdout, 2),
        ScriptTrial({f"{root}/x.sh": _job("x")}, f"bash {name}", "x.sh ok\n", 0),
    )
    lines = (
        "n=0",
        f'for s in {root}/*.sh; do sh "$s" > /dev/null 2>&1; c=$?',
        ('if [ $c = 0 ]; then echo "$(basename "$s") ok"; else echo "$(basename "$s") failed $c"; n=$((n+1)); fi'),
        "done",
        "exit $n",
    )
    return _draft(ScriptQuota(name, text, lines, {f"{root}/ant.sh": _job("ant")}, trials))


def _parallel(rng: random.Random) -> TerminalTask:
    """Run programs in parallel; they wait for each other, so that they do not end otherwise."""
    name, root = _name(rng), words(rng, 1)[0]
    text = (
        f", starts all scripts {root}/*.sh with sh at the same time, "
        "waits for all of them, and writes the names (without folder) of "
        "those that failed to failed.txt, from A to Z. It ends with 0 if none failed and with 1 otherwise."
    )

    def meets(own: str, status: int) -> str:
        wait = 'n=0; while [ "$(ls here | wc -l)" -lt 3 ]; do sleep 0.05; n=$((n+1)); [ $n -gt 100 ] && exit 50; done'
        return f"mkdir -p here; touch here/{own}\n{wait}\nexit {status}\n"

    files = {f"{root}/{n}.sh": meets(n, status) for n, status in (("ant", 3), ("bee", 0), ("cow", 1))}
    good = {f"{root}/{n}.sh": meets(n, 0) for n in ("ant", "bee", "cow")}
    trials = (
        ScriptTrial(files, f"bash {name}", None, 1, (has_text("failed.txt", "ant.sh\ncow.sh\n"),)),
        ScriptTrial(good, f"bash {name}", None, 0, (has_text("failed.txt", ""),)),
    )
    lines = (
        "declare -A pids",
        f'for s in {root}/*.sh; do sh "$s" & pids[$(basename "$s")]=$!; done',
        'for n in "${!pids[@]}"; do wait "${pids[$n]}" || echo "$n"; done | cat > /dev/null; : > failed.txt',
        'for n in "${!pids[@]}"; do wait "${pids[$n]}" || echo "$n" >> failed.txt; done',
        "sort -o failed.txt failed.txt; [ ! -s failed.txt ]",
    )
    lines = (lines[0], lines[1], ": > failed.txt", *lines[3:])
    return _draft(ScriptQuota(name, text, lines, {f"{root}/ant.sh": _job("ant")}, trials))


def _patience(rng: random.Random) -> TerminalTask:
    name = _name(rng)
    text = (
        " SECONDS COMMAND ARGUMENTS..., runs the command and ends it if "
        'it takes longer than SECONDS: then it prints "too slow" and ends '
        "with 99, otherwise it ends with the command's exit code."
    )
    trials = (
        ScriptTrial({}, f"bash {name} 0.3 sleep 30", "too slow\n", 99),
        ScriptTrial({}, f"bash {name} 5 sh -c 'echo done; exit 4'", "done\n", 4),
        ScriptTrial({}, f"bash {name} 5 true", "", 0),
    )
    lines = ('t=$1; shift; timeout "$t" "$@"; c=$?', 'if [ $c = 124 ]; then echo "too slow"; exit 99; fi', "exit $c")
    return _draft(ScriptQuota(name, text, lines, trials=trials))


def _retry(rng: random.Random) -> TerminalTask:
    name, most = _name(rng), rng.randint(3, 5)
    text = (
        " COMMAND ARGUMENTS..., runs the command again until it ends with "
        f"0, at most {most} times in all. It ends with the exit code of "
        'the last attempt, and prints "attempts: N" as its last line.'
    )
    count = "n=$(cat n 2>/dev/null || echo 0); n=$((n+1)); echo $n > n; "
    trials = (
        ScriptTrial({"job.sh": f"{count}[ $n -ge 2 ]"}, f"bash {name} sh job.sh", "attempts: 2\n", 0),
        ScriptTrial({"job.sh": f"{count}exit $((10+n))"}, f"bash {name} sh job.sh", f"attempts: {most}\n", 10 + most),
        ScriptTrial({}, f"bash {name} true", "attempts: 1\n", 0),
    )
    lines = (
        "n=0",
        f'while :; do n=$((n+1)); "$@"; c=$?; [ $c = 0 ] && break; [ $n -ge {most} ] && break; done',
        'echo "attempts: $n"; exit $c',
    )
    return _draft(ScriptQuota(name, text, lines, trials=trials))


def _pipe(rng: random.Random) -> TerminalTask:
    name = _name(rng)
    text = (
        ", feeds what `sh source.sh` prints through `sort -u` and writes "
        "it to result.txt. If source.sh fails, it ends with the exit "
        "code of source.sh and leaves no result.txt (nor an older one as it was: that is removed)."
    )
    trials = (
        ScriptTrial(
            {"source.sh": "printf 'b\\na\\nb\\n'"}, f"bash {name}", None, 0, (has_text("result.txt", "a\nb\n"),)
        ),
        ScriptTrial(
            {"source.sh": "echo x; exit 6", "result.txt": "old\n"},
            f"bash {name}; echo $?; [ -e result.txt ] && echo there; exit 0",
            "6\n",
        ),
    )
    lines = (
        "set -o pipefail",
        "sh source.sh | sort -u > result.txt; c=$?",
        "[ $c = 0 ] || rm -f result.txt",
        "exit $c",
    )
    return _draft(ScriptQuota(name, text, lines, {"source.sh": "echo pear; echo fig\n"}, trials))


def _cleanup(rng: random.Random) -> TerminalTask:
    name, place = _name(rng), f"{words(rng, 1)[0]}-work"
    text = (
        f", makes the folder {place}, runs `sh job.sh` while it is there, "
        "and removes it with all that is in it: also if job.sh fails (its "
        "exit code is the script's), and also if the script is ended by SIGTERM while job.sh runs."
    )
    busy = f"echo x > {place}/x && touch began && sleep 30\n"
    kill = (
        "& p=$!; while [ ! -e began ]; do sleep 0.05; done; kill "
        "-TERM $p; kill -TERM $(cat pid 2>/dev/null) 2>/dev/null; "
    )
    kill += (
        f"n=0; while [ -e {place} ] && [ $n -lt 60 ]; do sleep 0.1; "
        f"n=$((n+1)); done; [ -e {place} ] && echo there; exit 0"
    )
    trials = (
        ScriptTrial(
            {"job.sh": f"ls -d {place}; echo y > {place}/y; exit 5"},
            f"bash {name}; echo $?; [ -e {place} ] && echo there; exit 0",
            f"{place}\n5\n",
        ),
        ScriptTrial({"job.sh": busy}, f"bash {name} {kill}", ""),
    )
    lines = (
        f"mkdir {place}",
        f"trap 'rm -rf {place}' EXIT",
        "trap 'kill $child 2>/dev/null; exit 143' TERM",
        "sh job.sh & child=$!",
        "wait $child; exit $?",
    )
    return _draft(ScriptQuota(name, text, lines, {"job.sh": "echo working\n"}, trials))


def _lock(rng: random.Random) -> TerminalTask:
    name = _name(rng)
    text = (
        ", runs `sh job.sh`, but never twice at the same time: where another "
        'call of the script is running, it prints "busy" and ends with '
        "75 at once. After a call has ended, in whatever way, the next "
        "one runs again. Otherwise its exit code is that of job.sh."
    )
    job = "echo run >> runs; touch began; sleep 1; exit 3"
    command = (
        f"bash {name} & p=$!; while [ ! -e began ]; do sleep "
        f"0.05; done; bash {name}; echo $?; wait $p; echo $?; "
        f"bash {name}; echo $?; wc -l < runs"
    )
    killed = (
        f"bash {name} & p=$!; while [ ! -e began ]; do sleep 0.05; "
        f"done; kill -9 $p; sleep 1.3; bash {name} > /dev/null; echo $?"
    )
    trials = (
        ScriptTrial({"job.sh": job}, command, "busy\n75\n3\n3\n2\n"),
        ScriptTrial({"job.sh": job}, f"{killed}", "3\n"),
    )
    lines = ("exec 9> .lock", "flock -n 9 || { echo busy; exit 75; }", "sh job.sh")
    return _draft(ScriptQuota(name, text, lines, {"job.sh": "echo working\n"}, trials))


def _stale(rng: random.Random) -> TerminalTask:
    name = _name(rng)
    text = (
        ", looks at service.pid, a file with the number of a process. It "
        'prints "running" if that process is alive, "stale" if the file is '
        'there and the process is not (then it removes the file), and "stopped" if there is no such file.'
    )
    trials = (
        ScriptTrial({}, f"bash {name}", "stopped\n"),
        ScriptTrial({}, f"sleep 9 & echo $! > service.pid; bash {name}; ls service.pid", "running\nservice.pid\n"),
        ScriptTrial(
            {},
            f"sleep 0 & p=$!; wait $p; echo $p > service.pid; bash {name}; [ -e service.pid ] && echo there; exit 0",
            "stale\n",
        ),
    )
    lines = (
        "if [ ! -e service.pid ]; then echo stopped",
        'elif kill -0 "$(cat service.pid)" 2>/dev/null; then echo running',
        "else rm service.pid; echo stale; fi",
    )
    return _draft(ScriptQuota(name, text, lines, {"service.pid": "999999\n"}, trials))


def _watch(rng: random.Random) -> TerminalTask:
    name, most = _name(rng), rng.randint(2, 4)
    text = (
        ", runs `sh service.sh` and starts it again each time it ends "
        f"with another code than 0, at most {most} times again. It writes a "
        'line to service.log for each end: "1 exited CODE", "2 exited CODE" '
        "and so on. It ends with 0 if the service at last ended with 0, "
        "otherwise with 1."
    )
    count = "n=$(cat n 2>/dev/null || echo 0); n=$((n+1)); echo $n > n; "
    all_bad = text_of([f"{n} exited {n + 2}" for n in range(1, most + 2)])
    trials = (
        ScriptTrial(
            {"service.sh": f"{count}[ $n = 2 ] && exit 0; exit 8"},
            f"bash {name}",
            None,
            0,
            (has_text("service.log", "1 exited 8\n2 exited 0\n"),),
        ),
        ScriptTrial(
            {"service.sh": f"{count}exit $((n+2))"}, f"bash {name}", None, 1, (has_text("service.log", all_bad),)
        ),
    )
    lines = (
        "n=0; : > service.log",
        f"while [ $n -le {most} ]; do n=$((n+1)); sh service.sh; c=$?",
        'echo "$n exited $c" >> service.log; [ $c = 0 ] && exit 0; done',
        "exit 1",
    )
    return _draft(ScriptQuota(name, text, lines, {"service.sh": "echo serving\n"}, trials))


def _ordered(rng: random.Random) -> TerminalTask:
    """Run jobs in the order of their dependencies."""
    name = _name(rng)
    text = (
        '. It reads jobs.txt, whose lines are "JOB: NEEDED NEEDED ..." '
        '(or "JOB:"), and prints the jobs, each on a line, so that each '
        "comes after all that it needs; of several that could come next "
        "always the first from A to Z. If jobs need each other in a "
        'circle, it prints nothing but "circle" and ends with 2.'
    )

    def order(needs: dict[str, list[str]]) -> list[str]:
        done: list[str] = []
        while len(done) < len(needs):
            done.append(min(j for j in needs if j not in done and all(n in done for n in needs[j])))
        return done

    def case() -> tuple[str, str]:
        jobs = words(rng, 8)
        needs = {job: sorted(rng.sample(jobs[:n], min(n, rng.randint(0, 2)))) for n, job in enumerate(jobs)}
        lines = [f"{job}: {' '.join(needs[job])}".rstrip() for job in rng.sample(jobs, 8)]
        return text_of(lines), text_of(order(needs))

    example, hidden = case(), case()
    trials = (
        ScriptTrial({"jobs.txt": hidden[0]}, f"bash {name}", hidden[1], 0),
        ScriptTrial({"jobs.txt": "a: b\nb: c\nc: a\nd:\n"}, f"bash {name}", "circle\n", 2),
    )
    program = (
        "import sys",
        'needs = {l.split(":")[0]: l.split(":")[1].split() for l in open("jobs.txt") if l.strip()}',
        "done = []",
        "while len(done) < len(needs):",
        "    free = [j for j in needs if j not in done and all(n in done for n in needs[j])]",
        '    if not free: print("circle"); sys.exit(2)',
        "    done.append(min(free))",
        'print("\\n".join(done))',
    )
    lines = ("python3 - <<'PY'", *program, "PY")
    return _draft(ScriptQuota(name, text, lines, {"jobs.txt": example[0]}, trials))


def _each_file(rng: random.Random) -> TerminalTask:
    name = _name(rng)
    text = (
        " FOLDER, runs `sh convert.sh FILE` for each .in file in the folder "
        "and its folders, also for names with blanks, and writes what it "
        "prints next to it, with .out in the place of .in. Where convert.sh "
        "fails there is no .out file, and the script ends with 1 after "
        "all others are done."
    )
    good, bad = text_of(prose(rng, 2)), "bad\n"
    files = {
        "convert.sh": 'grep -q bad "$1" && exit 1; tr a-z A-Z < "$1"',
        "d/one.in": good,
        "d/sub dir/two three.in": good,
        "d/wrong.in": bad,
        "d/other.txt": "no\n",
    }
    leaves = (
        has_text("d/one.out", good.upper()),
        has_text("d/sub dir/two three.out", good.upper()),
        only_files("*.out", frozenset({"d/one.out", "d/sub dir/two three.out"})),
    )
    fine = {path: body for path, body in files.items() if "wrong" not in path}
    trials = (
        ScriptTrial(files, f"bash {name} d", None, 1, leaves),
        ScriptTrial(fine, f"bash {name} d", None, 0, leaves),
    )
    lines = (
        "find \"$1\" -type f -name '*.in' -print0 | {",
        "s=0",
        (
            'while IFS= read -r -d "" f; do o="${f%.in}.out"; sh '
            'convert.sh "$f" > "$o" < /dev/null || { rm "$o"; s=1; }; done'
        ),
        "exit $s; }",
    )
    return _draft(ScriptQuota(name, text, lines, {"convert.sh": 'cat "$1"\n', "in/a.in": "a\n"}, trials))


def _mended(rng: random.Random) -> TerminalTask:
    """Repair a script that fails on spaces in names."""
    name, to = _name(rng), f"{words(rng, 1)[0]}-copy"
    broken = f"mkdir -p {to}\nfor f in $(ls $1); do\n  if [ -s $1/$f ]; then cp $1/$f {to}; echo copied $f; fi\ndone\n"
    mended = (
        broken.replace("$(ls $1)", '"$1"/*')
        .replace("$1/$f", '"$f"')
        .replace("echo copied $f", 'echo "copied $(basename "$f")"')
    )
    text = (
        f"The script {name} FOLDER shall copy all files of the folder "
        f"that are not empty to {to} and print a line for each, "
        '"copied NAME", from A to Z. It fails where the folder\'s '
        "name or those of files have blanks in them. Mend it."
    )
    files = {"my files/a b.txt": "1\n", "my files/c.txt": "2\n", "my files/empty one": ""}
    run = CommandCheck(
        f"trial of {name}",
        f"bash {name} 'my files'",
        (name,),
        files,
        "copied a b.txt\ncopied c.txt\n",
        leaves=(only_files(f"{to}/*", frozenset({f"{to}/a b.txt", f"{to}/c.txt"})),),
    )
    steps = (f"cat > {name} <<'END'\n{mended}END",)
    return TerminalTask(text, {name: broken, "plain/x.txt": "x\n"}, steps, (), (run,), changes=(name,), preview=(name,))


MAKERS: Final = (
    TaskMaker("scripts/status", 1, _status),
    TaskMaker("scripts/apart", 1, _apart),
    TaskMaker("scripts/first_failure", 2, _first_failure),
    TaskMaker("scripts/all_failures", 2, _all_failures),
    TaskMaker("scripts/stale", 2, _stale),
    TaskMaker("scripts/patience", 3, _patience),
    TaskMaker("scripts/retry", 3, _retry),
    TaskMaker("scripts/pipe", 3, _pipe),
    TaskMaker("scripts/mended", 3, _mended),
    TaskMaker("scripts/watch", 3, _watch, held_out=True),
    TaskMaker("scripts/parallel", 4, _parallel),
    TaskMaker("scripts/cleanup", 4, _cleanup),
    TaskMaker("scripts/lock", 4, _lock),
    TaskMaker("scripts/ordered", 4, _ordered),
    TaskMaker("scripts/each_file", 4, _each_file),
)
