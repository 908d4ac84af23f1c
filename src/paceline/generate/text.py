"""Text: tokens that become readable, piece by piece, and the stop strings that end them."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT_TOKENS = 16
_BYTES_OF_CHARACTER = 4
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one sequence while it is made.

    A character may be several tokens, and a stop string may come in pieces: what could still become
    either is held back.

    Args:
        stops: the text ends before the first of these.
        prompt: the tokens before. In many vocabularies a word's first token has a space before it
            only where it isn't the first of all.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._tokens = self._end_of(prompt)
        self._before = "".join(self._decoder.step(tokenizer, t) or "" for t in self._tokens)
        self._text = ""
        self._num_shown = 0
        self.stopped_by: str | None = None

    def add(self, tokens: Sequence[int]) -> str | None:
        """Take tokens; return the stop string that ended the text with them, if one did."""
        for token in tokens:
            self._tokens.append(token)
            if (piece := self._decoder.step(self._tokenizer, token)) is not None:
                self._append(piece)
        return self.stopped_by

    def finish(self) -> None:
        """No more tokens come: what is half a character is shown as that."""
        if self.stopped_by is None:
            whole, shown = self._decoded(self._tokens), self._before + self._text
            if whole.startswith(shown):
                self._append(whole[len(shown) :])
        self._stops = ()

    @property
    def text(self) -> str:
        """All that is certain so far."""
        return self._text[: self._num_certain()]

    @property
    def length(self) -> int:
        """Characters so far, with those that are held back."""
        return len(self._text)

    def new_text(self) -> str:
        """What is certain and was not returned before."""
        start, self._num_shown = self._num_shown, self._num_certain()
        return self._text[start : self._num_shown]

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of a prompt, from the beginning of a character on."""
        tokens = [*prompt[-_CONTEXT_TOKENS:]]
        for start in range(min(len(tokens), _BYTES_OF_CHARACTER)):
            if not self._decoded(tokens[start:]).startswith(_NO_CHARACTER):
                return tokens[start:]
        return []

    def _decoded(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _append(self, piece: str) -> None:
        if self.stopped_by is not None:
            return
        longest = max(map(len, self._stops), default=1)
        start = max(0, len(self._text) - longest + 1)
        self._text += piece
        found = [(self._text.find(stop, start), stop) for stop in self._stops]
        found = [(place, stop) for place, stop in found if place >= 0]
        if found:
            place, self.stopped_by = min(found)
            self._text = self._text[:place]

    def _num_certain(self) -> int:
        if self.stopped_by is not None:
            return len(self._text)
        held = [
            length
            for stop in self._stops
            for length in range(1, len(stop))
            if self._text.endswith(stop[:length])
        ]
        return len(self._text) - max(held, default=0)


def special_name(value: object) -> str | None:
    """A special token as tokenizer_config.json has it: its text, or an object with it."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
