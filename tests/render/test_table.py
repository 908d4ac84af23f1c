"""Tables on a terminal, and bars in them (pure)."""

import io
from itertools import pairwise

import pytest
from rich.console import Console, RenderableType

from paceline.render.table import Bullets, Pairs, Table, share_bar, stretch


def printed(part: RenderableType, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(part)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_words_stand_left_and_figures_right():
    table = Table(("name", "ms", ""), [("a", "1.0", "x"), ("long", "100.0", "y")], words=(0, 2))
    assert printed(table) == ["name     ms", "a       1.0  x", "long  100.0  y"]


def test_a_table_has_title_note_and_foot():
    rows = [("a", "1"), ("b", "2")]
    lines = printed(Table(("n", "ms"), rows, foot=("all", "3"), title="T", note="N", ruled=True))
    assert lines[0] == "T"
    assert lines[-1] == "N"
    assert ["all", "3"] in [line.split() for line in lines]
    assert any(set(line.strip()) == {"─"} for line in lines)


@pytest.mark.parametrize("one_line", [True, False])
def test_words_fold_or_are_cut_and_figures_stay_whole(one_line):
    words = " ".join(["word"] * 20)
    lines = printed(Table(("n", "ms"), [(words, "1,234.5")], one_line=one_line), 30)
    assert len(lines) == 2 if one_line else len(lines) > 3
    assert one_line or "1,234.5" in lines[1]
    assert max(map(len, lines)) <= 30


def test_lists_hang():
    assert printed(Bullets(["some words"]), 8) == ["- some", "  words"]
    assert printed(Pairs([("a", "1"), ("bcd", "2")], title="T")) == ["", "T", "a    1", "bcd  2"]


def test_bars_of_all_lines_are_one_bar():
    ends = [0.0, 0.5, 0.8, 0.95, 1.0]
    rows = [printed(stretch(a, b - a, "red", 40))[0] for a, b in pairwise(ends)]
    covered = [at for row in rows for at, cell in enumerate(row) if cell == "█"]
    assert covered == list(range(40))
    sliver = printed(stretch(1.0, 0.0, "red", 40))[0]
    assert len(sliver) == 40, "the last sliver stays within the bar"
    assert sliver.strip()
    assert printed(stretch(0.31, 1e-6, "red", 40))[0].strip(), "no part is too small to be seen"


def test_the_bar_of_a_share_is_as_long():
    assert printed(share_bar(0.5, "red", 20))[0].count("━") == 10
