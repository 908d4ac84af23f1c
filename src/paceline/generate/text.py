"""Text: tokens that become readable, piece by piece, and the stop strings that end them."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of one sequence while it is made.

    A character may be several tokens, and a stop string may come in pieces: what could still become
    either is held back.

    Args:
        stops: the text ends before the first of these.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._made: list[int] = []
        self._text = ""
        self._num_shown = 0
        self.stopped_by: str | None = None

    def add(self, tokens: Sequence[int]) -> str | None:
        """Take tokens; return the stop string that ended the text with them, if one did."""
        for token in tokens:
            self._made.append(token)
            if (piece := self._decoder.step(self._tokenizer, token)) is not None:
                self._append(piece)
        return self.stopped_by

    def finish(self) -> None:
        """No more tokens come: what is half a character is shown as that."""
        if self.stopped_by is None:
            whole = self._tokenizer.decode(self._made, skip_special_tokens=True)
            if whole.startswith(self._text):
                self._append(whole[len(self._text) :])
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
