"""What a codec is: values to a flat buffer of bytes and back.

The payload of a codec is one uint8 tensor whose length depends on the number of values alone, so
that any backend can carry it (gloo takes no fp8) and the receiver knows what comes. A codec has no
state: what it loses is its caller's to keep (`feedback`).

NaN and infinity are never lost: where one was given, what is decoded is not finite, and often no
other value of its block. Their error is nothing, so that a bad step leaves no trace in later ones.
"""

from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT = 4
"""A payload begins at a multiple of so many bytes of its storage, and its length is one: payloads
of one length can stand side by side."""
ROW_ALIGNMENT = 16
"""Rows of payloads begin at multiples of this, so that codecs may look at them as wider types."""


def aligned(num_bytes: int, to: int = ALIGNMENT) -> int:
    """The next multiple."""
    return -(-num_bytes // to) * to


class BlockCodec(Protocol):
    """Compresses values one after another, so that any cut of a buffer can be coded by itself."""

    @property
    def name(self) -> str:
        """As in a Job."""
        ...

    @property
    def is_unbiased(self) -> bool:
        """Whether the mean over seeds of what is decoded is what was given; else it takes none."""
        ...

    def num_bytes(self, num_values: int) -> int:
        """Length of the payload of so many values, a multiple of ALIGNMENT."""
        ...

    def encode(self, values: Tensor, payload: Tensor, *, seed: int | None = None) -> None:
        """Write the payload of values: (n,) floating point to (num_bytes(n),) uint8, in place.

        Args:
            seed: of stochastic rounding; None rounds to nearest.
        """
        ...

    def encode_with_error(
        self, values: Tensor, error: Tensor, payload: Tensor, *, seed: int | None = None
    ) -> None:
        """Encode values + error and leave in `error` what the payload lacks of it.

        Args:
            values: (n,) floating point; not changed.
            error: (n,) fp32 or fp64; in place.
            payload: (num_bytes(n),) uint8; in place.
        """
        ...

    def decode(self, payload: Tensor, values: Tensor, *, add: bool = False) -> None:
        """Read a payload into values, or add it to them: (n,) floating point, in place."""
        ...


def check(codec: BlockCodec, values: Tensor, payload: Tensor, error: Tensor | None = None) -> None:
    """Refuse buffers that don't belong together.

    Raises:
        ValueError: one sentence with what was given and what is required.
    """
    if values.ndim != 1 or not values.is_floating_point():
        raise ValueError(
            f"{codec.name} codes flat floating point values, not {values.dtype} of shape "
            f"{tuple(values.shape)}: flatten them."
        )
    num_bytes = codec.num_bytes(len(values))
    if payload.shape != (num_bytes,) or not payload.is_contiguous():
        raise ValueError(
            f"the {codec.name} payload of {len(values)} values is {num_bytes} contiguous bytes, "
            f"not a tensor of shape {tuple(payload.shape)}: allocate num_bytes(n)."
        )
    if error is not None and error.shape != values.shape:
        raise ValueError(
            f"{len(values)} values have as many errors, not {tuple(error.shape)}: cut both alike."
        )


def refuse_seed(codec: BlockCodec, seed: int | None) -> None:
    """Say that a codec draws nothing.

    Raises:
        ValueError: a seed was given.
    """
    if seed is not None:
        raise ValueError(f"{codec.name} rounds nothing at random: give no seed.")


def working_type(*tensors: Tensor) -> torch.dtype:
    """What to compute in: fp64 where a tensor is, else fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
