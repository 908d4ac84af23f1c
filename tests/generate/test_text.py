"""TextStream: what may be shown, and where a stop string ends it."""

import pytest
from tokenizers import Tokenizer, decoders, models

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


def _of_words(words, decoder, **options):
    """A tokenizer that makes texts of these tokens."""
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], **options))
    tokenizer.decoder = decoder
    return tokenizer


BYTE_FALLBACK = ["<0xE2>", "<0x86>", "<0x92>"]  # of "→"
LLAMA = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)


@pytest.mark.parametrize(
    ("decoder", "prompt", "made", "text"),
    [
        (decoders.Metaspace(), ["▁the"], ["▁quick", "er"], " quicker"),
        (decoders.Metaspace(), [], ["▁the", "▁quick"], "the quick"),
        (LLAMA, ["▁the"], ["▁quick", *BYTE_FALLBACK, "▁fox"], " quick→ fox"),
        # A prompt that ends within a character, and one whose last tokens begin within one.
        (LLAMA, ["▁the", *BYTE_FALLBACK[:2]], [BYTE_FALLBACK[2], "▁fox"], "→ fox"),
        (LLAMA, BYTE_FALLBACK * 20, BYTE_FALLBACK, "→"),
        (decoders.WordPiece(), ["the"], ["quick", "##er", ".", "fox"], " quicker. fox"),
        (decoders.WordPiece(), [], ["quick"], "quick"),
        (decoders.ByteLevel(), ["the"], ["Ġquick", "er", "â", "Ĩ", "Ĵ"], " quicker→"),
    ],
)
def test_a_text_goes_on_from_its_prompt(decoder, prompt, made, text):
    words = [*dict.fromkeys([*prompt, *made])]
    tokenizer = _of_words(words, decoder, byte_fallback=decoder is LLAMA)
    numbers = {word: number for number, word in enumerate(words)}
    stream = TextStream(tokenizer, [], [numbers[word] for word in prompt])
    pieces = []
    for word in made:
        stream.add([numbers[word]])
        pieces.append(stream.new_text())
    assert "".join(pieces) == text
    stream.finish()
    assert stream.text == text


def test_a_stop_string_is_looked_for_after_the_prompt():
    stream = TextStream(TOKENIZER, ["stop"], list(b"st"))
    assert stream.add(list(b"op and stop")) == "stop"
    assert stream.text == "op and "


def test_half_a_character_after_a_prompt_is_shown_at_the_end():
    stream = TextStream(TOKENIZER, [], list("the →".encode()))
    stream.add(list("a→".encode()[:-1]))
    assert stream.new_text() == "a"
    stream.finish()
    assert stream.text == "a\N{REPLACEMENT CHARACTER}"
