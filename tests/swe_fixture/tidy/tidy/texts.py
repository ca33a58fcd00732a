"""Helpers for texts."""


def shorten(text, most=10, mark="..."):
    """A text of at most `most` characters, with a mark where it was cut."""
    if len(text) <= most:
        return text
    return text[: most - len(mark)] + mark


def title(text):
    """Each word with a capital, small ones in the middle left as they are."""
    words = text.split()
    return " ".join(_word(word, first=i == 0) for i, word in enumerate(words))


def _word(word, first):
    if len(word) < 4 and not first:
        return word
    return word[0].upper() + word[1:]


class Slug:
    """A text as part of an address."""

    def __init__(self, text, separator="-"):
        self.separator = separator
        self.words = [word.lower() for word in text.split()]
        self.uses = 0

    def text(self):
        """The words with separators between them."""
        self.uses += 1
        return self.separator.join(self.words)
