"""What a live source is to who appends to the log, and files that appear in a folder."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from paceline.config.errors import InputError
from paceline.train.data.stream.log import Positions

MOST_TEXT_BYTES = 2**28
"""Of a line, a message or a file: a larger one is rejected."""
_SETTLED_S = 1.0
# A folder of a million files takes a second to look through.
_LOOK_S, _LOOK_SHARE = 0.1, 0.1


class Text(NamedTuple):
    """A document that arrived, and how far its source has been read with it."""

    text: str | None
    """None: it holds none that can be trained on, and is only passed."""
    arrived: float
    source: str
    """The name of its position."""
    position: int


class Source(Protocol):
    """Gives texts one after the other, from the position that the log has."""

    def take(self, most_bytes: int) -> list[Text]:
        """What has arrived, about so much of it at most; waits for nothing.

        Raises:
            InputError: what the log needs next can't be had any more.
        """

    def committed(self) -> None:
        """All that was taken is in the log."""

    def close(self) -> None:
        """Let go of files and ports."""


class Parser:
    """Makes texts of lines and messages, and counts what is none."""

    def __init__(self, text_field: str | None, say: Callable[[str], None]) -> None:
        self._text_field, self._say = text_field, say
        self.num_rejected = 0

    def text_of(self, data: bytes, where: str) -> str | None:
        """The text of a line or message; None: it holds none.

        Args:
            data: without the line's end.
            where: what a person calls it.
        """
        try:
            text = data.decode("utf-8-sig")
            return self._text_in(text) if self._text_field is not None else text
        except UnicodeDecodeError:
            self.reject(where, "it is not UTF-8")
        except (ValueError, RecursionError):
            self.reject(where, f'it is no JSON object with a text "{self._text_field}"')
        return None

    def reject(self, where: str, why: str) -> None:
        """Count what is passed over; a person is told of the 1st, the 10th, the 100th..."""
        self.num_rejected += 1
        if str(self.num_rejected).strip("0") == "1":
            self._say(f"{where} is passed over ({self.num_rejected} so far): {why}.")

    def _text_in(self, line: str) -> str:
        row = json.loads(line)
        text = row.get(self._text_field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise ValueError
        text.encode()  # half a surrogate pair is no text
        return text


class FolderSource:
    """Files that appear in a folder: "*.jsonl" line by line as it grows, "*.txt" whole.

    A file is known by its name for ever: it may not be replaced by another one.

    Args:
        folder: is watched, without the folders in it.
        lines: parses lines of JSON.
        whole: parses files of text.
        positions: what the log has.
        say: tells a person.
    """

    def __init__(
        self,
        folder: Path,
        lines: Parser,
        whole: Parser,
        positions: Positions,
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._lines, self._whole = folder, lines, whole
        self._say = say
        self._known = {
            name.removeprefix(_PREFIX): position
            for name, position in positions.items()
            if name.startswith(_PREFIX)
        }
        self._told: set[str] = set()
        self._look_again = 0.0
        self._has_more = False

    def take(self, most_bytes: int) -> list[Text]:
        """As `Source`, in the order of names."""
        if not self._has_more and time.monotonic() < self._look_again:
            return []
        began = time.monotonic()
        found: list[Text] = []
        self._has_more = False
        for name, status in self._changed():
            left = most_bytes - sum(len(one.text or "") for one in found)
            if left <= 0:
                self._has_more = True
                break
            try:
                read = self._lines_of if name.endswith(".jsonl") else self._file_of
                found += read(name, status, left)
            except OSError as error:
                self._tell(name, f"can't be read ({error.strerror})")
        took = time.monotonic() - began
        self._look_again = time.monotonic() + max(_LOOK_S, took / _LOOK_SHARE)
        return found

    def committed(self) -> None:
        """As `Source`."""

    def close(self) -> None:
        """As `Source`."""

    def _changed(self) -> list[tuple[str, os.stat_result]]:
        """Files that have something new, by name."""
        try:
            entries = [entry for entry in os.scandir(self._folder) if entry.is_file()]
        except OSError as error:
            self._tell("", f"can't be read ({error.strerror})")
            return []
        found = []
        for entry in sorted(entries, key=lambda entry: entry.name):
            is_text = entry.name.endswith(".txt")
            if entry.name.startswith(".") or not (is_text or entry.name.endswith(".jsonl")):
                continue
            try:
                status, known = entry.stat(), self._known.get(entry.name, 0)
            except FileNotFoundError:  # it was taken away a moment ago
                continue
            if status.st_size < known:
                self._tell(entry.name, f"has become shorter than the {known} bytes already read")
            elif status.st_size > known and not (is_text and known):
                found.append((entry.name, status))
        return found

    def _lines_of(self, name: str, status: os.stat_result, most_bytes: int) -> list[Text]:
        begin = self._known.get(name, 0)
        with (self._folder / name).open("rb") as file:
            file.seek(begin)
            data = file.read(most_bytes)
            if b"\n" not in data and len(data) == most_bytes:
                data += file.readline(MOST_TEXT_BYTES)
        lines = data.split(b"\n")
        rest = lines.pop()
        if len(rest) >= MOST_TEXT_BYTES:
            raise InputError(
                f"{self._folder / name} has a line of more than {MOST_TEXT_BYTES >> 20} MiB at "
                f"byte {begin}: end it before, or take the file away."
            )
        self._has_more |= begin + len(data) < status.st_size
        arrived, found = min(time.time(), status.st_mtime), []
        for line in lines:
            begin += len(line) + 1
            is_blank = not line or line.isspace()
            text = None if is_blank else self._lines.text_of(line, f"a line of {name}")
            found.append(Text(text, arrived, _PREFIX + name, begin))
        self._known[name] = begin
        return found

    def _file_of(self, name: str, status: os.stat_result, _most_bytes: int) -> list[Text]:
        if time.time() - status.st_mtime < _SETTLED_S:
            return []
        text = None
        if status.st_size > MOST_TEXT_BYTES:
            self._whole.reject(name, f"it has more than {MOST_TEXT_BYTES >> 20} MiB")
        else:
            text = self._whole.text_of((self._folder / name).read_bytes(), name)
        self._known[name] = status.st_size
        return [Text(text, min(time.time(), status.st_mtime), _PREFIX + name, status.st_size)]

    def _tell(self, name: str, what: str) -> None:
        """Once, until the process starts again."""
        if name not in self._told:
            self._told.add(name)
            self._say(f"{self._folder / name} {what}: it is left out until that changes.")


_PREFIX = "folder/"
