"""Tasks about logs: who, when, how often, how long, in which order."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections import Counter, defaultdict
from typing import Final

from generators.terminal.draw import AccessLogLine, Event, events, hits, text_of, words
from generators.terminal.makers import TaskMaker

from ludus.worlds.terminal.checks import has_text
from ludus.worlds.terminal.task import TerminalTask

_FORM: Final = "(address [time] method path status bytes milliseconds)"
_EVENT: Final = "(time level service req=id message)"


def _out(rng: random.Random, suffix: str = ".txt") -> str:
    return words(rng, 1)[0] + suffix


def _asked(rng: random.Random, found: list[AccessLogLine], asked: str, due: list[str], pipe: str) -> TerminalTask:
    """Return a question about an access log; `pipe` reads it and prints the answer."""
    log, out = f"{words(rng, 1)[0]}-access.log", _out(rng)
    text = f"{log} is an access log {_FORM}. Write to {out} {asked}"
    files = {log: text_of([hit.line for hit in found])}
    return TerminalTask(
        text, files, (f"{pipe.replace('LOG', log)} > {out}",), (has_text(out, text_of(due)),), preview=(log,)
    )


def _told(rng: random.Random, found: list[Event], asked: str, due: list[str], pipe: str) -> TerminalTask:
    """Return a question about the log of a program."""
    log, out = f"{words(rng, 1)[0]}.log", _out(rng)
    text = f"{log} is the log of several services {_EVENT}. Write to {out} {asked}"
    files = {log: text_of([event.line for event in found])}
    return TerminalTask(
        text, files, (f"{pipe.replace('LOG', log)} > {out}",), (has_text(out, text_of(due)),), preview=(log,)
    )


def _status(rng: random.Random) -> TerminalTask:
    found = hits(rng)
    status = rng.choice([hit.status for hit in found])
    due = [str(sum(hit.status == status for hit in found))]
    asked = f"how many requests have the status {status}."
    return _asked(rng, found, asked, due, f"awk '$5=={status}' LOG | wc -l")


def _failures(rng: random.Random) -> TerminalTask:
    found = hits(rng)
    due = [hit.line for hit in found if hit.status >= 500]
    return _asked(rng, found, "all lines whose status is 500 or more, as they stand.", due, "awk '$5>=500' LOG")


def _methods(rng: random.Random) -> TerminalTask:
    found = hits(rng)
    counts = Counter(hit.method for hit in found)
    due = [f"{method} {counts[method]}" for method in sorted(counts)]
    asked = "for each method that occurs a line with it, a blank and its number of requests, from A to Z."
    return _asked(rng, found, asked, due, "awk '{n[$3]++} END {for (k in n) print k, n[k]}' LOG | sort")


def _visitors(rng: random.Random) -> TerminalTask:
    found = hits(rng)
    path = rng.choice([hit.path for hit in found])
    due = [str(len({hit.address for hit in found if hit.path == path}))]
    asked = f'from how many different addresses the path "{path}" was asked for.'
    return _asked(rng, found, asked, due, f"awk '$4==\"{path}\" {{print $1}}' LOG | sort -u | wc -l")


def _busiest(rng: random.Random) -> TerminalTask:
    found = hits(rng)
    counts = Counter(hit.address for hit in found)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:3]
    asked = (
        "the three addresses with the most requests, the busiest first and equal ones in the order of their "
        "letters, each line with the address, a blank and the number."
    )
    pipe = "awk '{n[$1]++} END {for (k in n) print k, n[k]}' LOG | sort -k2,2nr -k1,1 | head -n 3"
    return _asked(rng, found, asked, [f"{address} {count}" for address, count in ranked], pipe)


def _hours(rng: random.Random) -> TerminalTask:
    found = hits(rng)
    counts = Counter(hit.clock[:2] for hit in found)
    asked = "for each hour of the day that occurs (two digits) a line with it, a colon and its requests, in order."
    pipe = "cut -d'[' -f2 LOG | cut -c1-2 | sort | uniq -c | awk '{print $2 \":\" $1}'"
    return _asked(rng, found, asked, [f"{hour}:{counts[hour]}" for hour in sorted(counts)], pipe)


def _traffic(rng: random.Random) -> TerminalTask:
    found = hits(rng)
    sums: Counter[str] = Counter()
    for hit in found:
        sums[hit.path] += hit.size if hit.status == 200 else 0
    ranked = sorted(sums.items(), key=lambda item: -item[1])
    asked = (
        "for each path that occurs a line with it, a tab "
        "and the bytes of its requests of status 200 together "
        "(0 if there are none), the most bytes first."
    )
    pipe = "awk '{n[$4]+=($5==200)*$6} END {for (k in n) print k \"\\t\" n[k]}' LOG | sort -t'\t' -k2,2nr -s"
    due = [f"{path}\t{size}" for path, size in ranked]
    return _asked(rng, found, asked, due, pipe) if len(set(sums.values())) == len(sums) else _traffic(rng)


def _slowest(rng: random.Random) -> TerminalTask:
    found = hits(rng)
    best: dict[str, AccessLogLine] = {}
    for hit in found:
        if hit.path not in best or hit.ms > best[hit.path].ms:
            best[hit.path] = hit
    asked = (
        "for each path that occurs its slowest request, each "
        "line with the path, the milliseconds and the address, "
        "separated by blanks, the paths from A to Z."
    )
    pipe = "awk '$7>m[$4]+0 {m[$4]=$7; a[$4]=$1} END {for (k in m) print k, m[k], a[k]}' LOG | sort"
    return _asked(rng, found, asked, [f"{p} {best[p].ms} {best[p].address}" for p in sorted(best)], pipe)


def _median(rng: random.Random) -> TerminalTask:
    found = hits(rng, rng.choice((41, 51, 61)))
    times = sorted(hit.ms for hit in found)
    asked = "the median of the milliseconds (their number is odd)."
    pipe = "awk '{print $7}' LOG | sort -n | awk '{v[NR]=$1} END {print v[(NR+1)/2]}'"
    return _asked(rng, found, asked, [str(times[len(times) // 2])], pipe)


def _window(rng: random.Random) -> TerminalTask:
    found = hits(rng)
    one, two = sorted(rng.sample(range(len(found)), 2))
    begin, end = found[one].clock, found[min(two + 3, len(found) - 1)].clock
    due = [hit.line for hit in found if begin <= hit.clock <= end and hit.method == "POST"]
    asked = f"the POST requests from {begin} to {end}, both times included, as they stand."
    pipe = f'awk \'{{t=substr($2,2,8)}} $3=="POST" && t>="{begin}" && t<="{end}"\' LOG'
    return _asked(rng, found, asked, due, pipe) if due else _window(rng)


def _repeated(rng: random.Random) -> TerminalTask:
    """Find clients with several failed logins before a success."""
    found = list[AccessLogLine]()
    addresses = [f"10.1.1.{n}" for n in rng.sample(range(2, 250), 6)]
    second = 9 * 3600
    due = set()
    for address in rng.sample(addresses * 4, 24):
        in_a_row = rng.randint(0, 4)
        for status in (*([401] * in_a_row), 200):
            second += rng.randint(1, 50)
            found.append(AccessLogLine(address, second, "POST", "/login", status, 300 + len(found), 10))
        if in_a_row >= 3:
            due.add(address)
    asked = (
        "the addresses whose requests of status 401 at least "
        "three times in a row (counting this address's requests "
        "alone) were followed by one of status 200 from the "
        "same address, each once, in the order of their letters."
    )
    pipe = "awk '$5==401 {n[$1]++} $5==200 {if (n[$1]>=3) print $1; n[$1]=0}' LOG | sort -u"
    return _asked(rng, found, asked, sorted(due), pipe) if due else _repeated(rng)


def _errors(rng: random.Random) -> TerminalTask:
    found = events(rng)
    due = [event.line for event in found if event.level == "ERROR"]
    return _told(rng, found, "the lines of the level ERROR, as they stand.", due, "grep -E '^[^ ]+ ERROR ' LOG")


def _last(rng: random.Random) -> TerminalTask:
    found = events(rng)
    service = rng.choice([event.service for event in found])
    due = [[event.line for event in found if event.service == service][-1]]
    asked = f'the last line of the service "{service}".'
    return _told(rng, found, asked, due, f"awk '$3==\"{service}\"' LOG | tail -n 1")


def _levels(rng: random.Random) -> TerminalTask:
    found = events(rng)
    counts = Counter((event.service, event.level) for event in found)
    asked = (
        "for each service that occurs its number of WARNING and "
        "of ERROR lines: the service, both numbers, separated by "
        "blanks, the services from A to Z."
    )
    due = [f"{s} {counts[s, 'WARNING']} {counts[s, 'ERROR']}" for s in sorted({e.service for e in found})]
    pipe = (
        'awk \'{s[$3]=1} $2=="WARNING" {w[$3]++} $2=="ERROR" {e[$3]++} '
        "END {for (k in s) print k, w[k]+0, e[k]+0}' LOG | sort"
    )
    return _told(rng, found, asked, due, pipe)


def _split(rng: random.Random) -> TerminalTask:
    found = events(rng)
    log, folder = f"{words(rng, 1)[0]}.log", words(rng, 1)[0] + "-logs"
    text = (
        f"{log} is the log of several services {_EVENT}. Make for "
        f"each service a file {folder}/SERVICE.log with its lines "
        "in their order, as they stand."
    )
    services = sorted({event.service for event in found})
    checks = tuple(has_text(f"{folder}/{s}.log", text_of([e.line for e in found if e.service == s])) for s in services)
    steps = (f"mkdir {folder}", f'awk \'{{print > ("{folder}/" $3 ".log")}}\' {log}')
    return TerminalTask(text, {log: text_of([e.line for e in found])}, steps, checks, preview=(log,))


def _requests(rng: random.Random) -> TerminalTask:
    found = events(rng)
    seen: dict[str, set[str]] = defaultdict(set)
    for event in found:
        seen[event.request].add(event.service)
    due = sorted(request for request, services in seen.items() if len(services) >= 3)
    asked = "the ids of the requests (without req=) that at least three services have lines of, from A to Z."
    pipe = (
        "awk '{print $4, $3}' LOG | sort -u | awk '{n[substr($1,5)]++} END {for (k in n) if (n[k]>=3) print k}' | sort"
    )
    return _told(rng, found, asked, due, pipe) if due else _requests(rng)


def _durations(rng: random.Random) -> TerminalTask:
    jobs, second, lines, due = words(rng, 8), 7 * 3600, [], {}
    marks = sorted(((rng.randint(0, 4000), job) for job in jobs for _ in (0, 1)), key=lambda mark: (mark[0], mark[1]))
    begun: dict[str, int] = {}
    for place, (moment, job) in enumerate(marks):
        now = second + moment + place
        clock = f"{now // 3600:02}:{now // 60 % 60:02}:{now % 60:02}"
        if job in begun:
            due[job] = now - begun[job]
        begun.setdefault(job, now)
        lines.append(f"{clock} {'end' if job in due else 'begin'} {job}")
    log, out = f"{words(rng, 1)[0]}-jobs.log", _out(rng)
    text = (
        f"{log} says when jobs began and ended (time, begin or "
        f"end, job). Write to {out} for each job a line with it, a "
        "blank and its duration in seconds, the longest first, equal ones from A to Z."
    )
    ranked = sorted(due.items(), key=lambda item: (-item[1], item[0]))
    pipe = (
        'awk \'{split($1,t,":"); s=t[1]*3600+t[2]*60+t[3]} '
        '$2=="begin" {b[$3]=s} $2=="end" {print $3, s-b[$3]}\' '
        f"{log} | sort -k2,2nr -k1,1 > {out}"
    )
    return TerminalTask(
        text, {log: text_of(lines)}, (pipe,), (has_text(out, text_of([f"{j} {s}" for j, s in ranked])),)
    )


def _trace(rng: random.Random) -> TerminalTask:
    """Print the complete first traceback."""
    found, lines, due = events(rng, 24), list[str](), list[str]()
    places = sorted(rng.sample(range(4, 22), 2))
    for place, event in enumerate(found):
        lines.append(event.line)
        if place in places:
            trace = ["Traceback:", *(f"  at {word}:{rng.randint(1, 99)}" for word in words(rng, 3))]
            trace.append(f"  {rng.choice(('ValueError', 'KeyError', 'OSError'))}: {rng.choice(words(rng, 2))}")
            lines += trace
            due = due or [event.line, *trace]
    log, out = f"{words(rng, 1)[0]}.log", _out(rng)
    text = (
        f"In {log} some lines are followed by a traceback, which "
        'begins with "Traceback:" and goes on with indented lines. '
        f"Write the first traceback to {out}, with the line before it as its first line."
    )
    pipe = (
        f"awk '/^Traceback:/ {{if (on) exit; on=1; print p; print; next}} "
        f"on && /^ / {{print; next}} on {{exit}} {{p=$0}}' {log} > {out}"
    )
    return TerminalTask(text, {log: text_of(lines)}, (pipe,), (has_text(out, text_of(due)),), preview=(log,))


def _merge(rng: random.Random) -> TerminalTask:
    """Merge the logs of several machines by time; the older ones are compressed."""
    found = events(rng, 40)
    base = words(rng, 1)[0]
    parts: list[list[str]] = [[], [], []]
    for event in found:
        rng.choice(parts).append(event.line)
    files: dict[str, str | bytes] = {f"{base}/node{n}.log": text_of(part) for n, part in enumerate(parts)}
    files[f"{base}/node1.log.gz"] = gzip.compress(str(files.pop(f"{base}/node1.log")).encode(), mtime=0)
    out = _out(rng, ".log")
    text = (
        f"In the folder {base} lie the logs of three machines, one "
        "of them packed with gzip. Every line begins with its time. "
        f"Write all their lines in the order of time to {out}, and leave the logs as they are."
    )
    steps = (f"(cat {base}/*.log; zcat {base}/*.log.gz) | sort > {out}",)
    return TerminalTask(text, files, steps, (has_text(out, text_of([event.line for event in found])),))


def _report(rng: random.Random) -> TerminalTask:
    found = hits(rng)
    log, out = f"{words(rng, 1)[0]}-access.log", _out(rng, ".json")
    failed = [hit for hit in found if hit.status >= 400]
    counts = Counter(hit.path for hit in failed)
    worst = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[0][0]
    due = {
        "requests": len(found),
        "failed": len(failed),
        "addresses": len({hit.address for hit in found}),
        "worst_path": worst,
        "statuses": {str(s): n for s, n in sorted(Counter(hit.status for hit in found).items(), key=lambda i: i[0])},
    }
    text = (
        f"{log} is an access log {_FORM}. Write to {out} a JSON "
        "object with the keys requests (how many lines), failed (how "
        "many have a status of 400 or more), addresses (how "
        "many different ones), worst_path (the path with most "
        "failed requests, of equal ones the first from A to Z) "
        "and statuses (an object: status to number of requests)."
    )
    program = (
        "import json,sys\nfrom collections import Counter\n"
        f'r=[l.split() for l in open("{log}")]\nb=[x for x in r if int(x[4])>=400]\n'
        'c=Counter(x[3] for x in b)\nd={"requests":len(r),"failed":len(b),"addresses":len({x[0] for x in r}),'
        '"worst_path":min(c,key=lambda k:(-c[k],k)),"statuses":Counter(x[4] for x in r)}\n'
        f'json.dump(d,open("{out}","w"))'
    )
    files = {log: text_of([hit.line for hit in found])}
    return TerminalTask(
        text, files, (f"python3 -c '{program}'",), (has_text(out, json.dumps(due), "json"),), preview=(log,)
    )


def _correlate(rng: random.Random) -> TerminalTask:
    """Find requests that are in one log and not in another."""
    ids = [f"{n:05x}" for n in rng.sample(range(16**5), 30)]
    sent, got = ids[:26], [*ids[:8], *ids[11:26], *ids[26:]]
    rng.shuffle(got)
    one, two = (f"{word}.log" for word in words(rng, 2))
    out = _out(rng)
    files = {
        one: text_of([f"{9 + n // 20}:{n % 20:02}:00 sent id={i} bytes={100 + n}" for n, i in enumerate(sent)]),
        two: text_of([f"{10 + n // 20}:{n % 20:02}:30 received id={i}" for n, i in enumerate(got)]),
    }
    text = (
        f"{one} says which messages were sent, {two} which were "
        f"received, both by id. Write to {out} the ids that were sent "
        "and not received, each on a line, in the order in which they were sent."
    )
    pipe = f'awk \'{{sub("id=","",$3)}} NR==FNR {{g[$3]=1; next}} !($3 in g) {{print $3}}\' {two} {one} > {out}'
    return TerminalTask(text, files, (pipe,), (has_text(out, text_of(ids[8:11])),), preview=(one, two))


def _anonymous(rng: random.Random) -> TerminalTask:
    """Anonymise the addresses of a log in place."""
    found = hits(rng)
    log = f"{words(rng, 1)[0]}-access.log"
    due = []
    for hit in found:
        first, _ = hit.address.rsplit(".", 1)
        due.append(hit.line.replace(hit.address, f"{first}.0", 1))
    text = (
        f"{log} is an access log {_FORM}. Change the file itself: "
        "in each address the number behind the last dot becomes 0; "
        "nothing else changes."
    )
    steps = (f"sed -i -E 's/^([0-9]+\\.[0-9]+\\.[0-9]+)\\.[0-9]+ /\\1.0 /' {log}",)
    files = {log: text_of([hit.line for hit in found])}
    return TerminalTask(text, files, steps, (has_text(log, text_of(due), "bytes"),), changes=(log,), preview=(log,))


def _gap(rng: random.Random) -> TerminalTask:
    """Find the longest time without entries."""
    found = events(rng, 30)
    gaps = [(b.second - a.second, a, b) for a, b in itertools.pairwise(found)]
    longest = max(gap for gap, _, _ in gaps)
    if sum(gap == longest for gap, _, _ in gaps) > 1:
        return _gap(rng)
    gap, before, after = max(gaps, key=lambda one: one[0])
    asked = (
        "the longest time without a line: the time of the line "
        "before it, the time of the line after it and the seconds "
        "between them, separated by blanks."
    )
    pipe = (
        'awk \'{split($1,t,":"); s=t[1]*3600+t[2]*60+t[3]} NR>1 && s-p>m {m=s-p; r=q " " $1 " " m} '
        "{p=s; q=$1} END {print r}' LOG"
    )
    return _told(rng, found, asked, [f"{before.clock} {after.clock} {gap}"], pipe)


def _flapping(rng: random.Random) -> TerminalTask:
    """Count how often services changed between up and down."""
    names, lines, state = words(rng, 4), [], dict[str, str]()
    changes: Counter[str] = Counter()
    for minute in range(50):
        name, now = rng.choice(names), rng.choice(("up", "down"))
        changes[name] += state.get(name, now) != now
        state[name] = now
        lines.append(f"{8 + minute // 60:02}:{minute % 60:02} {name} is {now}")
    log, out = f"{words(rng, 1)[0]}-state.log", _out(rng)
    text = (
        f'{log} has lines such as "08:00 {names[0]} is up". Write to {out} '
        "for each name that occurs a line with it, its last state and how "
        "often it changed its state, separated by blanks, the names from A to Z. Its first line is no change."
    )
    pipe = (
        "awk '($2 in s) && s[$2]!=$4 {n[$2]++} {s[$2]=$4} END {for (k in s) print k, s[k], n[k]+0}' "
        f"{log} | sort > {out}"
    )
    due = [f"{name} {state[name]} {changes[name]}" for name in sorted(state)]
    return TerminalTask(text, {log: text_of(lines)}, (pipe,), (has_text(out, text_of(due)),), preview=(log,))


MAKERS: Final = (
    TaskMaker("logs/status", 1, _status),
    TaskMaker("logs/failures", 1, _failures),
    TaskMaker("logs/errors", 1, _errors),
    TaskMaker("logs/last", 1, _last),
    TaskMaker("logs/methods", 2, _methods),
    TaskMaker("logs/visitors", 2, _visitors),
    TaskMaker("logs/busiest", 2, _busiest),
    TaskMaker("logs/hours", 2, _hours),
    TaskMaker("logs/anonymous", 2, _anonymous),
    TaskMaker("logs/window", 2, _window),
    TaskMaker("logs/split", 2, _split),
    TaskMaker("logs/levels", 3, _levels),
    TaskMaker("logs/traffic", 3, _traffic),
    TaskMaker("logs/slowest", 3, _slowest),
    TaskMaker("logs/median", 3, _median),
    TaskMaker("logs/merge", 3, _merge),
    TaskMaker("logs/requests", 3, _requests, held_out=True),
    TaskMaker("logs/correlate", 3, _correlate),
    TaskMaker("logs/trace", 3, _trace),
    TaskMaker("logs/durations", 4, _durations),
    TaskMaker("logs/report", 4, _report),
    TaskMaker("logs/gap", 4, _gap),
    TaskMaker("logs/flapping", 4, _flapping, held_out=True),
    TaskMaker("logs/repeated", 4, _repeated),
)
