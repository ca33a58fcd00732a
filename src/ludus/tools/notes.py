"""Notes of an episode, as the tools `note_write`, `note_read` and `note_search` (`rollout.notes`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ludus.errors import did_you_mean
from ludus.tools.base import Tool, ToolError, Traits, tool

MAX_TITLE = 100
"""Maximum characters of a title."""
MAX_FOUND = 5
"""Maximum number of notes that a search returns."""
_SHOWN = 200  # characters of a note in the result of a search
_WORD = re.compile(r"\w+")


@dataclass
class Notes:
    """Notes by title, each of at most `max_chars` characters, and at most `max_notes` of them.

    `earlier` are the notes at the start of the episode. `written` are the texts that were written in it; an empty one
    removes a note.
    """

    earlier: Mapping[str, str] = field(default_factory=dict)
    max_notes: int = 32
    max_chars: int = 2000
    written: dict[str, str] = field(default_factory=dict)

    @property
    def texts(self) -> dict[str, str]:
        """The notes, in the order in which they were first written."""
        return merged(self.earlier, self.written)

    def write(self, title: str, text: str) -> str:
        """Set the text of a note. Raises ToolError if it exceeds a limit."""
        texts, title = self.texts, title.strip()
        if not 0 < len(title) <= MAX_TITLE:
            raise ToolError(f"a title has 1 to {MAX_TITLE} characters")
        if len(text) > self.max_chars:
            raise ToolError(f"the text has {len(text)} characters, more than {self.max_chars}: write a shorter one")
        if text and title not in texts and len(texts) >= self.max_notes:
            raise ToolError(f"there are {len(texts)} notes, the maximum: replace one, or remove one with an empty text")
        self.written[title] = text
        return "saved" if text else "removed"

    def read(self, title: str) -> str:
        """Return the text of a note. Raises ToolError, with similar titles, if there is none."""
        texts, title = self.texts, title.strip()
        if title not in texts:
            raise ToolError(f"the note {title!r} does not exist. {did_you_mean(title, texts)}".strip())
        return texts[title]

    def search(self, query: str) -> str:
        """Return titles and beginnings of the notes with the most words of the query; all titles without a word."""
        texts, words = self.texts, _words(query)
        if not words:
            return "\n".join(texts) or "there are no notes"
        scores = {title: len(words & _words(f"{title} {text}")) for title, text in texts.items()}
        found = sorted((title for title, score in scores.items() if score), key=lambda title: -scores[title])
        return "\n".join(f"{one}: {texts[one][:_SHOWN]}" for one in found[:MAX_FOUND]) or "no note has these words"


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))


def merged(texts: Mapping[str, str], written: Mapping[str, str]) -> dict[str, str]:
    """Return notes after others were written: a text replaces that of the same title, an empty one removes it."""
    return {title: text for title, text in {**texts, **written}.items() if text}


def notes_tools(notes: Notes) -> Sequence[Tool]:
    """Return the tools of an episode's notes. They are coroutines, so that calls of one turn run in order."""

    async def note_write(title: str, text: str) -> str:
        """Write a note for later. It replaces the note of the same title.

        Args:
            title: a short name of the note.
            text: the note; an empty text removes it.
        """
        return notes.write(title, text)

    async def note_read(title: str) -> str:
        """Return the text of a note.

        Args:
            title: the name of the note.
        """
        return notes.read(title)

    async def note_search(query: str) -> str:
        """Search the notes by words. An empty query lists all titles.

        Args:
            query: the words to look for.
        """
        return notes.search(query)

    instant = tool(traits=Traits(latency="instant"))
    return [instant(note_write), instant(note_read), instant(note_search)]
