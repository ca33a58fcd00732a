"""Messaging: contacts, mail, short messages and groups."""

from __future__ import annotations

from ludus.worlds.functions.domains.catalogue import Function, Gift, Param
from ludus.worlds.functions.domains.kinds import CITIES, TEXTS
from ludus.worlds.functions.domains.state import DomainState, Row


def get_contact(state: DomainState, name: str) -> Row:
    """Look up a person's contact."""
    email, phone = state.issue("email", name), state.issue("phone", name)
    return {"email": email, "phone": phone, "city": state.pick(CITIES, "home", name)}


def send_email(state: DomainState, to: str, subject: str, body: str) -> Row:
    """Send an email."""
    message_id = state.issue("message", to, subject, body)
    state.need("message", message_id).update(to=to, subject=subject, body=body)
    return {"message_id": message_id}


def send_text(state: DomainState, phone: str, body: str) -> Row:
    """Send a text message."""
    message_id = state.issue("message", phone, body)
    state.need("message", message_id).update(to=phone, body=body)
    return {"message_id": message_id}


def search_messages(state: DomainState, sender: str) -> Row:
    """Find the newest message of a sender."""
    message_id = state.issue("message", "from", sender)
    state.need("message", message_id).setdefault("body", state.pick(TEXTS, sender))
    return {"message_id": message_id}


def forward_message(state: DomainState, message_id: str, to: str) -> Row:
    """Forward a message."""
    state.need("message", message_id)["to"] = to
    return {"message_id": message_id, "to": to}


def delete_message(state: DomainState, message_id: str) -> Row:
    """Delete a message."""
    state.drop("message", message_id)
    return {"deleted": message_id}


def read_message(state: DomainState, message_id: str) -> Row:
    """Read a message."""
    row = state.need("message", message_id)
    return {"text": row.setdefault("body", state.pick(TEXTS, message_id))}


def translate_text(state: DomainState, text: str, language: str) -> Row:
    """Translate a text."""
    words = [word[::-1] for word in text.split()]
    return {"text": " ".join([language.lower()[:2], *words]), "words": len(words)}


def create_group(state: DomainState, label: str, members: list[str]) -> Row:
    """Open a chat group."""
    group_id = state.issue("group", label, *members)
    state.need("group", group_id).update(label=label, members=", ".join(members))
    return {"group_id": group_id}


def add_to_group(state: DomainState, member: str, group_id: str) -> Row:
    """Add a person to a chat group."""
    row = state.need("group", group_id)
    row["members"] = f"{row.get('members', '')}, {member}".strip(", ")
    return {"members": row["members"]}


_MESSAGE = Param("message_id", "message")
_BODY = Param("body", "text", "saying {}")
_SENT = (Gift("message_id", "message"),)

FUNCTIONS = (
    Function(
        "get_contact",
        "messaging",
        ("look up the contact", "find the details of"),
        (Param("name", "person"),),
        get_contact,
        (Gift("email", "email"), Gift("phone", "phone"), Gift("city", "city")),
    ),
    Function(
        "send_email",
        "messaging",
        ("send an email", "write an email"),
        (Param("to", "email", "to {}"), Param("subject", "subject", "about {}"), _BODY),
        send_email,
        _SENT,
    ),
    Function(
        "send_text",
        "messaging",
        ("send a text message", "send an SMS"),
        (Param("phone", "phone", "to {}"), _BODY),
        send_text,
        _SENT,
    ),
    Function(
        "search_messages",
        "messaging",
        ("find the newest message",),
        (Param("sender", "person", "from {}"),),
        search_messages,
        _SENT,
    ),
    Function("forward_message", "messaging", ("forward",), (_MESSAGE, Param("to", "email", "to {}")), forward_message),
    Function("delete_message", "messaging", ("delete", "remove"), (_MESSAGE,), delete_message),
    Function("read_message", "messaging", ("read", "open"), (_MESSAGE,), read_message, (Gift("text", "text"),)),
    Function(
        "translate_text",
        "messaging",
        ("translate",),
        (Param("text", "text"), Param("language", "language", "into {}")),
        translate_text,
        (Gift("text", "text"),),
    ),
    Function(
        "create_group",
        "messaging",
        ("open a chat group", "start a group chat"),
        (Param("label", "label", "called {}"), Param("members", "people", "with {}")),
        create_group,
        (Gift("group_id", "group"),),
    ),
    Function(
        "add_to_group",
        "messaging",
        ("add",),
        (Param("member", "person"), Param("group_id", "group", "to {}")),
        add_to_group,
    ),
)
