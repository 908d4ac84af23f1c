"""A Job that trains within a second in this very process, and the text it reads.

Bytes are its tokens, so that nothing is trained before. What commands in processes of their own
train stands in `tests.command_line`.
"""

from pathlib import Path

import pytest

_JOB = """\
name = "small"
[model]
family = "decoder"
vocab_size = 257
hidden_size = 16
ffn_size = 32
num_layers = 1
num_heads = 2
max_seq_len = 32
[cluster]
devices_per_node = 1
[data]
source = "text.txt"
tokenizer = "bytes"
[train]
{length}
global_batch = 2
seq_len = 16
"""
_WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box under old pale trees"


def work_in(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make a folder with a text in it the current one, and keep the cache there."""
    patch.chdir(folder)
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "text.txt").write_text("\n".join(f"{at} {_WORDS}" for at in range(400)))


def write_small_job(folder: Path, length: str = "steps = 4", more: str = "") -> Path:
    """small.toml in a folder.

    Args:
        folder: where.
        length: how long it trains, a line of its [train].
        more: further sections.
    """
    file = folder / "small.toml"
    file.write_text(_JOB.format(length=length) + more)
    return file
