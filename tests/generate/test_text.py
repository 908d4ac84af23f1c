"""TextStream: what may be shown, and where a stop string ends it."""

import pytest

from paceline.generate.text import TextStream
from paceline.train.data.tokenizer import make_encoder

TOKENIZER = make_encoder("bytes", ()).tokenizer
END = 256


def shown(text, stops=(), end=True):
    """What a stream shows after each byte, and the stream."""
    stream, pieces = TextStream(TOKENIZER, stops), []
    for byte in text if isinstance(text, bytes) else text.encode():
        stream.add([byte])
        pieces.append(stream.new_text())
    if end:
        stream.finish()
        pieces.append(stream.new_text())
    return pieces, stream


def test_a_character_of_several_tokens_is_shown_when_it_is_whole():
    pieces, stream = shown("aß→b")
    assert pieces == ["a", "", "ß", "", "", "→", "b", ""]
    assert stream.text == "aß→b"


def test_half_a_character_is_shown_at_the_end():
    pieces, stream = shown("a→".encode()[:-1])
    assert "".join(pieces) == stream.text
    assert stream.text.startswith("a\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize(
    ("text", "stops", "kept", "by"),
    [
        ("one stop two", ["stop"], "one ", "stop"),
        ("one two", ["stop"], "one two", None),
        ("one sto", ["stop"], "one sto", None),
        ("aab", ["ab", "aab"], "", "aab"),
        ("xaby", ["b", "ab"], "x", "ab"),
        ("\n\n\n", ["\n\n"], "", "\n\n"),
    ],
)
def test_the_first_stop_string_ends_the_text_however_it_is_cut(text, stops, kept, by):
    pieces, stream = shown(text, stops)
    assert "".join(pieces) == stream.text == kept
    assert stream.stopped_by == by
    whole = TextStream(TOKENIZER, stops)
    assert whole.add(list(text.encode())) == by
    whole.finish()
    assert whole.text == kept


def test_what_could_become_a_stop_string_is_held_back():
    pieces, stream = shown("a stoa", ["stop"], end=False)
    assert pieces == ["a", " ", "", "", "", "stoa"]
    assert stream.text == "a stoa"


def test_special_tokens_are_no_text():
    stream = TextStream(TOKENIZER)
    stream.add([ord("a"), END])
    stream.finish()
    assert stream.text == "a"
