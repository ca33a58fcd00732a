from tidy import Slug, shorten, title


def test_short_texts_stay():
    assert shorten("abc") == "abc"


def test_texts_of_the_right_length_stay():
    assert shorten("abcdefghij") == "abcdefghij"


def test_long_texts_are_cut():
    assert shorten("abcdefghijk") == "abcdefg..."


def test_another_mark():
    assert shorten("abcdef", most=4, mark="!") == "abc!"


def test_titles():
    assert title("the end of a story") == "The End of a Story".replace("End", "end")


def test_slug():
    assert Slug("Hello World").text() == "hello-world"


def test_slug_with_another_separator():
    assert Slug("Hello World", "_").text() == "hello_world"


def test_slug_counts_uses():
    slug = Slug("a")
    slug.text()
    slug.text()
    assert slug.uses == 2
