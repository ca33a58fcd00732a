"""Other names of parameters, and the words by which a question asks for one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ludus.worlds.functions.domains.catalogue import Function, Param

_GIVEN = {
    "title": "name heading label_text",
    "date": "day on_day calendar_day",
    "time": "hour at_time clock_time",
    "guest": "person who invitee",
    "limit": "max_items top at_most",
    "minutes": "duration length num_minutes",
    "name": "label called full_name",
    "to": "recipient address send_to",
    "subject": "topic about headline",
    "body": "text content message_body",
    "phone": "number phone_number mobile",
    "sender": "from_person author written_by",
    "text": "content words passage",
    "language": "target_language into lang",
    "label": "name tag caption",
    "members": "people who participants",
    "member": "person who participant",
    "content": "text body file_text",
    "folder": "directory into_folder folder_path",
    "email": "address recipient mail_address",
    "origin": "from_city departure start_city",
    "destination": "to_city arrival end_city",
    "passenger": "traveller person on_behalf_of",
    "city": "town location place_name",
    "stars": "rating min_stars quality",
    "nights": "num_nights stay length_of_stay",
    "days": "num_days duration rental_days",
    "driver": "person who driven_by",
    "unit": "scale degrees_in temperature_unit",
    "account": "account_name which_account bank_account",
    "amount": "sum value euros",
    "source": "from_account debit paid_from",
    "target": "to_account credit paid_into",
    "person": "payee recipient receiver",
    "ticker": "symbol stock company_code",
    "shares": "quantity num_shares how_many",
    "currency": "target_currency into currency_name",
    "customer": "client person billed_to",
    "room": "location where_in room_name",
    "appliance": "device kind_of_device gadget",
    "degrees": "temperature target_temperature celsius",
    "percent": "level value per_cent",
    "door": "door_name which_door entrance",
    "daily": "repeat every_day recurring",
    "genre": "kind category film_type",
}

_IDS = (
    "event reminder message group file flight hotel booking alert transfer order invoice device timer track "
    "playlist film"
)

ALIASES: Mapping[str, tuple[str, ...]] = {name: tuple(text.split()) for name, text in _GIVEN.items()} | {
    f"{noun}_id": (noun, f"{noun}_code", f"{noun}_ref", f"id_of_{noun}") for noun in _IDS.split()
}
"""Other names by the catalogue's; the last of each is for the split `composition`."""

_OWN_ASKS: Mapping[str, tuple[str, ...]] = {
    "origin": ("origin", "from", "depart", "departure", "leave", "start"),
    "destination": ("destination", "arrival", "arrive", "fly", "where", "city"),
    "source": ("source", "from"),
    "target": ("target", "receive", "credit"),
    "subject": ("subject", "about", "topic"),
    "nights": ("nights", "how long", "how many", "stay"),
    "days": ("days", "how long", "how many"),
    "shares": ("shares", "how many", "how much"),
    "stars": ("stars", "how many", "rating"),
}
"""Where the phrases of the kind are too few or too many: a function has several parameters of it."""

FILLERS = frozenset(re.findall(r"\w+", "how what which for of to in at on by the a an is it one"))
"""Words that stand in any question. Alone they ask for nothing, and they count for no kind."""


def ask_phrases(param: Param, offered: str) -> frozenset[frozenset[str]]:
    """Phrases of which a question for the parameter has one, as words; `offered` is its name in the task.

    Each is a phrase of its kind, its name, or another name for it; a name has all its words.
    """
    said = (words_of(phrase) for phrase in _OWN_ASKS.get(param.name, param.of.asks))
    names = (frozenset(name.split("_")) - _EMPTY for name in (param.name, offered, *ALIASES[param.name]))
    return frozenset(phrase for phrase in (*said, *names) if phrase - FILLERS or len(phrase) > 1)


def other_words(function: Function, asked: Param) -> dict[str, frozenset[str]]:
    """For each other required parameter, words that ask for it and not for the asked one.

    Of identifiers none, as a question names what it is about, and of persons only those that ask.
    """
    taken = frozenset({"from"}).union(*ask_phrases(asked, asked.name))
    return {
        param.name: _words_for(param) - taken - _EMPTY
        for param in function.required
        if param != asked and not param.of.letter
    }


def _words_for(param: Param) -> frozenset[str]:
    asking = frozenset(param.of.asks) & _ASKING
    if param.kind in ("person", "people"):
        return asking - {"name"}
    return asking | {*param.name.split("_"), *ALIASES[param.name][0].split("_")}


def words_of(text: str) -> frozenset[str]:
    """The words of a text in lower case."""
    return frozenset(re.findall(r"[\w']+", text.casefold()))


_EMPTY = words_of("of in at on by num id is a the to into what which one most send add")
"""Words that say nothing of what is asked for."""
_ASKING = words_of("who whom where when name called")
"""Words that ask, and are nouns of nothing that a question may be about."""
