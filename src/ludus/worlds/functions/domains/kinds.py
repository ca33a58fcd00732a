"""Kinds of values that functions take and give: how they are drawn, said, asked for and referred to."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ludus.types import JSON

PEOPLE = [
    "Ana",
    "Ben",
    "Carla",
    "David",
    "Elif",
    "Felix",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Kira",
    "Leo",
    "Mara",
    "Nils",
    "Olga",
    "Pavel",
    "Quinn",
    "Rosa",
    "Sven",
    "Tara",
    "Umar",
    "Vera",
    "Wanda",
    "Xenia",
    "Yusuf",
    "Zoe",
    "Amir",
    "Bella",
    "Cyril",
    "Dora",
    "Emil",
    "Freya",
    "Goran",
    "Hanna",
    "Igor",
    "Jade",
    "Karim",
    "Lena",
    "Milo",
    "Nora",
]
CITIES = [
    "Paris",
    "Rome",
    "Oslo",
    "Madrid",
    "Vienna",
    "Lisbon",
    "Dublin",
    "Athens",
    "Prague",
    "Warsaw",
    "Berlin",
    "Zurich",
    "Turin",
    "Porto",
    "Lyon",
    "Geneva",
    "Krakow",
    "Malmo",
    "Bergen",
    "Ghent",
    "Seville",
    "Naples",
    "Lima",
    "Quito",
    "Cairo",
    "Tunis",
    "Accra",
    "Dakar",
    "Delhi",
    "Hanoi",
    "Osaka",
    "Seoul",
    "Perth",
    "Sydney",
    "Boston",
    "Denver",
    "Dallas",
    "Miami",
    "Austin",
    "Toronto",
]
TITLES = [
    "dentist",
    "team lunch",
    "budget review",
    "yoga class",
    "book club",
    "piano lesson",
    "project kickoff",
    "parent meeting",
    "car service",
    "board meeting",
    "garden party",
    "job interview",
    "chess night",
    "tax appointment",
    "design review",
    "haircut",
    "farewell drinks",
    "study group",
    "sales call",
    "house viewing",
    "eye test",
    "choir practice",
    "bike tour",
    "wine tasting",
    "code review",
    "dance class",
    "flu shot",
    "town hall",
    "ski trip",
    "pottery workshop",
]
TEXTS = [
    "see you soon",
    "happy birthday",
    "the train is late",
    "please call me",
    "dinner is ready",
    "thank you so much",
    "good luck today",
    "the door is open",
    "we won the game",
    "bring some bread",
    "all is well",
    "i am on my way",
    "the plan has changed",
    "get well soon",
    "wait for me",
    "the keys are inside",
    "meet me outside",
    "have a nice trip",
    "the boat leaves early",
    "sorry for the noise",
    "it starts to rain",
    "the cake is gone",
    "lights are off",
    "come home",
    "the test went fine",
    "water the plants",
    "feed the cat",
    "no news yet",
    "buy two tickets",
    "the shop is closed",
]
FILES = [
    "notes.txt",
    "report.pdf",
    "budget.csv",
    "photo.png",
    "plan.md",
    "thesis.pdf",
    "menu.txt",
    "letter.doc",
    "data.csv",
    "slides.ppt",
    "recipe.txt",
    "invoice.pdf",
    "draft.md",
    "logo.png",
    "poem.txt",
    "map.png",
    "contract.pdf",
    "todo.txt",
    "scores.csv",
    "readme.md",
    "diary.txt",
    "resume.pdf",
    "sketch.png",
    "agenda.md",
    "prices.csv",
    "story.txt",
    "manual.pdf",
    "guests.csv",
    "speech.doc",
    "quiz.md",
]
SONGS = [
    "Blue Harbor",
    "Paper Moon Road",
    "Silver Rain",
    "Golden Field",
    "Midnight Ferry",
    "Winter Letters",
    "Copper Sky",
    "Broken Compass",
    "Velvet River",
    "Lantern Song",
    "Empty Carousel",
    "Northern Tide",
    "Glass Garden",
    "Wild Orchard",
    "Slow Comet",
    "Hollow Drum",
    "Summer Static",
    "Marble Stairs",
    "Echo Valley",
    "Little Thunder",
]
LABELS = [
    "pasta",
    "tea",
    "laundry",
    "workout",
    "bread",
    "nap",
    "eggs",
    "pizza",
    "parking",
    "reading",
    "meeting",
    "bath",
    "rice",
    "cake",
]
ROOMS = [
    "kitchen",
    "bedroom",
    "bathroom",
    "hall",
    "office",
    "garage",
    "attic",
    "cellar",
    "nursery",
    "library",
    "studio",
    "porch",
]
DATES = tuple(
    f"{month} {day}"
    for month in ("January", "March", "April", "May", "June", "July", "August", "October")
    for day in range(1, 29)
)
TIMES = tuple(f"{hour:02d}:{minute:02d}" for hour in range(7, 22) for minute in (0, 15, 30, 45))


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of value.

    `type` is that of JSON schema. `pool` holds all values; for identifiers it is empty, `letter` begins them
    and `tail` ends them. `literal` says a value in a request, `reference` one that an earlier call gives.
    `asks` are phrases by which a question asks for it: a question has all words of one.
    """

    name: str
    type: str
    pool: tuple[JSON, ...] = ()
    literal: str = "{}"
    reference: str = ""
    asks: tuple[str, ...] = ()
    letter: str = ""
    tail: str = ""

    def identifier(self, number: int) -> str:
        """An identifier of the kind."""
        return f"{self.letter}{number}{self.tail}"

    def draw(self, rng: random.Random, split: str) -> JSON:
        """A value of the split: words of one split occur in no other; numbers are shared."""
        if self.letter:
            return self.identifier(rng.randrange(1000, 10_000))
        if self.type == "array":
            one, other = rng.sample([name for i, name in enumerate(PEOPLE) if i % 10 in places_of(split)], 2)
            return [one, other]
        is_shared = len(self.pool) < 10 or self.type != "string"
        while True:
            place = rng.randrange(len(self.pool))
            if is_shared or place % 10 in places_of(split):
                return self.pool[place]

    def say(self, value: JSON) -> str:
        """The value in a request."""
        said = " and ".join(map(str, value)) if isinstance(value, list) else str(value)
        return self.literal.format(said)


def places_of(split: str) -> range:
    """Which of ten values of a pool a split may use; test and composition share theirs."""
    return {"train": range(6), "validation": range(6, 7)}.get(split, range(7, 10))


def _words(name: str, pool: Sequence[str], reference: str, asks: str, literal: str = "{}") -> ValueKind:
    return ValueKind(name, "string", tuple(pool), literal, reference, tuple(asks.split(",")))


def _numbers(name: str, values: Sequence[float], reference: str, asks: str, type_: str = "integer") -> ValueKind:
    return ValueKind(name, type_, tuple(values), "{}", reference, tuple(asks.split(",")))


def _id(name: str, letter: str, literal: str = "") -> ValueKind:
    said = literal or f"{name} {{}}"
    return ValueKind(name, "string", (), said, f"that {name}", (name, "which one", "id", "identifier"), letter)


_ALL = (
    _words("person", PEOPLE, "that person", "who,whom,whose,name,names,person"),
    _words("city", CITIES, "that city", "city,where,town,location"),
    _words(
        "title",
        TITLES,
        "that title",
        "title,name,called,event,heading,what about,what remind,what call,what for",
        '"{}"',
    ),
    _words(
        "text",
        TEXTS,
        "that text",
        "text,what say,message,words,wording,content,body,what write,what tell,what send,what contain",
        '"{}"',
    ),
    _words("file", FILES, "that name", "file,name,called,filename"),
    _words("song", SONGS, "that song", "song,title,track,name", '"{}"'),
    _words("label", LABELS, "that name", "label,name,called,what call,what for,what say", '"{}"'),
    _words("room", ROOMS, "that room", "room,where"),
    _words("date", DATES, "that day", "date,day,when"),
    _words("time", TIMES, "that time", "time,when,hour,o'clock"),
    _words("folder", ("work", "home", "old", "shared", "taxes", "music"), "that folder", "folder,where,directory"),
    _words("language", ("French", "Spanish", "Dutch", "Polish", "Greek", "Czech"), "", "language"),
    _words(
        "subject", ("rent", "holidays", "the offer", "the wedding", "school", "the game"), "", "subject,about,topic"
    ),
    _words("account", ("checking", "savings", "travel", "business"), "", "account"),
    _words("ticker", ("AQX", "BLM", "CRT", "DNV", "EOS", "FJD", "GLP", "HWK"), "", "ticker,stock,symbol,company"),
    _words("currency", ("dollars", "pounds", "yen", "francs", "pesos"), "", "currency"),
    _words(
        "appliance", ("lamp", "fan", "heater", "radio", "oven"), "", "appliance,device,what turn,what switch,which one"
    ),
    _words("door", ("front door", "back door", "garage door", "cellar door"), "", "door"),
    _words("genre", ("comedy", "drama", "western", "thriller", "musical"), "", "genre,kind,sort,type"),
    _words("unit", ("celsius", "fahrenheit"), "", "unit,celsius,fahrenheit"),
    _numbers("count", range(2, 10), "that number", "how many,number,how long,how much,quantity"),
    _numbers("minutes", range(5, 95, 5), "that long", "minutes,how long,duration,how much time"),
    _numbers(
        "percent",
        range(10, 100, 10),
        "that level",
        "percent,percentage,level,how much,how far,how high,bright,brightness,loud,volume",
    ),
    _numbers(
        "degrees", [n / 2 for n in range(31, 50, 2)], "that many", "degrees,temperature,warm,how hot,how high", "number"
    ),
    _numbers(
        "amount", range(15, 100), "that amount", "amount,how much,sum,money,how many dollars,how many euros", "number"
    ),
    ValueKind("people", "array", (), "{}", "", ("who", "whom", "members", "people", "names", "participants")),
    ValueKind("flag", "boolean", (True,)),
    _id("event", "E"),
    _id("reminder", "R"),
    _id("message", "M"),
    _id("group", "G"),
    _id("document", "D"),
    _id("flight", "F"),
    _id("hotel", "H"),
    _id("booking", "B"),
    _id("alert", "A"),
    _id("transfer", "T"),
    _id("order", "O"),
    _id("invoice", "I"),
    _id("device", "V"),
    _id("timer", "C"),
    _id("track", "K"),
    _id("playlist", "P"),
    _id("film", "Y"),
    ValueKind("email", "string", (), "{}", "that address", ("email", "address", "who", "whom"), "box", "@post.org"),
    ValueKind("phone", "string", (), "{}", "that number", ("phone", "number", "who", "whom"), "070"),
)

KINDS: Mapping[str, ValueKind] = {kind.name: kind for kind in _ALL}
"""The kinds by name."""
