"""Products of matrices with what follows them: bias, activation, residual, in one launch.

Backward likewise: the product that carries the gradient back to an activation is finished with its
derivative (`grad_linear_act`; `feed_forward` joins both halves of such a layer, so that this
happens). Arithmetic is in fp32 whatever the tensors' type, and what is written is rounded once.

What fusion is worth: a pass over the result takes as long as about 370 / K of the product (an H200:
790 TFLOP/s against 4.3 TB/s), so much below K = 2048 and little above 8192.

Not here: products in 8-bit types (`parallel/fp8.py` uses torchao's).
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.cost import Cost
from paceline.kernels.matmul import reference
from paceline.kernels.matmul.reference import interleave as interleave

Activation = Literal["none", "relu", "gelu", "squared_relu", "swiglu"]

SHAPES = (
    (8192, 4096, 1024),
    (8192, 4096, 4096),
    (8192, 28672, 4096),
    (8192, 4096, 14336),
)
"""Rows, columns and what is summed over, of layers that people train."""


def linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """activation(x @ weight.T + bias) + residual.

    Args:
        x: (..., K), of any strides.
        weight: (N, K), of x's type.
        bias: (N,), of x's type.
        activation: "gelu" in its tanh form; "swiglu" is silu(even columns) * odd columns, see
            `interleave`.
        residual: of the result's shape.

    Returns:
        (..., N), or (..., N / 2) for "swiglu".

    Raises:
        InputError: shapes or types don't fit.
    """
    x, weight, bias = _as_autocast(x, weight, bias)
    _check_activation(activation, weight.shape[0])
    _check_product(x, weight, "weight")
    _check_bias(bias, weight, "bias")
    columns = _columns(weight, activation)
    if residual is not None and residual.shape != (*x.shape[:-1], columns):
        raise InputError(
            f"A residual of shape {tuple(residual.shape)} was given for a result of shape "
            f"{(*x.shape[:-1], columns)}; give one of the result's shape."
        )
    if not switch.takes("matmul", x):
        return reference.linear_act(x, weight, bias, activation, residual)
    from paceline.kernels.matmul import operators

    if residual is not None and residual.dtype != x.dtype:  # its sum is of the wider type
        return operators.linear_act(x, weight, bias, activation, None) + residual
    return operators.linear_act(x, weight, bias, activation, residual)


def grad_linear_act(
    grad: Tensor, weight: Tensor, preact: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """The gradient before an activation that a product follows; no gradients of its own.

    Args:
        grad: (..., outputs), the gradient of that product's result.
        weight: (outputs, width), of that product; of grad's type.
        preact: (..., width), or (..., 2 * width) for "swiglu": what the activation was applied to.
        activation: as in `linear_act`.

    Returns:
        (grad @ weight) times the derivative, of preact's shape and type, and its sum over all rows
        in fp32 at least: the gradient of the bias.

    Raises:
        InputError: shapes or types don't fit.
    """
    _check_activation(activation, 0)
    _check_product(grad, weight.mT, "transposed weight")
    width = weight.shape[1] * (2 if activation == "swiglu" else 1)
    if preact.shape != (*grad.shape[:-1], width) or preact.dtype != grad.dtype:
        raise InputError(
            f"Values of shape {tuple(preact.shape)} in {preact.dtype} were given as those before "
            f'"{activation}"; give {(*grad.shape[:-1], width)} in {grad.dtype}.'
        )
    with torch.no_grad():
        if not switch.takes("matmul", grad):
            return reference.grad_linear_act(grad, weight, preact, activation)
        from paceline.kernels.matmul import operators

        return operators.grad_linear_act(grad, weight, preact, activation)


def feed_forward(
    x: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    bias_in: Tensor | None = None,
    bias_out: Tensor | None = None,
    activation: Activation = "swiglu",
) -> Tensor:
    """activation(x @ weight_in.T + bias_in) @ weight_out.T + bias_out.

    Backward keeps x and one more tensor: for "relu" and "squared_relu" what the activation gave,
    else what it was applied to, and computes the activation anew in passing.

    Args:
        x: (..., K), of any strides.
        weight_in: (N, K), of x's type; gate and up rows interleaved for "swiglu".
        weight_out: (outputs, N), or (outputs, N / 2) for "swiglu".
        bias_in: (N,).
        bias_out: (outputs,).
        activation: any but "none".

    Returns:
        (..., outputs)

    Raises:
        InputError: shapes or types don't fit.
    """
    x, weight_in, bias_in = _as_autocast(x, weight_in, bias_in)
    _, weight_out, bias_out = _as_autocast(x, weight_out, bias_out)
    _check_activation(activation, weight_in.shape[0])
    if activation == "none":
        raise InputError(
            'activation = "none" was given to a feed-forward layer; name one, '
            "or multiply the two weights."
        )
    _check_product(x, weight_in, "weight_in")
    _check_bias(bias_in, weight_in, "bias_in")
    inner = _columns(weight_in, activation)
    if weight_out.dim() != 2 or weight_out.shape[1] != inner or weight_out.dtype != x.dtype:
        raise InputError(
            f"weight_out of shape {tuple(weight_out.shape)} in {weight_out.dtype} was given; "
            f"give (outputs, {inner}) in {x.dtype}."
        )
    _check_bias(bias_out, weight_out, "bias_out")
    if not switch.takes("matmul", x):
        return reference.feed_forward(x, weight_in, weight_out, bias_in, bias_out, activation)
    from paceline.kernels.matmul import operators

    return operators.feed_forward(x, weight_in, weight_out, bias_in, bias_out, activation)


def linear_act_forward_cost(
    rows: int,
    columns: int,
    inner: int,
    item_size: int,
    activation: Activation = "none",
    has_residual: bool = False,
    saves: bool = False,
) -> Cost:
    """Read x, weight and residual, write the result, and what backward needs where it is saved.

    Args:
        rows: of x.
        columns: rows of the weight.
        inner: what is summed over.
        item_size: bytes of a value.
        activation: "swiglu" gives half the columns.
        has_residual: whether one is read.
        saves: whether the values before the activation are written.
    """
    width = columns // 2 if activation == "swiglu" else columns
    values = rows * inner + columns * inner + rows * width * (1 + has_residual)
    return Cost((values + rows * columns * saves) * item_size, 2 * rows * columns * inner)


def linear_act_backward_cost(
    rows: int, columns: int, inner: int, item_size: int, activation: Activation = "none"
) -> Cost:
    """Two products, and before them, where there is an activation, a pass over its gradient.

    The pass reads the gradient and what was kept, and writes; each product reads two matrices and
    writes one.
    """
    width = columns // 2 if activation == "swiglu" else columns
    passed = 0 if activation == "none" else rows * width + 2 * rows * columns
    products = 2 * (rows * columns + columns * inner + rows * inner)
    return Cost((passed + products) * item_size, 4 * rows * columns * inner)


def grad_linear_act_cost(
    rows: int, width: int, outputs: int, item_size: int, activation: Activation
) -> Cost:
    """Read grad, weight and the values before the activation, write the gradient of those."""
    columns = width * (2 if activation == "swiglu" else 1)
    values = rows * outputs + outputs * width + 2 * rows * columns
    return Cost(values * item_size, 2 * rows * width * outputs)


def _columns(weight: Tensor, activation: Activation) -> int:
    """Of the result."""
    return weight.shape[0] // (2 if activation == "swiglu" else 1)


def _as_autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """In the type that autocast wants of products, where it is on."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _check_activation(activation: str, columns: int) -> None:
    if activation not in get_args(Activation):
        raise InputError(
            f'activation = "{activation}" was given; use one of {", ".join(get_args(Activation))}.'
        )
    if activation == "swiglu" and columns % 2:
        raise InputError(
            f'A weight of {columns} rows was given with "swiglu"; '
            "give pairs of rows, see `interleave`."
        )


def _check_product(x: Tensor, weight: Tensor, name: str) -> None:
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        raise InputError(
            f"x of shape {tuple(x.shape)} and a {name} of shape {tuple(weight.shape)} were given; "
            "give x (..., K) and (N, K)."
        )
    if x.dtype != weight.dtype:
        raise InputError(
            f"x in {x.dtype} and a {name} in {weight.dtype} were given; convert one of them."
        )


def _check_bias(bias: Tensor | None, weight: Tensor, name: str) -> None:
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise InputError(
            f"{name} of shape {tuple(bias.shape)} in {bias.dtype} was given; "
            f"give ({weight.shape[0]},) in {weight.dtype}."
        )
