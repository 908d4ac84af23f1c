"""Write the table of docs/explain.md that says what each rule needs and what makes it silent.

    python docs/make_rules_table.py

It is made of `paceline.explain.rules.RULES`; a test tells when it no longer is.
"""

import re
from pathlib import Path

from paceline.explain.rules import RULES
from paceline.observe import caveats

PAGE = Path(__file__).with_name("explain.md")
_TABLE = re.compile(
    r"(\| finding \| speaks of \| is silent where \|\n\|---\|---\|---\|\n)(?:\|.*\n)+"
)
_BLIND = {
    caveats.GRAPH_KERNELS_MISSING: "kernels of graphs are missing",
    caveats.NO_KERNELS: "no kernels were recorded",
    caveats.NO_STEPS: "nothing marks the steps",
    caveats.INFERENCE: "an engine serves a model",
}


def made(page: str) -> str:
    """The page with the table as the rules are now."""
    rows = "".join(
        f"| `{name}` | {rule.needs} | {_silent(rule.silent, rule.blind)} |\n"
        for name, rule in RULES.items()
    )
    return _TABLE.sub(lambda found: found[1] + rows, page)


def _silent(text: str, blind: tuple[str, ...]) -> str:
    return "; ".join(each for each in (text, *(_BLIND[kind] for kind in blind)) if each)


if __name__ == "__main__":
    PAGE.write_text(made(PAGE.read_text()))
