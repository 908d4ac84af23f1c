"""Weights as ONNX Runtime opens them: one graph with its weights, see `cached_step`.

Matrices in 8 or 4 bits are MatMulNBits with a scale for each 32 weights, and products in whole
numbers of 8 bits (accuracy_level 4); the embedding then has 8 bits and a scale for each token.

Operator: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.model import Model
from paceline.models.cached_step import (
    NAMES,
    RESULTS,
    check_graph,
    exported_step,
    quiet_export,
    step_of,
)
from paceline.models.quantised import Bits

_GROUP, _WHOLE_NUMBERS = 32, 4
_MOST_BYTES = 2**31


def write_onnx(file: Path, model: Model, state: Mapping[str, Tensor], bits: Bits | None) -> None:
    """Write a network.

    Args:
        state: its weights by our names, whole.
        bits: of matrices; None: fp32.

    Raises:
        InputError: packages are missing, or the network has no place in such a file.
    """
    check_graph(model, "onnx")
    if 4 * (model.num_params + model.num_embedding_params) > _MOST_BYTES:
        raise InputError(
            f"--format onnx makes one file of at most 2 GiB in fp32 first, and this network has "
            f"{model.num_params / 1e6:.0f} M parameters: take gguf or safetensors."
        )
    try:
        import onnx
        import onnxscript  # noqa: F401  torch.onnx writes by it
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    except ImportError:
        raise InputError(
            "--format onnx needs onnx, onnxscript and onnxruntime: pip install 'paceline[edge]'."
        ) from None
    with quiet_export():
        step = step_of(model, state, is_narrow=bits is not None)
        program = exported_step(step, model, free_batch=True)
        written = torch.onnx.export(
            program, dynamo=True, input_names=NAMES, output_names=RESULTS, verbose=False
        )
        assert written is not None
        graph = written.model_proto
        if bits is not None:
            quantiser = MatMulNBitsQuantizer(
                graph,
                bits=bits,
                block_size=_GROUP,
                is_symmetric=True,
                accuracy_level=_WHOLE_NUMBERS,
            )
            quantiser.process()
            graph = quantiser.model.model
    for each in (graph.graph, *graph.graph.node, *graph.graph.value_info, *graph.graph.initializer):
        del each.metadata_props[:]  # stacks of Python, as long as the weights of a small network
    onnx.save(graph, str(file))
