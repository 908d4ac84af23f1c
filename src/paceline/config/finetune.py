"""Finetune: what of a decoder is trained, all of it or adapters beside its matrices."""

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from paceline.config.frozen import FrozenConfig

Patterns = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Finetune(FrozenConfig):
    """What is trained of the network that `train.weights` gives."""

    method: Literal["full", "lora"] = "full"
    """"full": all parameters. "lora": adapters of low rank beside matrices, which stay as they
    are (https://arxiv.org/abs/2106.09685)."""
    rank: int = Field(16, gt=0, le=4096)
    """Of an adapter: what it adds to a matrix is a product of two that are so narrow."""
    alpha: float = Field(32.0, gt=0, le=1e6)
    """What an adapter gives is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that each pass of training sets to 0."""
    targets: Patterns = ("*_proj",)
    """Matrices of the blocks that get adapters: their names or the ends of these, with * for
    anything ("q_proj", "attention.*", "blocks.3.*"). By default all of attention and feed-forward,
    but routed experts and routers."""
    decomposed: bool = False
    """Train the length of each row of the adapted matrix as well (DoRA,
    https://arxiv.org/abs/2402.09353)."""
    adapters: str | None = None
    """Folder of adapters in PEFT's format to start from; else they begin without effect."""

    @property
    def is_adapted(self) -> bool:
        """Whether adapters are trained, and nothing else."""
        return self.method == "lora"

    @property
    def scaling(self) -> float:
        """What adapters give is multiplied by."""
        return self.alpha / self.rank

    def names(self, matrix: str) -> bool:
        """Whether the targets name a matrix.

        Args:
            matrix: its whole name, as "blocks.3.attention.q_proj".
        """
        return any(fits(matrix, pattern) for pattern in self.targets)


def fits(matrix: str, pattern: str) -> bool:
    """Whether a pattern is that of a matrix's name, or of an end of it."""
    return fnmatchcase(matrix, pattern) or fnmatchcase(matrix, f"*.{pattern}")
