"""Which documents of a source count as duplicates of others."""

from typing import Literal

from pydantic import Field

from paceline.config.frozen import FrozenConfig


class Dedup(FrozenConfig):
    """Of documents that are alike, the first alone is read."""

    method: Literal["none", "exact", "near"] = "none"
    """"exact": the same words in the same order, whatever the case, the spaces and the forms of
    characters (Unicode's NFKC). "near": by MinHash, most of the same stretches of five words."""
    threshold: float = Field(0.8, ge=0.1, le=0.95)
    """Of "near": the Jaccard similarity from which documents are alike, part of the stretches that
    either has."""
    permutations: int = Field(128, ge=32, le=1024)
    """Of "near": numbers that stand for a document. The error of a similarity is up to
    0.5 / sqrt(permutations)."""

    @property
    def problem(self) -> str | None:
        """A setting without effect."""
        for name in ("threshold", "permutations"):
            value = getattr(self, name)
            if self.method != "near" and value != getattr(Dedup(), name):
                return (
                    f'dedup.{name} = {value} has no effect with dedup.method = "{self.method}": '
                    'leave it out, or set that to "near".'
                )
        return None
