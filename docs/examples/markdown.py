"""Tables and filled paragraphs of the example pages."""

import re
import textwrap
from collections.abc import Iterable, Sequence

MADE = "*This page is made by `docs/make_planning_examples.py` from the planner's own functions.*\n"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def reflow(page: str) -> str:
    """Fill paragraphs and list items to the width of a line; tables and titles stay."""
    blocks = []
    for block in page.strip().split("\n\n"):
        if block.startswith(("|", "#")):
            blocks.append(block.strip())
            continue
        items = re.split(r"\n(?=- )", block.strip())
        blocks.append("\n".join(_filled(item) for item in items))
    return "\n\n".join(blocks) + "\n"


def _filled(text: str) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        width=100,
        subsequent_indent="  " if text.startswith("- ") else "",
        break_on_hyphens=False,
        break_long_words=False,
    )
