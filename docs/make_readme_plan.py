"""Put the output of the `paceline plan` command that README.md shows below it, by running it.

    python docs/make_readme_plan.py

Left out: the settings of the fastest layout, layouts with less memory, what is assumed.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
WIDTH = 88
_BLOCK = re.compile(r"(```sh\n(paceline plan .*?)\n```\n\n```text\n)(.*?)(\n```)", re.DOTALL)
_LEFT_OUT = ("the fastest", "assumed of", "rests on")


def shown(output: str) -> str:
    """The paragraphs of an output that the README shows."""
    text = "\n".join(line.rstrip() for line in output.splitlines())
    return "\n\n".join(part for part in text.split("\n\n") if not part.startswith(_LEFT_OUT))


def made(text: str) -> str:
    """The README with what the command prints now in place of what it printed."""
    found = _BLOCK.search(text)
    assert found is not None, "README.md shows no output of `paceline plan`"
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(found[2])],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    return text[: found.start(3)] + shown(done.stdout) + text[found.end(3) :]


if __name__ == "__main__":
    README.write_text(made(README.read_text()))
