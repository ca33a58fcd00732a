"""Steps from lists of words to words, texts, numbers and counts."""

from __future__ import annotations

from generators.code.steps.base import INT, INTS, TABLE, TEXT, WORDS, step


@step(WORDS, WORDS, 1)
def sort_by_length(words: list[str]) -> list[str]:
    """Sort the words by length, shortest first, equally long ones in alphabetical order."""
    return sorted(words, key=lambda word: (len(word), word))


@step(WORDS, WORDS, 1)
def keep_palindromes(words: list[str]) -> list[str]:
    """Keep only the words that read the same in both directions."""
    return [word for word in words if word == word[::-1]]


@step(WORDS, WORDS, 1)
def keep_single(words: list[str]) -> list[str]:
    """Keep only the words that occur exactly once in the list."""
    return [word for word in words if words.count(word) == 1]


@step(WORDS, WORDS, 2)
def drop_contained(words: list[str]) -> list[str]:
    """Remove every word that stands as a piece inside another, longer word of the list."""
    return [word for word in words if not any(word in other and word != other for other in words)]


@step(WORDS, WORDS, 2)
def first_of_anagrams(words: list[str]) -> list[str]:
    """Keep only the first word of each group of words that have the same letters, each as often."""
    seen: dict[str, str] = {}
    for word in words:
        seen.setdefault("".join(sorted(word)), word)
    return list(seen.values())


@step(WORDS, WORDS, 1)
def swap_ends(words: list[str]) -> list[str]:
    """Exchange the first and the last letter of each word."""
    return [word if len(word) < 2 else word[-1] + word[1:-1] + word[0] for word in words]


@step(WORDS, WORDS, 2)
def play_latin(words: list[str]) -> list[str]:
    """For each word: where it begins with a vowel (a, e, i, o, u) append "way", otherwise move all
    letters before its first vowel to its end and append "ay" (a word without a vowel only gets "ay")."""
    made = []
    for word in words:
        cut = next((i for i, c in enumerate(word) if c in "aeiou"), 0)
        begins = word[:1] in ("a", "e", "i", "o", "u")
        made.append(word + "way" if begins else word[cut:] + word[:cut] + "ay")
    return made


@step(WORDS, WORDS, 3)
def sort_by_last_letters(words: list[str]) -> list[str]:
    """Sort the words as in a dictionary that is read from their last letter backwards; each word once."""
    return sorted(set(words), key=lambda word: word[::-1])


@step(WORDS, WORDS, 3, width=(12, 20))
def fill_lines(words: list[str], width: int) -> list[str]:
    """Join the words with single spaces into lines of at most {width} characters, each line taking as
    many words as fit; the list becomes the lines, without the spaces."""
    lines: list[list[str]] = []
    for word in words:
        if lines and len(" ".join([*lines[-1], word])) <= width:
            lines[-1].append(word)
        else:
            lines.append([word])
    return ["".join(line) for line in lines]


@step(WORDS, WORDS, 3)
def number_repeats(words: list[str]) -> list[str]:
    """Append to each word that has stood in the list before how often it has, so that the second "ab"
    becomes "ab1" and the third "ab2"; first occurrences stay."""
    seen: dict[str, int] = {}
    named = []
    for word in words:
        named.append(word + (str(seen[word]) if word in seen else ""))
        seen[word] = seen.get(word, 0) + 1
    return named


@step(WORDS, INTS, 1)
def word_lengths(words: list[str]) -> list[int]:
    """Replace each word by its length."""
    return [len(word) for word in words]


@step(WORDS, INTS, 2)
def word_values(words: list[str]) -> list[int]:
    """Replace each word by the sum of the places of its letters in the alphabet (a is 1, z is 26; other
    characters count 0)."""
    return [sum(ord(c) - 96 for c in word if "a" <= c <= "z") for word in words]


@step(WORDS, INTS, 2)
def shared_letters(words: list[str]) -> list[int]:
    """Replace the list by how many different letters each word shares with the word after it (one number
    fewer than words; none for an empty list)."""
    return [len(set(words[i]) & set(words[i - 1])) for i in range(1, len(words))]


@step(WORDS, TABLE, 1)
def count_words(words: list[str]) -> dict[str, int]:
    """Count for each different word how often it occurs."""
    return {word: words.count(word) for word in words}


@step(WORDS, TABLE, 2)
def letters_by_initial(words: list[str]) -> dict[str, int]:
    """Add up the lengths of the words by their first letter."""
    totals: dict[str, int] = {}
    for word in words:
        totals[word[0]] = totals.get(word[0], 0) + len(word)
    return totals


@step(WORDS, TEXT, 1)
def join_initials(words: list[str]) -> str:
    """Join the first letters of the words into one text."""
    return "".join(word[0] for word in words)


@step(WORDS, TEXT, 2)
def common_beginning(words: list[str]) -> str:
    """Take the longest text with which every word begins; an empty text for an empty list."""
    beginning = words[0] if words else ""
    while any(not word.startswith(beginning) for word in words):
        beginning = beginning[:-1]
    return beginning


@step(WORDS, TEXT, 2)
def read_columns(words: list[str]) -> str:
    """Write the words below each other, left ends in line, and read column by column from the left, each
    from top to bottom, as one text."""
    longest = max(map(len, words), default=0)
    return "".join(word[i] for i in range(longest) for word in words if i < len(word))


@step(WORDS, INT, 2)
def longest_chain_of_words(words: list[str]) -> int:
    """Take the length of the longest run of neighbouring words in which each word begins with the last
    letter of the word before; 0 for an empty list."""
    best = length = 0
    for i, word in enumerate(words):
        length = length + 1 if i and words[i - 1][-1] == word[0] else 1
        best = max(best, length)
    return best


@step(WORDS, INT, 2)
def anagram_pairs(words: list[str]) -> int:
    """Count the pairs of places whose words have the same letters, each as often."""
    keys = ["".join(sorted(word)) for word in words]
    return sum(keys[i] == keys[j] for i in range(len(keys)) for j in range(i + 1, len(keys)))


@step(WORDS, INT, 3)
def rounds_of_words(words: list[str]) -> int:
    """Begin with the first word and go on to the first word to its right that shares no letter with it,
    and so on from there. Take how many words are visited; 0 for an empty list."""
    count, current = 0, set[str]()
    for word in words:
        if not count or not current & set(word):
            count, current = count + 1, set(word)
    return count


@step(WORDS, INT, 4)
def prefix_tree_size(words: list[str]) -> int:
    """Take the number of nodes of the tree that stores the words letter by letter, words with equal
    beginnings sharing them; the root counts."""
    return len({word[:i] for word in words for i in range(1, len(word) + 1)}) + 1


@step((WORDS, WORDS), WORDS, 2)
def only_in_first(words: list[str], others: list[str]) -> list[str]:
    """Keep only the words of the first list of which the second list has no anagram (the same letters,
    each as often)."""
    keys = {"".join(sorted(word)) for word in others}
    return [word for word in words if "".join(sorted(word)) not in keys]


@step((TEXT, WORDS), INT, 4)
def ways_to_spell(text: str, words: list[str]) -> int:
    """Remove all spaces, commas and digits from the text and count the ways to cut it into pieces that
    are all words of the list (each as often as needed; words that stand twice in the list count once); an
    empty text has 1 way."""
    plain = "".join(c for c in text if c.isalpha())
    ways = [1] + [0] * len(plain)
    for end in range(1, len(plain) + 1):
        for word in set(words):
            if plain[:end].endswith(word):
                ways[end] += ways[end - len(word)]
    return ways[-1]
