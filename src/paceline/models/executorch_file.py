"""Weights as ExecuTorch opens them: one program with its weights, see `cached_step`; XNNPACK
computes what it can of it. A program has one text at a time.

Matrices in 8 bits have a scale for each row, in 4 bits one for each 32 weights; their inputs get 8
bits as they come (a scale for each token). The embedding then has 8 bits, and a scale for each
token.

Runtime: https://docs.pytorch.org/executorch/
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.model import Model
from paceline.models.cached_step import check_graph, exported_step, quiet_export, step_of
from paceline.models.quantised import Bits

_GROUP = 32


def write_executorch(
    file: Path, model: Model, state: Mapping[str, Tensor], bits: Bits | None
) -> None:
    """Write a network.

    Args:
        state: its weights by our names, whole.
        bits: of matrices; None: fp32.

    Raises:
        InputError: packages are missing, or the network has no place in such a file.
    """
    check_graph(model, "executorch")
    inputs = {"hidden_size": model.hidden_size, "ffn_size": model.ffn_size}
    inputs["num_heads x head_dim"] = model.num_heads * model.head_dim
    for name, size in inputs.items():
        if bits == 4 and size % _GROUP:
            raise InputError(
                f"--format executorch gives {_GROUP} inputs of a row one scale in int4, and model."
                f"{name} = {size} is no multiple: use int8, or another format."
            )
    with quiet_export():
        try:
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import to_edge_transform_and_lower
            from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
            from torchao.quantization.granularity import PerAxis, PerGroup
        except ImportError:
            raise InputError(
                "--format executorch needs executorch and torchao: pip install "
                "'paceline[executorch]'."
            ) from None
        step = step_of(model, state, is_narrow=bits is not None)
        if bits is not None:
            config = Int8DynamicActivationIntxWeightConfig(
                weight_dtype=getattr(torch, f"int{bits}"),
                weight_granularity=PerAxis(0) if bits == 8 else PerGroup(_GROUP),
            )
            quantize_(step, config)
        program = exported_step(step, model, free_batch=False)
        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        file.write_bytes(lowered.to_executorch().buffer)
