"""Heads: small networks that guess the tokens after the next one, from a decoder's last states."""

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from paceline.config.family import ModelFamily
from paceline.config.frozen import CountOrNone
from paceline.config.layers import require
from paceline.config.layout import Layout
from paceline.config.model import Model


class Heads(ModelFamily):
    """Heads of a decoder that was trained, and that stays as it is
    (https://arxiv.org/abs/2402.05109)."""

    unit: ClassVar[Literal["tokens", "samples"]] = "tokens"
    takes_text: ClassVar[bool] = True

    family: Literal["heads"]
    of: str
    """The run of the decoder."""
    step: CountOrNone
    """Of the decoder's checkpoint; that of the newest one if left out."""
    trunk: Model
    """The decoder's shapes; read from its run."""
    num_heads: int = Field(3, gt=0, le=16)
    """Heads: the first guesses the token after the next one, each further one the token after."""

    @model_validator(mode="after")
    def _guesses_by_a_product(self) -> Self:
        require(
            not self.trunk.head_bias,
            "trunk.head_bias = true adds to the product that heads guess by: they can't be trained "
            "for this decoder.",
        )
        require(
            not self.trunk.head_layer,
            "trunk.head_layer = true stands before the product that heads guess by: they can't be "
            "trained for this decoder.",
        )
        return self

    @property
    def num_params(self) -> int:
        """Those that are trained: of each head two matrices and a norm."""
        hidden = self.trunk.hidden_size
        return self.num_heads * (3 * hidden * hidden + hidden)

    @property
    def longest_sequence(self) -> int:
        """See `ModelFamily.longest_sequence`."""
        return self.trunk.max_seq_len

    def units_per_sample(self, seq_len: int) -> int:
        """Tokens of a sample."""
        return seq_len

    def batch_text(self, samples: int, seq_len: int) -> str:
        """See `ModelFamily.batch_text`."""
        return f"{samples} x {seq_len} tokens"

    def train_flops_per_unit(self, seq_len: int) -> float:
        """The decoder forward; and of each head forward and backward, with the decoder's head."""
        of_head = self.num_params / self.num_heads + self.trunk.num_embedding_params
        return self.trunk.forward_flops_per_token(seq_len) + 6 * self.num_heads * of_head

    def layout_refusals(self, layout: Layout) -> Iterator[str]:
        """Each rank has the whole decoder beside its heads."""
        cut = [axis for axis in ("tp", "pp", "cp", "ep", "fsdp") if getattr(layout, axis) != 1]
        for axis in cut:
            yield (
                f"layout.{axis} = {getattr(layout, axis)} cuts the network, and model.family = "
                '"heads" is trained beside a whole one on each rank: set it to 1 and use dp.'
            )
        if not cut:
            yield from super().layout_refusals(layout)
