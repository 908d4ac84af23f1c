"""ModelFamily: what every model says of itself, so that nobody asks which kind of model it is.

A family is a class of shapes (`config.model`, `config.vision`, `config.recommender`, and the module
of one's own in `config.job_sections`). The values here are those of a model of which nothing is
known; a family overrides what it knows. What is done with a family (to plan it, to train it) stands
in one table of each room that does it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from paceline.config.comm import Comm
from paceline.config.frozen import FrozenConfig
from paceline.config.layers import Experts
from paceline.config.layout import Layout


class ModelFamily(FrozenConfig):
    """The base of every family of models."""

    if TYPE_CHECKING:  # a field of each family, at its own place among the others
        family: str

    unit: ClassVar[Literal["tokens", "samples"]] = "samples"
    """What the throughput of a run counts."""
    is_own: ClassVar[bool] = False
    """Whether it is a person's own module, of which only the name is data."""
    knows_layers: ClassVar[bool] = False
    """Whether it says what its layers are, so that they can be cut over ranks and priced."""
    takes_text: ClassVar[bool] = False
    """Whether the settings of text (its files, tokenizer and length, weights to start from) mean
    anything to it."""
    takes_images: ClassVar[bool] = False
    """Whether it reads images."""
    has_batch_norms: ClassVar[bool] = False
    """Whether it has batch norms, or may have."""
    has_tables: ClassVar[bool] = False
    """Whether it has tables of embeddings that ranks or servers share out by rows."""

    @property
    def num_params(self) -> int | None:
        """All parameters; None: unknown."""
        return None

    @property
    def mixture(self) -> Experts | None:
        """The experts of its layers; None where it has none."""
        return None

    @property
    def longest_sequence(self) -> int | None:
        """Tokens of the longest sample that it takes; None: samples have no length."""
        return None

    @property
    def sees_later_tokens(self) -> bool:
        """Whether it guesses masked tokens by those around them, and not the next ones."""
        return False

    def units_per_sample(self, seq_len: int) -> int:
        """How many of its units a sample is.

        Args:
            seq_len: tokens of a sample, where it has tokens.
        """
        return 1

    def batch_text(self, samples: int, seq_len: int) -> str:
        """So many samples in words, as "8 samples" or "8 x 1024 tokens"."""
        return f"{samples} samples"

    def train_flops_per_unit(self, seq_len: int) -> float | None:
        """Model FLOPs of forward and backward, mean per unit; None: unknown.

        Args:
            seq_len: tokens of a sample, where it has tokens.
        """
        return None

    def why_only_planned(self, comm: Comm) -> str | None:
        """Why it can be planned and not trained, as one sentence; None where it can be trained.

        Args:
            comm: of the Job.
        """
        return None

    def layout_refusals(self, layout: Layout) -> Iterator[str]:
        """What of a concrete layout this family can't have, a sentence each."""
        axes = ("pp", "cp", "ep") if self.is_own else ("tp", "pp", "cp", "ep")
        for axis in () if self.knows_layers else axes:
            if getattr(layout, axis) != 1:
                yield (
                    f"layout.{axis} = {getattr(layout, axis)} needs a model that Paceline knows "
                    "the layers of, not one of your own: set it to 1 and use dp or fsdp"
                    f"{', or tp by a plan' if self.is_own else ''}."
                )
        if layout.sync_batch_norm and not self.has_batch_norms:
            yield (
                f'layout.sync_batch_norm = true has no effect on model.family = "{self.family}", '
                "which has no batch norms: leave it out."
            )
