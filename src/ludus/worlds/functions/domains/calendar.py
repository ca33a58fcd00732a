"""Calendar: events and reminders."""

from __future__ import annotations

from ludus.worlds.functions.domains.catalogue import Function, Gift, Param
from ludus.worlds.functions.domains.kinds import CITIES, DATES, TIMES, TITLES
from ludus.worlds.functions.domains.state import DomainState, Row


def _fill(state: DomainState, event_id: str) -> Row:
    """The row of an event, with what follows from its identifier."""
    row = state.need("event", event_id)
    row.setdefault("title", state.pick(TITLES, event_id, "title"))
    row.setdefault("date", state.pick(DATES, event_id, "date"))
    row.setdefault("city", state.pick(CITIES, event_id, "city"))
    return row


def create_event(state: DomainState, title: str, date: str, time: str) -> Row:
    """Add an event."""
    event_id = state.issue("event", title, date, time)
    state.need("event", event_id).update(title=title, date=date, time=time)
    return {"event_id": event_id}


def find_event(state: DomainState, title: str) -> Row:
    """Look up an event by title."""
    event_id = state.issue("event", "title", title)
    state.need("event", event_id).setdefault("title", title)
    row = _fill(state, event_id)
    return {"event_id": event_id, "date": row["date"], "city": row["city"]}


def move_event(state: DomainState, event_id: str, date: str) -> Row:
    """Change the date of an event."""
    _fill(state, event_id)["date"] = date
    return {"event_id": event_id, "date": date}


def cancel_event(state: DomainState, event_id: str) -> Row:
    """Cancel an event."""
    state.drop("event", event_id)
    return {"cancelled": event_id}


def invite_guest(state: DomainState, guest: str, event_id: str) -> Row:
    """Invite a person to an event."""
    row = state.need("event", event_id)
    row["guests"] = f"{row.get('guests', '')} {guest}".strip()
    return {"event_id": event_id, "guests": row["guests"]}


def list_events(state: DomainState, date: str, limit: int) -> Row:
    """List the events of a day."""
    event_id = state.issue("event", "list", date)
    state.need("event", event_id).setdefault("date", date)
    return {"count": min(limit, state.number(1, 4, date)), "first": event_id}


def set_reminder(state: DomainState, title: str, date: str, time: str) -> Row:
    """Set a reminder."""
    reminder_id = state.issue("reminder", title, date, time)
    state.need("reminder", reminder_id).update(title=title, date=date, time=time)
    return {"reminder_id": reminder_id}


def delete_reminder(state: DomainState, reminder_id: str) -> Row:
    """Delete a reminder."""
    state.drop("reminder", reminder_id)
    return {"deleted": reminder_id}


def find_free_time(state: DomainState, minutes: int, date: str) -> Row:
    """Find a free slot."""
    return {"time": state.pick(TIMES, "free", date), "minutes": minutes}


_EVENT = Param("event_id", "event")
_DATE = Param("date", "date", "on {}")
_TIME = Param("time", "time", "at {}")

FUNCTIONS = (
    Function(
        "create_event",
        "calendar",
        ("schedule", "add to my calendar"),
        (Param("title", "title"), _DATE, _TIME),
        create_event,
        (Gift("event_id", "event"),),
    ),
    Function(
        "find_event",
        "calendar",
        ("look up the event", "find my appointment"),
        (Param("title", "title"),),
        find_event,
        (Gift("event_id", "event"), Gift("date", "date"), Gift("city", "city")),
    ),
    Function("move_event", "calendar", ("move", "reschedule"), (_EVENT, Param("date", "date", "to {}")), move_event),
    Function("cancel_event", "calendar", ("cancel", "call off"), (_EVENT,), cancel_event),
    Function(
        "invite_guest",
        "calendar",
        ("send an invitation",),
        (Param("guest", "person", "to {}"), Param("event_id", "event", "for {}")),
        invite_guest,
    ),
    Function(
        "list_events",
        "calendar",
        ("list what is planned", "show my events"),
        (_DATE, Param("limit", "count", "showing at most {}", 5)),
        list_events,
        (Gift("first", "event"),),
    ),
    Function(
        "set_reminder",
        "calendar",
        ("remind me of", "set a reminder for"),
        (Param("title", "title"), _DATE, _TIME),
        set_reminder,
        (Gift("reminder_id", "reminder"),),
    ),
    Function("delete_reminder", "calendar", ("delete", "remove"), (Param("reminder_id", "reminder"),), delete_reminder),
    Function(
        "find_free_time",
        "calendar",
        ("find a free slot", "see when I am free"),
        (Param("minutes", "minutes", "for {} minutes"), _DATE),
        find_free_time,
        (Gift("time", "time"),),
    ),
)
