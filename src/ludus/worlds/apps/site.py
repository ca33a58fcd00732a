"""Applications as data: tables of records, the pages that show them, and the forms that change them.

The paths of a site are `/` (home), `/TABLE` (a list, with `?group=` or `?q=`), `/TABLE/new` (form of a new row),
`/TABLE/ID` (a row) and `/TABLE/ID/ACTION` (form of an action on a row). Only submitted forms change the tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from pydantic import BaseModel, ConfigDict

from ludus.worlds.apps.pages import BUTTON, Element, Line, SitePage, as_document, clean, form_of

Row = dict[str, str]
Tables = dict[str, dict[str, Row]]
"""Table -> id of a row -> column -> value."""
State = list[tuple[str, str, tuple[tuple[str, str], ...]]]
"""Sorted rows: table, id (`new` for all new rows), and the columns that are not empty."""

MAX_ROWS = 6
"""Maximum number of rows on a page."""
FIRST_NEW = 100
"""Id of the first new row."""
SEARCH = "Search"


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ActionSpec(_Data):
    """A button on the page of a row, or, with `fields`, a link to a form with a button `submit`.

    It changes the row, or creates one in `table`, with the columns of the form and `values`, templates of the row's
    columns. A field in `values` starts with that value.
    """

    label: str
    table: str = ""
    fields: tuple[str, ...] = ()
    values: Mapping[str, str] = {}
    submit: str = "Save"
    deletes: bool = False


class RowsSpec(_Data):
    """How `count` rows are drawn: `values` by column, patterns of `tasks.draw_text`, distinct in `unique`."""

    count: int
    values: Mapping[str, str]
    unique: tuple[str, ...]


class SiteTable(_Data):
    """A table. Its columns are texts, except `choices`, `flags` (`yes` or `no`) and `links` to rows of other tables.

    A list shows the columns `listed`, the first as a link; the page of a row those of `shown`. Lists show the rows of
    one value of the column `group`, or else have a search field. The column `color` is the CSS color of a row in lists.
    Other rows have columns that are not shown.
    """

    title: str
    listed: tuple[str, ...]
    shown: tuple[str, ...]
    choices: Mapping[str, tuple[str, ...]] = {}
    flags: tuple[str, ...] = ()
    links: Mapping[str, str] = {}
    group: str = ""
    color: str = ""
    new: ActionSpec | None = None
    actions: tuple[ActionSpec, ...] = ()
    rows: tuple[RowsSpec, ...]

    def action(self, label: str) -> ActionSpec | None:
        """Return an action by its label; `new` is the form of a new row."""
        return self.new if label == "new" else next((one for one in self.actions if one.label == label), None)


class SiteStep(NamedTuple):
    """A step of a solution: open a list (`/TABLE?group=`) or a row, or submit a form or press a button of a row.

    `query` is what to search for if the row is not in the list; by default its title.
    """

    path: str
    fields: Mapping[str, str] = {}
    query: str = ""

    @property
    def place(self) -> tuple[str, str, str]:
        """Table, id of the row (empty for none), and label of the action (empty for a page to read)."""
        table, id_, label = (*place_of(self.path).split("/")[1:], "", "")[:3]
        return (table, "", "new") if id_ == "new" else (table, id_, label)


class _Blanks(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return ""


class Site:
    """The applications in an episode, which owns `tables`. `opened` and `submitted` are the paths used so far."""

    def __init__(self, title: str, specs: Mapping[str, SiteTable], tables: Mapping[str, Mapping[str, Row]]) -> None:
        self.title, self.specs = title, specs
        self.tables: Tables = {name: {id_: dict(row) for id_, row in rows.items()} for name, rows in tables.items()}
        self.opened: set[str] = set()
        self.submitted: list[str] = []
        self._first = {name: frozenset(rows) for name, rows in tables.items()}
        self._new_ids = count(FIRST_NEW)
        self._menu = Line([Element("link", spec.title, target=f"/{name}") for name, spec in specs.items()])

    @property
    def state(self) -> State:
        """The content of the tables, without the ids of new rows."""
        return sorted(
            (table, id_ if id_ in self._first[table] else "new", tuple(sorted(item for item in row.items() if item[1])))
            for table, rows in self.tables.items()
            for id_, row in rows.items()
        )

    def page(self, path: str) -> SitePage:
        """Return the page at a path, and count it as opened; a page without content if there is none."""
        parts, query = _split(path)
        self.opened.add(path.partition("?saved")[0])
        table = parts[0] if parts else ""
        spec = self.specs.get(table)
        if spec is None:
            return SitePage("Not found" if parts else self.title, [self._menu])
        if len(parts) == 1:
            return self._list(table, spec, query)
        id_, label = parts[1], (parts[2] if len(parts) == 3 else "")
        row = {} if id_ == "new" else self.tables[table].get(id_)
        action = spec.action("new" if id_ == "new" else label)
        if row is not None and action is not None and action.fields:
            return self._form(table, spec, action, row)
        if not row or label:
            return SitePage("Not found", [self._menu])
        return self._row(table, spec, id_, row, "saved" in query)

    def document(self, path: str) -> str:
        """Return the page at a path as an HTML document."""
        return as_document(self.page(path))

    def submit(self, path: str, form: Mapping[str, str]) -> str | None:
        """Apply a form; return the path to go to, or None if the page has no such button."""
        (*parts,), _ = _split(path)
        spec, button = self.specs.get(parts[0] if parts else ""), form.get(BUTTON, "")
        if spec is None:
            return None
        if len(parts) == 1:
            return f"/{parts[0]}?q={quote(clean(form.get(SEARCH, '')))}" if button == SEARCH else None
        if parts[1] == "new":
            action, row = spec.new, {}
        else:
            action = spec.action(parts[2] if len(parts) == 3 else button)
            row = self.tables[parts[0]].get(parts[1], {})
        has_form = len(parts) == 3 or parts[1] == "new"
        if action is None or (not row and parts[1] != "new") or has_form != bool(action.fields):
            return None
        if has_form and button != action.submit:
            return None
        self.submitted.append("/" + "/".join(parts if has_form else (*parts, button)))
        return self._apply(parts[0], parts[1], action, form)

    def _apply(self, table: str, id_: str, action: ActionSpec, form: Mapping[str, str]) -> str:
        row = self.tables[table].get(id_, {})
        changed = {column: value.format_map(_Blanks(row, id=id_)) for column, value in action.values.items()}
        into = action.table or table
        spec = self.specs[into]
        for column in action.fields:
            value = clean(form.get(column.capitalize(), ""))
            changed[column] = ("yes" if value == "yes" else "no") if column in spec.flags else value
            if column in spec.choices and value not in spec.choices[column]:
                return f"/{table}"
        if action.deletes:
            del self.tables[table][id_]
        elif row and not action.table:
            row.update(changed)
            return f"/{table}/{id_}?saved=1"
        else:
            self.tables[into][str(next(self._new_ids))] = changed
        return f"/{into}?saved=1"

    def _list(self, table: str, spec: SiteTable, query: Mapping[str, str]) -> SitePage:
        rows, lines, title = list(self.tables[table].items()), [self._menu], spec.title
        if "saved" in query:
            lines.append(Line([Element("text", "Saved.")]))
        if spec.group:
            groups = spec.choices[spec.group]
            group = query.get("group", groups[0])
            title = f"{title}: {group}"
            rows = [(id_, row) for id_, row in rows if row.get(spec.group) == group]
            lines.append(Line([Element("link", one, target=f"/{table}?group={quote(one)}") for one in groups]))
        else:
            words = query.get("q", "")
            lines.append(Line([Element("textbox", SEARCH, words), Element("button", SEARCH)]))
            rows = [(id_, row) for id_, row in rows if _matches(row, spec.listed, words)]
        for id_, row in rows[:MAX_ROWS]:
            link = Element("link", row.get(spec.listed[0], "") or "-", target=f"/{table}/{id_}")
            others = (Element("text", row[column]) for column in spec.listed[1:] if row.get(column))
            lines.append(Line([link, *others], in_table=True, color=row.get(spec.color, "")))
        if not rows:
            lines.append(Line([Element("text", "Nothing here.")]))
        if spec.new is not None:
            lines.append(Line([Element("link", spec.new.label, target=f"/{table}/new")]))
        return SitePage(title, lines)

    def _row(self, table: str, spec: SiteTable, id_: str, row: Row, is_saved: bool) -> SitePage:
        lines = [self._menu, *([Line([Element("text", "Saved.")])] if is_saved else [])]
        for column in spec.shown:
            value = row.get(column, "")
            shown = [Element("text", f"{column.capitalize()}: {value}".rstrip())]
            if column in spec.links:
                linked = self.tables[spec.links[column]].get(value, {})
                name = linked.get(self.specs[spec.links[column]].listed[0], "") or "-"
                shown = [Element("text", f"{column.capitalize()}:")]
                shown.append(Element("link", name, target=f"/{spec.links[column]}/{value}"))
            lines.append(Line(shown))
        if spec.actions:
            lines.append(Line([_control(f"/{table}/{id_}", one) for one in spec.actions]))
        return SitePage(row.get(spec.listed[0], "") or "-", lines)

    def _form(self, table: str, spec: SiteTable, action: ActionSpec, row: Row) -> SitePage:
        spec = self.specs[action.table or table]
        lines = [self._menu]
        for column in action.fields:
            value = row.get(column, "") if row and not action.table else ""
            value = action.values[column].format_map(_Blanks(row)) if column in action.values else value
            name = column.capitalize()
            if column in spec.flags:
                lines.append(Line([Element("checkbox", name, value or "no")]))
            elif column in spec.choices:
                options = spec.choices[column]
                lines.append(Line([Element("select", name, value if value in options else options[0], options)]))
            else:
                lines.append(Line([Element("textbox", name, value)]))
        return SitePage(action.label, [*lines, Line([Element("button", action.submit)])])


def _matches(row: Row, columns: Sequence[str], words: str) -> bool:
    return any(words.casefold() in row.get(column, "").casefold() for column in columns)


def _control(path: str, action: ActionSpec) -> Element:
    if action.fields:
        return Element("link", action.label, target=f"{path}/{quote(action.label)}")
    return Element("button", action.label)


def _split(path: str) -> tuple[list[str], dict[str, str]]:
    url = urlsplit(path)
    return [unquote(part) for part in url.path.split("/") if part], dict(parse_qsl(url.query))


def place_of(path: str) -> str:
    """Return a path without its query."""
    return path.partition("?")[0]


def pending(site: Site, steps: Sequence[SiteStep]) -> list[SiteStep]:
    """Return the steps that are not done: rows not opened, and forms not submitted as often as they occur."""
    counts, left = Counter(site.submitted), []
    for step in steps:
        label = step.place[2]
        is_done = counts[step.path] > 0 if label else step.path in site.opened
        counts[step.path] -= bool(label)
        if not is_done:
            left.append(step)
    return left


def perform(site: Site, steps: Sequence[SiteStep]) -> bool:
    """Submit the forms of the steps; return whether each of them changed the tables."""
    changes = True
    for step in steps:
        before, (table, id_, label) = site.state, step.place
        if not label:
            continue
        action = site.specs[table].action(label)
        if action is not None and action.fields:
            given = {column.capitalize(): value for column, value in step.fields.items()}
            items = [one._replace(value=given.get(one.name, one.value)) for one in site.page(step.path).items]
            site.submit(step.path, form_of(items, action.submit))
        else:
            site.submit(f"/{table}/{id_}", {BUTTON: label})
        changes = changes and site.state != before
    return changes


def step_action(site: Site, path: str, items: Sequence[Element], step: SiteStep) -> str | None:
    """Return the action that leads from the page at `path` with the elements `items` towards the end of a step."""
    table, id_, label = step.place
    place, row = place_of(path), site.tables[table].get(id_)
    if "?" in step.path:
        return _clicking(items, "target", step.path) or _clicking(items, "target", f"/{table}")
    if label != "new" and row is None:
        return None
    if place == step.path:
        return _filling(items, step)
    if id_ and label and place == f"/{table}/{id_}":
        return _clicking(items, "name", label)
    spec = site.specs[table]
    target = f"/{table}/{id_ or 'new'}"
    if (action := _clicking(items, "target", target)) is not None:
        return action
    if place != f"/{table}" or row is None:
        return _clicking(items, "target", f"/{table}")
    if spec.group:
        return _clicking(items, "target", f"/{table}?group={quote(row[spec.group])}")
    return _filling(items, SiteStep("", {SEARCH: step.query or row[spec.listed[0]]}))


def _clicking(items: Sequence[Element], attribute: str, value: str) -> str | None:
    for number, one in enumerate(items, 1):
        if (one.name if attribute == "name" else one.target) == value:
            return f"click {number}"
    return None


def _filling(items: Sequence[Element], step: SiteStep) -> str | None:
    given = {column.capitalize(): value for column, value in step.fields.items()}
    for number, one in enumerate(items, 1):
        if one.role in ("textbox", "select", "checkbox") and one.value != given.get(one.name, one.value):
            verb = {"textbox": "type", "select": "select"}.get(one.role)
            return f"{verb} {number} {given[one.name]}" if verb else f"click {number}"
    return next((f"click {number}" for number, one in enumerate(items, 1) if one.role == "button"), None)
