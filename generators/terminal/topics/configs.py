"""Tasks about configuration files: change, convert, repair. Checks run the original program that reads the file."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import partial
from typing import Final

from generators.terminal.draw import SERVICES, TOWNS, text_of, words
from generators.terminal.makers import TaskMaker

from ludus.worlds.terminal.checks import has_text
from ludus.worlds.terminal.task import CommandCheck, TerminalTask

Sections = Mapping[str, Mapping[str, str]]

APP: Final = """import configparser, os, sys

config = configparser.ConfigParser(interpolation=None)
try:
    with open("FILE") as file:
        config.read_file(file)
except configparser.Error as error:
    sys.exit(f"FILE cannot be read: {error.message}")
problems = []
for section in ("server", "data", "limits"):
    if section not in config:
        sys.exit(f"FILE has no section {section}")
try:
    port = config.getint("server", "port")
    if not 1024 <= port <= 65535:
        problems.append(f"server.port {port} is not from 1024 to 65535")
    low, high = config.getint("limits", "low"), config.getint("limits", "high")
    if low >= high:
        problems.append("limits.low is not below limits.high")
    if not os.path.isfile(config.get("data", "file")):
        problems.append(f"data.file {config.get('data', 'file')} is not there")
    debug = config.getboolean("server", "debug")
except (ValueError, configparser.Error) as error:
    sys.exit(f"FILE: {error}")
if problems:
    sys.exit("; ".join(problems))
print("ready", port, debug, low, high, config.get("data", "file"), config.get("server", "name"))
"""


def _ini(sections: Sections) -> str:
    blocks = (
        f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in body.items()) for name, body in sections.items()
    )
    return "\n".join(blocks)


def _settings(rng: random.Random, data: str) -> dict[str, dict[str, str]]:
    low = rng.randint(1, 50)
    return {
        "server": {
            "name": rng.choice(SERVICES),
            "port": str(rng.randint(2000, 9000)),
            "debug": rng.choice(("yes", "no")),
        },
        "data": {"file": data, "format": "csv"},
        "limits": {"low": str(low), "high": str(low + rng.randint(10, 90))},
    }


def _set(rng: random.Random) -> TerminalTask:
    name, sections = f"{words(rng, 1)[0]}.ini", _settings(rng, "data/a.csv")
    before = _ini(sections)
    port = str(rng.randint(9100, 9900))
    sections["server"]["port"] = port
    return TerminalTask(
        f"In {name} set the port of the server to {port}. Every other line stays as it is.",
        {name: before},
        (f"sed -i 's/^port = .*/port = {port}/' {name}",),
        (has_text(name, _ini(sections)),),
        changes=(name,),
        preview=(name,),
    )


def _added(rng: random.Random) -> TerminalTask:
    name, sections = f"{words(rng, 1)[0]}.ini", _settings(rng, "data/a.csv")
    before = _ini(sections)
    key, value = words(rng, 1)[0], str(rng.randint(1, 99))
    section = rng.choice(("server", "data"))
    sections[section][key] = value
    return TerminalTask(
        f'In {name} add the line "{key} = {value}" as the last one of '
        f"the section {section}, before the empty line that ends the "
        "section. Every other line stays.",
        {name: before},
        (
            (
                f'awk \'/^\\[/ {{s=$0}} /^$/ && s=="[{section}]" {{print '
                f'"{key} = {value}"}} {{print}}\' {name} > .n && mv .n {name}'
            ),
        ),
        (has_text(name, _ini(sections)),),
        changes=(name,),
        preview=(name,),
    )


def _commented(rng: random.Random) -> TerminalTask:
    name, keys = f"{words(rng, 1)[0]}.conf", words(rng, 8)
    lines = [f"{key} {rng.randint(1, 99)}" for key in keys]
    off, on = rng.sample(range(8), 2)
    lines[on] = f"# {lines[on]}"
    due = [*lines]
    due[off], due[on] = f"# {lines[off]}", lines[on].removeprefix("# ")
    return TerminalTask(
        f'In {name} a "#" and a blank before a line switch it off. '
        f"Switch {keys[off]} off and {keys[on]} on; the other lines stay.",
        {name: text_of(lines)},
        (f"sed -i -e 's/^{keys[off]} /# &/' -e 's/^# {keys[on]} /{keys[on]} /' {name}",),
        (has_text(name, text_of(due)),),
        changes=(name,),
        preview=(name,),
    )


def _json_set(rng: random.Random) -> TerminalTask:
    name, service = f"{words(rng, 1)[0]}.json", rng.choice(SERVICES)
    chosen = sorted({*rng.sample(SERVICES, 3), service})
    replicas = {one: rng.randint(1, 4) for one in chosen}
    hosts = {one: [f"{word}-1"] for one, word in zip(chosen, words(rng, 4), strict=False)}

    def shown() -> str:
        services = {one: {"replicas": replicas[one], "hosts": hosts[one]} for one in chosen}
        return json.dumps({"services": services, "version": 1}, indent=2) + "\n"

    before = shown()
    num, host = rng.randint(5, 9), f"{words(rng, 1)[0]}-2"
    replicas[service], hosts[service] = num, [*hosts[service], host]
    program = (
        f'import json; d=json.load(open("{name}")); s=d["services"]["{service}"]; s["replicas"]={num}; '
        f's["hosts"].append("{host}"); json.dump(d, open("{name}","w"), indent=2)'
    )
    text = (
        f'In {name} set the replicas of the service "{service}" to {num} and add '
        f'"{host}" to the end of its hosts. All else stays, and the file stays JSON.'
    )
    return TerminalTask(
        text,
        {name: before},
        (f"python3 -c '{program}'",),
        (has_text(name, shown(), "json"),),
        changes=(name,),
        preview=(name,),
    )


def _json_mended(rng: random.Random) -> TerminalTask:
    name = f"{words(rng, 1)[0]}.json"
    value = {key: rng.randint(1, 99) for key in words(rng, 4)}
    inner = {"towns": rng.sample(TOWNS, 3), "limits": value, "active": True}
    text = json.dumps(inner, indent=2)
    last = text.rstrip("}\n").rstrip()
    broken = text.replace("\n  ],", "\n  ]", 1).replace(last[-4:] + "\n}", last[-4:] + ",\n}")
    broken = broken.replace('"limits"', "'limits'")
    steps = ((f'sed -i -e "s/\'/\\"/g" -e \'s/^  \\]$/  ],/\' -e \'s/^  "active": true,$/  "active": true/\' {name}'),)
    said = (
        f"{name} was JSON and is broken: a comma is missing, one is "
        "too many, and a name has the wrong quotes. Mend it without "
        "changing any value or name."
    )
    return TerminalTask(
        said, {name: broken + "\n"}, steps, (has_text(name, text, "json"),), changes=(name,), preview=(name,)
    )


def _env_json(rng: random.Random) -> TerminalTask:
    name, out = f"{words(rng, 1)[0]}.env", f"{words(rng, 1)[0]}.json"
    pairs = {key.upper(): f"{word} {rng.randint(1, 9)}" for key, word in zip(words(rng, 5), words(rng, 5), strict=True)}
    lines = ["# settings"]
    for n, (key, value) in enumerate(pairs.items()):
        lines += [f'{key}="{value}"' if n % 2 else f"export {key}='{value}'", ""][: 1 + n % 2]
    program = (
        "import json, shlex; r={}\n"
        f'for l in open("{name}"):\n    w=shlex.split(l, comments=True)\n'
        '    w=w[1:] if w[:1]==["export"] else w\n    if w: k,_,v=w[0].partition("="); r[k]=v\n'
        f'json.dump(r, open("{out}","w"))'
    )
    text = (
        f"Translate {name}, which a shell can read, into {out}: a JSON object with "
        "the names of the variables and their values as texts, without the quotes."
    )
    steps = (f"python3 -c '{program}'",)
    return TerminalTask(
        text, {name: text_of(lines)}, steps, (has_text(out, json.dumps(pairs), "json"),), preview=(name,)
    )


def _ini_env(rng: random.Random) -> TerminalTask:
    name, out = f"{words(rng, 1)[0]}.ini", f"{words(rng, 1)[0]}.env"
    sections = _settings(rng, "data/a.csv")
    due = [f"{s.upper()}_{k.upper()}={v}" for s, body in sections.items() for k, v in body.items()]
    text = (
        f"Write the settings of {name} to {out} as lines SECTION_KEY=VALUE, with "
        "capital letters before the equals sign and no blanks around it, in their order."
    )
    steps = (
        (
            f"awk -F' = ' '/^\\[/ {{s=toupper(substr($0,2,length($0)-2)); "
            f'next}} NF>1 {{print s "_" toupper($1) "=" $2}}\' {name} > {out}'
        ),
    )
    return TerminalTask(text, {name: _ini(sections)}, steps, (has_text(out, text_of(due)),), preview=(name,))


def _merged(rng: random.Random) -> TerminalTask:
    one, two, out = (f"{word}.json" for word in words(rng, 3))
    keys = words(rng, 6)
    base: dict[str, object] = {keys[0]: 1, keys[1]: {"a": 1, "b": {"x": 1, "y": 2}}, keys[2]: [1, 2, 3]}
    inner = {"y": rng.randint(5, 9), "z": 3}
    over: dict[str, object] = {keys[1]: {"b": inner}, keys[2]: [9], keys[3]: "new"}
    due = {keys[0]: 1, keys[1]: {"a": 1, "b": {"x": 1, **inner}}, keys[2]: [9], keys[3]: "new"}
    program = (
        "import json\ndef m(a,b):\n    if not (isinstance(a,dict) and isinstance(b,dict)): return b\n"
        "    return {**a, **{k: m(a[k],v) if k in a else v for k,v in b.items()}}\n"
        f'json.dump(m(json.load(open("{one}")),json.load(open("{two}"))), open("{out}","w"))'
    )
    text = (
        f"Lay the settings of {two} over those of {one} and write the result to {out}: objects are "
        f"joined key by key at every depth, any other value of {two} takes the place of the old one."
    )
    files = {one: json.dumps(base, indent=1) + "\n", two: json.dumps(over, indent=1) + "\n"}
    steps = (f"python3 -c '{program}'",)
    return TerminalTask(text, files, steps, (has_text(out, json.dumps(due), "json"),), preview=(one, two))


def _filled(rng: random.Random) -> TerminalTask:
    name, values, out = f"{words(rng, 1)[0]}.template", f"{words(rng, 1)[0]}.env", f"{words(rng, 1)[0]}.conf"
    pairs = {key: str(rng.randint(100, 999)) for key in words(rng, 4)}
    lines = [
        f"set {key} to {{{{{key}}}}} or {{{{{other}}}}}" for key, other in zip(pairs, reversed(pairs), strict=True)
    ]
    lines.append("keep {this} as it is")
    due = [*lines]
    for key, value in pairs.items():
        due = [line.replace(f"{{{{{key}}}}}", value) for line in due]
    text = (
        f"Fill the template {name} with the values in {values} (NAME=VALUE): each "
        f"{{{{NAME}}}} becomes its value. Write the result to {out}; the template stays."
    )
    steps = (f"sed $(sed -E 's/^([a-z]+)=(.*)$/-e s\\/{{{{\\1}}}}\\/\\2\\/g/' {values}) {name} > {out}",)
    files = {name: text_of(lines), values: text_of([f"{k}={v}" for k, v in pairs.items()])}
    return TerminalTask(text, files, steps, (has_text(out, text_of(due)),), preview=(name, values))


def _renamed(rng: random.Random) -> TerminalTask:
    root, (old, new) = f"{words(rng, 1)[0]}-conf", words(rng, 2)
    files = {}
    for service in rng.sample(SERVICES, 4):
        lines = [f"{old} = {rng.randint(1, 9)}", f"{old}_max = 10", f"note = the {old} of {service}"]
        files[f"{root}/{service}.conf"] = text_of(rng.sample(lines, 3))
    due = {
        path: "".join(new + line[len(old) :] if line.startswith(f"{old} =") else line for line in text.splitlines(True))
        for path, text in files.items()
    }
    text = (
        f'In all files of {root} the setting "{old}" (before the equals sign) '
        f'is now called "{new}". Other settings that begin so, and notes, stay.'
    )
    checks = tuple(has_text(path, body) for path, body in due.items())
    return TerminalTask(text, files, (f"sed -i 's/^{old} =/{new} =/' {root}/*.conf",), checks, changes=(f"{root}/*",))


def _ports(rng: random.Random) -> TerminalTask:
    root, start = f"{words(rng, 1)[0]}-conf", rng.randint(3000, 8000)
    services = sorted(rng.sample(SERVICES, 6))
    ports = [start, start + 1, start, start + 2, start + 1, start]
    files = {
        f"{root}/{service}.conf": f"name={service}\nport={port}\n"
        for service, port in zip(services, ports, strict=True)
    }
    taken, due = set[int](), {}
    for service, port in zip(services, ports, strict=True):
        if port in taken:
            port = max(*taken, *ports) + 1
        taken.add(port)
        due[f"{root}/{service}.conf"] = f"name={service}\nport={port}\n"
    text = (
        f"Several files in {root} have the same port. Go through them "
        "from A to Z: a file whose port an earlier one has already gets "
        "the number after the highest port that any file has at that moment. All else stays."
    )
    steps = (
        (
            f'for f in {root}/*; do p=$(sed -n "s/^port=//p" $f); case " $t " in *" $p "*) '
            f"p=$(( $(cat {root}/* | sed -n 's/^port=//p' | sort -n | tail -n 1) "
            '+ 1 )); sed -i "s/^port=.*/port=$p/" $f;; esac; t="$t $p"; done; unset t'
        ),
    )
    checks = tuple(has_text(path, body) for path, body in due.items())
    return TerminalTask(text, files, steps, checks, changes=(f"{root}/*",))


def _app(
    rng: random.Random,
    broken: str,
    sections: Mapping[str, Mapping[str, str]],
    said: tuple[str, str],
    more: Mapping[str, str] | None = None,
) -> TerminalTask:
    """Return a task with a program that fails on its configuration; `said` is a hint and the repairing command."""
    name = f"{words(rng, 1)[0]}.ini"
    program = APP.replace("FILE", name)
    server, limits = sections["server"], sections["limits"]
    debug = {"yes": True, "no": False}[server["debug"]]
    due = (
        f"ready {server['port']} {debug} {limits['low']} {limits['high']} {sections['data']['file']} {server['name']}\n"
    )
    data = {sections["data"]["file"]: "a,b\n1,2\n", **(more or {})}
    text = (
        f"`python3 app.py` reads {name} and does not start. Mend "
        f"{name}, and no other file, so that it prints that it is ready. "
        f"{said[0]}"
    )
    run = CommandCheck("the program is ready", "python3 app.py", (name,), {"app.py": program, **data}, due, 0)
    return TerminalTask(
        text,
        {name: broken, "app.py": program, **data},
        (said[1].replace("NAME", name),),
        (),
        (run,),
        changes=(name,),
        preview=(name,),
    )


def _broken(how: str, rng: random.Random) -> TerminalTask:
    data = f"data/{words(rng, 1)[0]}.csv"
    sections = _settings(rng, data)
    good = _ini(sections)
    server, limits = sections["server"], sections["limits"]
    match how:
        case "header":
            broken = good.replace("[limits]", "limits]")
            said = "Every value is right.", "sed -i 's/^limits\\]/[limits]/' NAME"
        case "path":
            broken = good.replace(data, data.replace("data/", "dat/"))
            said = "Its data lie where they should.", f"sed -i 's|^file = .*|file = {data}|' NAME"
        case "swapped":
            broken = good.replace(f"low = {limits['low']}", "low = @").replace(
                f"high = {limits['high']}", f"high = {limits['low']}"
            )
            broken = broken.replace("@", limits["high"])
            said = (
                "Somebody has exchanged two values; all others are right.",
                "sed -i -e 's/^low/lo_/' -e 's/^high/low/' -e 's/^lo_/high/' NAME",
            )
        case "twice":
            broken = good.replace("[data]", f"port = {server['port'][::-1]}1\n\n[data]", 1).replace(
                "\n\nport", "\nport"
            )
            said = (
                "Where a setting is there twice, the first one is right.",
                "awk '/^\\[/ {delete s} {split($0,w,\" = \")} !(/=/ && s[w[1]]++)' NAME > .n && mv .n NAME",
            )
        case "missing":
            broken = good.replace(f"port = {server['port']}\n", "")
            said = (f"Its port is {server['port']}.", f"sed -i 's/^\\[server\\]$/&\\nport = {server['port']}/' NAME")
        case "conflict":
            mine = f"<<<<<<< HEAD\nport = {server['port']}\n=======\nport = 1\n>>>>>>> other\n"
            broken = good.replace(f"port = {server['port']}\n", mine)
            said = (
                "A merge left its marks in it; the part of HEAD is right.",
                "sed -i -e '/^=======/,/^>>>>>>>/d' -e '/^<<<<<<</d' NAME",
            )
        case _:
            broken = good.replace("[limits]", "limits]").replace(data, "data/none.csv")
            broken = broken.replace(f"port = {server['port']}", f"port = {server['port']}O").replace(
                "debug = ", "debug = very "
            )
            said = (
                (
                    "It has several mistakes; the program names them one after the "
                    "other. The data file is the only one in data, the letter in "
                    "the port is one too many, and debug has a word that does not belong there."
                ),
                (
                    "sed -i -e 's/^limits\\]/[limits]/' -e 's|^file = "
                    f".*|file = {data}|' -e 's/O$//' -e 's/very //' NAME"
                ),
            )
    return _app(rng, broken, sections, said)


def _crontab(rng: random.Random) -> TerminalTask:
    out, name = f"{words(rng, 1)[0]}.txt", f"{words(rng, 1)[0]}.cron"
    jobs = words(rng, 7)
    lines = [
        f"{rng.randint(0, 59)} {rng.choice(('*', str(rng.randint(0, 23))))} "
        f"* * {rng.choice(('*', '0', '1-5'))} {job}.sh"
        for job in jobs
    ]
    lines.insert(3, "# weekly")
    due = sorted(
        f"{int(w[1]):02}:{int(w[0]):02} {w[5]}"
        for w in (line.split() for line in lines)
        if w[0] != "#" and w[1] != "*" and w[4] == "*"
    )
    if not due:
        return _crontab(rng)
    text = (
        f"{name} is a crontab. Write to {out} the commands that run once on every day of the "
        "week: each line has the time as HH:MM, a blank and the command, in the order of the times."
    )
    steps = ((f'awk \'$1!="#" && $2!="*" && $5=="*" {{printf "%02d:%02d %s\\n", $2, $1, $6}}\' {name} | sort > {out}'),)
    return TerminalTask(text, {name: text_of(lines)}, steps, (has_text(out, text_of(due)),), preview=(name,))


def _audit(rng: random.Random) -> TerminalTask:
    """The differences between the configurations of two machines."""
    one, two, out = (f"{word}.conf" for word in words(rng, 3))
    keys = sorted(words(rng, 9))
    left = {key: rng.randint(1, 9) for key in keys[:8]}
    right = {key: left.get(key, 5) + (key in keys[2:4]) for key in keys[1:]}
    due = [f"{key} {left.get(key, '-')} {right.get(key, '-')}" for key in keys if left.get(key) != right.get(key)]

    def shown(settings: Mapping[str, int]) -> str:
        lines = [f"{key}={value}" for key, value in settings.items()]
        rng.shuffle(lines)
        return text_of(["# a machine", *lines])

    text = (
        f"{one} and {two} have settings KEY=VALUE in any order; lines "
        f"that begin with # do not count. Write to {out} each key whose "
        f"values are not the same: the key, its value in {one} and "
        f"its value in {two}, separated by blanks, with - where it is "
        "missing, the keys from A to Z."
    )
    steps = (
        (
            f"awk -F= '/^#/ {{next}} NR==FNR {{a[$1]=$2; k[$1]=1; "
            f"next}} {{b[$1]=$2; k[$1]=1}} END {{for (x in k) {{"
            f'l=(x in a)?a[x]:"-"; r=(x in b)?b[x]:"-"; if (l!=r) print x, l, r}}}}\' '
            f"{one} {two} | sort > {out}"
        ),
    )
    return TerminalTask(
        text, {one: shown(left), two: shown(right)}, steps, (has_text(out, text_of(due)),), preview=(one, two)
    )


MAKERS: Final = (
    TaskMaker("configs/set", 1, _set),
    TaskMaker("configs/comment", 1, _commented),
    TaskMaker("configs/missing", 1, partial(_broken, "missing")),
    TaskMaker("configs/header", 1, partial(_broken, "header")),
    TaskMaker("configs/add", 2, _added),
    TaskMaker("configs/json_set", 2, _json_set),
    TaskMaker("configs/ini_env", 2, _ini_env),
    TaskMaker("configs/rename", 2, _renamed),
    TaskMaker("configs/path", 2, partial(_broken, "path")),
    TaskMaker("configs/swapped", 2, partial(_broken, "swapped")),
    TaskMaker("configs/conflict", 2, partial(_broken, "conflict")),
    TaskMaker("configs/json_mend", 3, _json_mended),
    TaskMaker("configs/env_json", 3, _env_json),
    TaskMaker("configs/template", 3, _filled),
    TaskMaker("configs/twice", 3, partial(_broken, "twice"), held_out=True),
    TaskMaker("configs/crontab", 3, _crontab, held_out=True),
    TaskMaker("configs/merge", 4, _merged),
    TaskMaker("configs/ports", 4, _ports),
    TaskMaker("configs/audit", 4, _audit),
    TaskMaker("configs/several", 4, partial(_broken, "several")),
)
