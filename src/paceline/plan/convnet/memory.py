"""What a convolutional network holds in memory while it trains."""

import numpy as np
import numpy.typing as npt

from paceline.config.vision import ConvNet
from paceline.plan.convnet.kernels import VALUE_BYTES, table_of
from paceline.plan.points import Array

_FP32, _INDEX_BYTES = 4, 8
# Reserved over used memory, and what context and communicators take: assumed.
_SLACK, _CONTEXT_BYTES = 0.10, 0.75e9


def convnet_memory_bytes(
    network: ConvNet, batch: npt.ArrayLike, precision: str, num_ranks: npt.ArrayLike = 1
) -> dict[str, Array]:
    """Peak memory of a rank by term: what eager PyTorch keeps for the backward pass.

    Each convolution keeps its input and each norm its own; an activation in place keeps its output,
    which is the next convolution's input; SiLU keeps what it was given.

    Args:
        batch: images of a micro-batch.
        precision: of the activations.
        num_ranks: data parallel ranks; more than one reduce in buckets beside the gradients.
    """
    params = float(network.num_params)
    value, batch = VALUE_BYTES[precision], np.asarray(batch, float)
    largest = float(table_of(network).out_elements.max())
    used = {
        "params": np.asarray(params * _FP32),
        "grads": np.asarray(params * _FP32),
        "optimizer": np.asarray(params * _FP32),
        # Two gradients of the largest tensor are there at a time.
        "activations": (kept_bytes(network, value) + 2 * largest * value) * batch
        + (params * value if value == 2 else 0.0),
        "comm_buffers": np.where(np.asarray(num_ranks) > 1, params * _FP32, 0.0),
    }
    slack = _SLACK * sum(used.values(), np.zeros(()))
    return used | {"allocator_slack": slack, "context": np.asarray(_CONTEXT_BYTES)}


def kept_bytes(network: ConvNet, value_bytes: int) -> float:
    """Bytes of one image that forward keeps for backward.

    Args:
        network: the convolutions.
        value_bytes: of a number of an activation.
    """
    table = table_of(network)
    # What a projection gives is added in place, and what is added to is an input kept already.
    outputs = 1 + (1 - table.skips) + table.silu + table.squeezes
    # The maximum of the stem gives a quarter and keeps where it found it, 8 bytes each.
    pool = table.pools * 0.25 * (1 + _INDEX_BYTES / value_bytes)
    kept = np.sum(table.out_elements * (outputs + pool)) + 3 * network.image_size**2
    return float(kept) * value_bytes
