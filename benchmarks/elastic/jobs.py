"""The Job of a benchmark, with the speed of this host written in.

Nodes that are namespaces of one host have fewer cores than it, and each would measure itself.
"""

import random
from collections.abc import Sequence
from pathlib import Path

from paceline.config.job import Job, read_job, to_toml
from paceline.train.this_machine import resolve_on_this_machine

_WORDS = ("brown", "dog", "fox", "jumps", "lazy", "over", "quick", "the")


def write_job(text: str, folder: Path, settings: Sequence[str] = ()) -> tuple[Path, Job]:
    """Write a Job and a text to train on; returns its file, and what it is on this host.

    Args:
        text: TOML, with the source "text.txt".
        settings: SECTION.KEY=VALUE, written in as well.
    """
    draw = random.Random(0)
    source = folder / "text.txt"
    source.write_text("\n".join(" ".join(draw.choices(_WORDS, k=9)) for _ in range(4000)))
    file = folder / "spec.toml"
    file.write_text(text.replace('"text.txt"', repr(str(source))))
    spec = read_job(file, list(settings))
    job = resolve_on_this_machine(spec).job
    cluster = spec.cluster.model_copy(update={"device": job.cluster.device})
    file.write_text(to_toml(spec.model_copy(update={"cluster": cluster})))
    return file, job
