"""Write docs/examples/*.md: worked examples of the planner, every number made by its functions.

Each page is a module beside it: text with figures put in. `python docs/make_planning_examples.py`
writes the pages again, and a test tells when they no longer say what the planner says.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from examples import llama3, rent_or_buy
from examples.markdown import reflow

FOLDER = Path(__file__).parent / "examples"
PAGES = {
    "llama3-405b.md": llama3.page,
    "rent-or-buy.md": rent_or_buy.page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(reflow(page()))
