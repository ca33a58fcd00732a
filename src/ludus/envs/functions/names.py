"""Other names of parameters, and the words by which a question asks for one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ludus.envs.functions.catalogue import Function, Param

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
    "destination": ("destination", "arrival", "fly", "where", "city"),
    "source": ("source", "from"),
    "target": ("target", "receive", "credit"),
    "subject": ("subject", "about", "topic"),
}
"""Where a function has several parameters of one kind, the words of the kind are not enough."""


def ask_words(param: Param, offered: str) -> frozenset[str]:
    """Words of which a question for the parameter has one; `offered` is its name in the task."""
    asks = _OWN_ASKS.get(param.name, param.of.asks)
    names = (param.name, offered, *ALIASES[param.name])
    parts = [word for name in names for word in name.split("_")]
    return frozenset({*asks, *parts} - _EMPTY)


def other_words(function: Function, asked: Param) -> dict[str, frozenset[str]]:
    """For each other required parameter, nouns that name it and not the asked one.

    Not for identifiers and persons: a question names what it is about, and whom it is for.
    """
    taken = ask_words(asked, asked.name) | {"from"}
    return {
        param.name: frozenset({*param.name.split("_"), *ALIASES[param.name][0].split("_")} - taken - _EMPTY)
        for param in function.required
        if param != asked and not param.of.letter and param.kind not in ("person", "people")
    }


def words_of(text: str) -> frozenset[str]:
    """The words of a text in lower case."""
    return frozenset(re.findall(r"[\w']+", text.casefold()))


_EMPTY = words_of("of in at on by num id is a the to into what which one most send add")
"""Words that say nothing of what is asked for."""
