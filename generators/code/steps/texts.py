"""Steps from texts to texts, words, numbers and counts."""

from __future__ import annotations

from generators.code.steps.base import INT, INTS, TABLE, TEXT, WORDS, step


@step(TEXT, TEXT, 2, k=(1, 12))
def shift_letters(text: str, k: int) -> str:
    """Replace each letter by the one that comes {k} places later in the alphabet, after z follows a;
    other characters stay."""
    return "".join(chr((ord(c) - 97 + k) % 26 + 97) if "a" <= c <= "z" else c for c in text)


@step(TEXT, TEXT, 1)
def mirror_letters(text: str) -> str:
    """Replace a by z, b by y and so on to z by a; other characters stay."""
    return "".join(chr(219 - ord(c)) if "a" <= c <= "z" else c for c in text)


@step(TEXT, TEXT, 1)
def reverse_word_order(text: str) -> str:
    """Put the words (what stands between spaces) in the opposite order, with one space between them."""
    return " ".join(text.split()[::-1])


@step(TEXT, TEXT, 1)
def squeeze(text: str) -> str:
    """Replace each run of equal characters by one of them."""
    return "".join(c for i, c in enumerate(text) if i == 0 or c != text[i - 1])


@step(TEXT, TEXT, 3)
def encode_runs(text: str) -> str:
    """Replace each run of two or more equal characters by the character, then "*", then the length of the
    run; single characters stay."""
    out, i = "", 0
    while i < len(text):
        j = i
        while j < len(text) and text[j] == text[i]:
            j += 1
        out += text[i] + (f"*{j - i}" if j - i > 1 else "")
        i = j
    return out


@step(TEXT, TEXT, 1)
def drop_vowels(text: str) -> str:
    """Remove the letters a, e, i, o and u."""
    return "".join(c for c in text if c not in "aeiou")


@step(TEXT, TEXT, 2)
def alternate_case(text: str) -> str:
    """Write every second letter (the second, the fourth, ...) as a capital; other characters stay and are not
    counted."""
    out, count = "", 0
    for c in text:
        count += c.isalpha()
        out += c.upper() if c.isalpha() and count % 2 == 0 else c
    return out


@step(TEXT, TEXT, 2)
def sort_inside_words(text: str) -> str:
    """Sort the characters of each word (what stands between spaces) by their code, and put the words back
    in their places with one space between them."""
    return " ".join("".join(sorted(word)) for word in text.split())


@step(TEXT, TEXT, 2)
def reverse_vowels(text: str) -> str:
    """Turn the order of the vowels (a, e, i, o, u) of the text around; all other characters stay in their
    places."""
    vowels = [c for c in text if c in "aeiou"]
    return "".join(vowels.pop() if c in "aeiou" else c for c in text)


@step(TEXT, TEXT, 2)
def double_numbers(text: str) -> str:
    """Replace each number (a longest run of digits) by twice its value, without leading zeros."""
    out, digits = "", ""
    for c in text + " ":
        if c.isdigit():
            digits += c
            continue
        if digits:
            out += str(2 * int(digits))
        digits = ""
        out += c
    return out[:-1]


@step(TEXT, TEXT, 2, k=(2, 4))
def zigzag(text: str, k: int) -> str:
    """Write the characters in turn into {k} rows (the first into row 1, the next into row 2, ..., after
    row {k} again row 1) and read the rows one after the other."""
    return "".join(text[start::k] for start in range(k))


@step(TEXT, TEXT, 3)
def delete_pairs(text: str) -> str:
    """Remove two equal neighbouring characters, the leftmost two first, again and again until there are
    none; characters that become neighbours by that count."""
    kept: list[str] = []
    for c in text:
        if kept and kept[-1] == c:
            kept.pop()
        else:
            kept.append(c)
    return "".join(kept)


@step(TEXT, TEXT, 3)
def longest_palindrome(text: str) -> str:
    """Take the longest piece of the text that reads the same in both directions, of several the leftmost;
    an empty text stays."""
    pieces = (text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1))
    return max((piece for piece in pieces if piece == piece[::-1]), key=len, default="")


@step(TEXT, TEXT, 3)
def once_only_piece(text: str) -> str:
    """Take the longest piece of the text in which no character occurs twice, of several the leftmost; an
    empty text stays."""
    best, start = "", 0
    for end in range(len(text)):
        while text[end] in text[start:end]:
            start += 1
        if end + 1 - start > len(best):
            best = text[start : end + 1]
    return best


@step(TEXT, WORDS, 1)
def split_words(text: str) -> list[str]:
    """Take the words of the text: the longest runs of letters, in order."""
    return "".join(c if c.isalpha() else " " for c in text).split()


@step(TEXT, WORDS, 2, k=(2, 3))
def pieces_of_length(text: str, k: int) -> list[str]:
    """Remove all spaces and commas and take all pieces of {k} neighbouring characters, in order, each
    different piece once."""
    plain = text.replace(" ", "").replace(",", "")
    return list(dict.fromkeys(plain[i : i + k] for i in range(len(plain) - k + 1)))


@step(TEXT, INTS, 1)
def numbers_inside(text: str) -> list[int]:
    """Take the numbers of the text (longest runs of digits), in order."""
    return [int(run) for run in "".join(c if c.isdigit() else " " for c in text).split()]


@step(TEXT, INTS, 2)
def letter_positions(text: str) -> list[int]:
    """Replace each letter by its place in the alphabet (a or A is 1, z or Z is 26) and leave everything
    else out."""
    return [ord(c.lower()) - 96 for c in text if "a" <= c.lower() <= "z"]


@step(TEXT, TABLE, 1)
def count_letters(text: str) -> dict[str, int]:
    """Count for each letter that occurs how often it does (capitals as small letters)."""
    counts: dict[str, int] = {}
    for c in text.lower():
        if "a" <= c <= "z":
            counts[c] = counts.get(c, 0) + 1
    return counts


@step(TEXT, TABLE, 2)
def last_places(text: str) -> dict[str, int]:
    """Give for each word (what stands between spaces) the place of its last occurrence, counted from 1 in
    words."""
    return {word: place for place, word in enumerate(text.split(), 1)}


@step(TEXT, INT, 1)
def count_vowels(text: str) -> int:
    """Count the vowels (a, e, i, o, u, capitals too)."""
    return sum(c in "aeiou" for c in text.lower())


@step(TEXT, INT, 3)
def palindromic_pieces(text: str) -> int:
    """Count the pieces of two or more neighbouring characters that read the same in both directions."""
    count = 0
    for i in range(len(text)):
        for j in range(i + 2, len(text) + 1):
            count += text[i:j] == text[i:j][::-1]
    return count


@step(TEXT, INT, 3)
def different_pieces(text: str) -> int:
    """Count the different pieces of one or more neighbouring characters."""
    return len({text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)})


@step(TEXT, INT, 4)
def kept_palindrome(text: str) -> int:
    """Take the most characters that can stay when characters are struck out so that the rest reads the
    same in both directions."""
    best = [[0] * (len(text) + 1) for _ in range(len(text) + 1)]
    for i in range(len(text) - 1, -1, -1):
        for j in range(i, len(text)):
            if i == j:
                best[i][j] = 1
            elif text[i] == text[j]:
                best[i][j] = best[i + 1][j - 1] + 2
            else:
                best[i][j] = max(best[i + 1][j], best[i][j - 1])
    return best[0][len(text) - 1] if text else 0


@step((TEXT, TEXT), INT, 4)
def edit_distance(first: str, second: str) -> int:
    """Take the fewest changes that make the first text the second one; a change adds, removes or replaces one
    character."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        last, row = row, [i]
        for j, b in enumerate(second):
            row.append(min(last[j] + (a != b), last[j + 1] + 1, row[j] + 1))
    return row[-1]


@step((TEXT, TEXT), TEXT, 3)
def longest_common_piece(first: str, second: str) -> str:
    """Take the longest piece of neighbouring characters that both texts have; of several, the one that
    comes first in the first text; an empty text where there is none."""
    best = ""
    for i in range(len(first)):
        for j in range(i + len(best) + 1, len(first) + 1):
            if first[i:j] in second:
                best = first[i:j]
    return best


@step((TEXT, TEXT), TEXT, 2)
def weave_texts(first: str, second: str) -> str:
    """Take characters from the two texts in turn, beginning with the first; when one is used up, append
    the rest of the other."""
    both = "".join(a + b for a, b in zip(first, second, strict=False))
    return both + first[len(second) :] + second[len(first) :]
