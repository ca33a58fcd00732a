"""Tasks about processes: find them by the resources that they hold, and repair services."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from generators.terminal.draw import TOWNS, text_of, words
from generators.terminal.makers import TaskMaker
from generators.terminal.topics.processes import (
    BARE,
    PLAIN,
    ServiceFolder,
    each,
    gone,
    is_command,
    of_workers,
    of_yard,
    others,
    started,
    with_files,
    with_service,
    without,
    workers,
    yard_of,
)

from ludus.worlds.terminal.checks import Check, processes_run, service_ended, service_lives
from ludus.worlds.terminal.task import CommandCheck, TerminalService, TerminalTask

_KILL: Final = f"kill $p; {gone('$p')}"
_ON: Final = """print("up", flush=True)
while True:
    time.sleep(1)
"""
HOARDS: Final = f'import time\n\nheld = b"x" * (SIZE << 20)\n{_ON}'
KEEPS_FILE: Final = f"""import os, time

file = open("DATA", "w")
file.write("data " * 2000)
file.flush()
{_ON}"""
DROPS_FILE: Final = KEEPS_FILE.replace("file.flush()", 'file.flush()\nos.remove("DATA")')
KEEPS_DEAD: Final = f"""import os, time

for _ in range(3):
    if os.fork() == 0:
        os._exit(0)
{_ON}"""
"""Never reaps its children."""
KEEPER: Final = """import os, time

while True:
    child = os.spawnvp(os.P_NOWAIT, "python3", ["python3", "SCRIPT"])
    os.waitpid(child, 0)
    time.sleep(0.05)
"""
"""Restarts a program whenever it ends."""
POOL: Final = f"""import os, time

for _ in range(2):
    if os.fork() == 0:
        os.execvp("python3", ["python3", "WORKER"])
{_ON}"""
LOCKS: Final = """import fcntl, time

file = open("FILE")
print("up", flush=True)
fcntl.flock(file, fcntl.LOCK_EX)
with open("/proc/self/comm", "w") as title:
    title.write("working")
while True:
    time.sleep(1)
"""
READS: Final = f'import time\n\nfile = open("FILE")\n{_ON}'
CAREFUL: Final = PLAIN.replace(
    "\n\ndef stop",
    """
if os.path.exists(PID_FILE):
    sys.exit(f"{PID_FILE} is there: it seems to run already")


def stop""",
    1,
)
"""Does not start if its pid file exists."""
NEEDS: Final = f"""import os, sys, time

if "REGION" not in os.environ:
    sys.exit("REGION is not set")
with open("PATH", "w") as file:
    print(os.getpid(), file=file)
{_ON.replace('"up"', '"up in", os.environ["REGION"]')}"""
"""Does not start without a variable."""


def _bare(
    yard: ServiceFolder, text: str, steps: tuple[str, ...], watched: tuple[Check, ...], programs: Mapping[str, str]
) -> TerminalTask:
    """Return a task whose services have these programs by name, and no pid files."""
    draft = of_yard(yard, text, steps, watched)
    made = with_files(draft, {yard.script(name): program for name, program in programs.items()})
    return without(made, list(map(yard.pid_file, yard.names)))


def _hoard(rng: random.Random) -> TerminalTask:
    yard, sizes = yard_of(rng), [rng.randint(40, 60), *rng.sample(range(2, 12), 3)]
    name, *rest = rng.sample(yard.names, 4)
    text = (
        f"The programs of {yard.root} run. One of them holds far more memory than the others: end it, and "
        "leave the others alone."
    )
    largest = "grep -H ^VmRSS: /proc/[0-9]*/status 2> /dev/null | sort -k 2,2nr | head -n 1 | cut -d / -f 3"
    programs = {one: HOARDS.replace("SIZE", str(size)) for one, size in zip((name, *rest), sizes, strict=True)}
    return _bare(yard, text, (f"p=$({largest}); {_KILL}",), (service_ended(name), *others(rest)), programs)


def _dropped(rng: random.Random) -> TerminalTask:
    yard, data = yard_of(rng), words(rng, 4)
    name, *rest = rng.sample(yard.names, 4)
    paths = [f"{yard.root}/{word}.dat" for word in data]
    text = (
        f"Each program of {yard.root} keeps a file open that it writes to. One of these files has been "
        "deleted, so that its space is taken as long as the program runs. End this program; the others go on."
    )
    steps = (each("ls -l $d/fd 2> /dev/null | grep -q '\\.dat (deleted)$'", _KILL),)
    programs = {
        one: (DROPS_FILE if one == name else KEEPS_FILE).replace("DATA", path)
        for one, path in zip((name, *rest), paths, strict=True)
    }
    draft = _bare(yard, text, steps, (service_ended(name), *others(rest)), programs)
    return with_files(draft, dict.fromkeys(paths[1:], ""), changing=True)


def _dead_children(rng: random.Random) -> TerminalTask:
    yard = yard_of(rng)
    name, *rest = rng.sample(yard.names, 4)
    text = (
        f"One of the programs of {yard.root} does not ask after its children that have ended: they stay as "
        "zombies. End this program, so that they go; the other programs go on."
    )
    parents = "cat /proc/[0-9]*/status 2> /dev/null | awk '/^State:/ {s = $2} /^PPid:/ && s == \"Z\" {print $2}'"
    programs = {one: KEEPS_DEAD if one == name else BARE for one in yard.names}
    steps = (f"for p in $({parents} | sort -u); do {_KILL}; done",)
    return _bare(yard, text, steps, (service_ended(name), *others(rest)), programs)


def _by_variable(rng: random.Random) -> TerminalTask:
    yard, queues = yard_of(rng), words(rng, 4)
    services = workers(yard, [((), {"QUEUE": queue}) for queue in queues])
    place = rng.randrange(4)
    text = (
        f"{yard.script('worker')} runs four times, always by the same command line, and each time with "
        f"another QUEUE in its environment. Stop the one of the queue {queues[place]}; the others go on."
    )
    listed = f"grep -lzx 'QUEUE={queues[place]}' /proc/[0-9]*/environ 2> /dev/null | cut -d / -f 3"
    steps = (f"for p in $({listed}); do {_KILL}; done",)
    return of_workers(yard, text, steps, services, [services[place].name])


def _youngest(rng: random.Random) -> TerminalTask:
    yard, num = yard_of(rng), rng.randint(5, 6)
    services = workers(yard, [((), {})] * num)
    text = (
        f"{yard.script('worker')} runs {num} times, by the same command line, and three of these are "
        "enough. Let those three go on that started first, and end the others."
    )
    run = is_command(f"python3 {yard.script('worker')}")
    listed = each(run, "echo $p $(cut -d ' ' -f 22 $d/stat)")
    steps = (f"for p in $({listed} | sort -k 2,2n -k 1,1n | tail -n +4 | cut -d ' ' -f 1); do {_KILL}; done",)
    return of_workers(yard, text, steps, services, [service.name for service in services[3:]])


def _kept_up(rng: random.Random) -> TerminalTask:
    """End a process and, before it, the supervisor that restarts it."""
    yard = yard_of(rng)
    name, *rest = yard.names
    keeper, script = f"{yard.root}/keeper.py", yard.script(name)
    text = (
        f"Stop {script} for good. {keeper} starts it again whenever it ends, and shall run no more either. "
        "The other services go on."
    )
    steps = tuple(each(is_command(f"python3 {one}"), _KILL) for one in (keeper, script))
    watched: tuple[Check, ...] = (
        service_ended("keeper"),
        service_ended(name),
        processes_run((script,), 0),
        *others(rest),
    )
    programs = {name: BARE, "keeper": KEEPER.replace("SCRIPT", script), **dict.fromkeys(rest, BARE)}
    draft = _bare(yard, text, steps, watched, programs)
    parent = TerminalService("keeper", (keeper,), yard.log(name))
    child = replace(yard.service(name), parent="keeper")
    return replace(draft, services=(parent, child, *map(yard.service, rest)))


def _stale(rng: random.Random) -> TerminalTask:
    """Repair a pid file that contains the pid of another process."""
    yard = yard_of(rng)
    name, *rest = yard.names
    path = yard.pid_file(name)
    text = (
        f"The service {name} of {yard.root} does not run: it died and left {path} behind, and does not start "
        "while that file is there. The number in it is by now that of another service, which goes on, as all "
        f"others do. Have {name} run again: in /box, as `python3 {yard.script(name)}`, away from your shell."
    )
    steps = (f"rm {path}", started(yard, name))
    draft = of_yard(yard, text, steps, (processes_run((yard.script(name),), 1, {}, path), *others(rest)))
    draft = with_files(draft, yard.program(name, CAREFUL))
    own = tuple(map(yard.service, rest))
    return replace(draft, services=own, after_start=f"echo {{{rest[0]}}} > {path}")


def _missing(rng: random.Random) -> TerminalTask:
    """Start the services of a list that do not run."""
    yard = yard_of(rng, 5)
    rest, regions = yard.names[:3], dict(zip(yard.names, rng.sample(TOWNS, 5), strict=True))
    path, root = f"{yard.root}/services.txt", yard.root
    text = (
        f"{path} has a line `NAME REGION` for each service of {root}. Some of them do not run: those without "
        f"a pid file, {root}/run/NAME.pid. Start these in /box as `python3 {root}/NAME.py`, away from your "
        "shell, with REGION in the environment. The others go on."
    )
    start = f"(REGION=$r setsid python3 {root}/$n.py < /dev/null > {root}/log/$n.log 2>&1 &)"
    wait = f"until [ -s {root}/run/$n.pid ]; do sleep 0.05; done"
    steps = (f"while read n r; do if [ ! -s {root}/run/$n.pid ]; then {start}; {wait}; fi; done < {path}",)
    runs = tuple(
        processes_run((yard.script(name),), 1, {"REGION": regions[name]}, "" if name in rest else yard.pid_file(name))
        for name in yard.names
    )
    draft = of_yard(yard, text, steps, (*runs, *others(rest)))
    draft = without(draft, list(map(yard.pid_file, yard.names[3:])))
    listed = [f"{name} {regions[name]}" for name in rng.sample(yard.names, 5)]
    draft = with_files(draft, {path: text_of(listed)})
    own = tuple(replace(yard.service(name), environment={"REGION": regions[name]}) for name in rest)
    return replace(draft, services=own)


def _orphans(rng: random.Random) -> TerminalTask:
    yard = yard_of(rng, 3)
    dead, living, other = yard.names
    worker = f"{yard.root}/worker.py"
    text = (
        f"The programs {dead} and {living} of {yard.root} each had two workers, which run {worker}. One of "
        "the two was killed, and its workers run on without it. End these; the other program and its "
        f"workers go on, and so does {other}."
    )
    alone = "[ \"$(awk '/^PPid:/ {print $2}' $d/status)\" = 1 ]"
    steps = (each(f"{is_command(f'python3 {worker}')} && {alone}", _KILL),)
    children = {
        name: tuple(TerminalService(f"{name}/{n}", (worker,), yard.log(name), parent=name) for n in (1, 2))
        for name in (dead, living)
    }
    watched = (
        *(service_ended(one.name) for one in children[dead]),
        *others([living, other, *(one.name for one in children[living])]),
    )
    pool = POOL.replace("WORKER", worker)
    draft = _bare(yard, text, steps, watched, {dead: pool, living: pool, other: BARE, "worker": BARE})
    first = replace(yard.service(dead), first_signal="KILL")
    own = (first, *children[dead], yard.service(living), *children[living], yard.service(other))
    return replace(draft, services=own)


def _start_script(rng: random.Random) -> TerminalTask:
    """Repair a script that starts a service in a wrong way; the check uses another program for the service."""
    yard, region = yard_of(rng), rng.choice(TOWNS)
    name, *rest = yard.names
    start, path, log = f"{yard.root}/start.sh", yard.pid_file(name), yard.log(name)
    broken = (
        f"# starts {name}\ncd {yard.root}\nREGION={region}\n"
        f"setsid python3 {yard.script(name)} < /dev/null > {log} 2>&1 &\n"
    )
    text = (
        f"`bash {start}`, called in /box, shall start {name} there with REGION={region} in its environment, "
        "and does not. Mend the script, and start the service with it. The other services go on."
    )
    steps = (
        f"sed -i -e '/^cd /d' -e 's/^REGION=/export &/' {start}",
        f"bash {start}; until [ -s {path} ]; do sleep 0.05; done",
    )
    program = yard.program(name, NEEDS)
    runs = processes_run((yard.script(name),), 1, {"REGION": region}, path)
    draft = without(of_yard(yard, text, steps, (runs, *others(rest))), [path])
    draft = with_files(with_files(draft, program), {start: broken}, changing=True)
    number = rng.randrange(10**6)
    other = yard.program(name, NEEDS.replace('"up in"', f"7 * {number}"))
    trial = CommandCheck(
        f"trial of {start}",
        f"bash {start}; for i in $(seq 200); do [ -s {log} ] && break; sleep 0.05; done; cat {log}",
        (start,),
        {**other, f"{yard.root}/run/.keep": "", f"{yard.root}/log/.keep": ""},
        f"{7 * number} {region}\n",
    )
    return replace(draft, services=tuple(map(yard.service, rest)), command_checks=(trial,))


def _locked(rng: random.Random) -> TerminalTask:
    yard = yard_of(rng)
    holder, waiter, *rest = yard.names
    lock = f"{yard.root}/{words(rng, 1)[0]}.lock"
    text = (
        f"The service {waiter} of {yard.root} waits for the lock of {lock}. Another program holds the lock "
        f"and was suspended; nobody needs it any more. End it, so that {waiter} gets the lock: its title in "
        "/proc is then working. It must not be restarted, and the programs that only have the "
        "file open go on."
    )
    working = "until grep -qx working $d/comm; do sleep 0.05; done"
    steps = (
        f"p=$(awk '$2 == \"FLOCK\" {{print $5}}' /proc/locks); kill -9 $p; {gone('$p')}",
        each(is_command(f"python3 {yard.script(waiter)}"), working),
    )
    programs = {holder: LOCKS, waiter: LOCKS, **dict.fromkeys(rest, READS)}
    watched: tuple[Check, ...] = (service_ended(holder), service_lives(waiter, "working"), *others(rest))
    draft = _bare(yard, text, steps, watched, {name: text.replace("FILE", lock) for name, text in programs.items()})
    draft = with_files(draft, {lock: ""})
    return with_service(draft, replace(yard.service(holder), first_signal="STOP"))


MAKERS: Final = (
    TaskMaker("processes/hoard", 3, _hoard),
    TaskMaker("processes/dropped", 3, _dropped),
    TaskMaker("processes/dead_children", 3, _dead_children),
    TaskMaker("processes/by_variable", 3, _by_variable, held_out=True),
    TaskMaker("processes/kept_up", 3, _kept_up),
    TaskMaker("processes/stale", 3, _stale),
    TaskMaker("processes/missing", 3, _missing),
    TaskMaker("processes/youngest", 4, _youngest),
    TaskMaker("processes/orphans", 4, _orphans, held_out=True),
    TaskMaker("processes/start_script", 4, _start_script),
    TaskMaker("processes/locked", 4, _locked),
)
