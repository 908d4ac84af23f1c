"""Products with an activation, the specification: plain torch, in any floating type.

Papers: SwiGLU https://arxiv.org/abs/2002.05202, squared ReLU https://arxiv.org/abs/2109.08668.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Weights (width, inputs) or biases (width,) to rows gate 0, up 0, gate 1, up 1 and so on."""
    return torch.stack((gate, up), dim=1).flatten(0, 1)


def activate(preact: Tensor, activation: str) -> Tensor:
    """The activation of (..., columns); that of "swiglu" has half the columns."""
    if activation == "relu":
        return F.relu(preact)
    if activation == "gelu":
        return F.gelu(preact, approximate="tanh")
    if activation == "squared_relu":
        return F.relu(preact).square()
    if activation == "swiglu":
        return F.silu(preact[..., 0::2]) * preact[..., 1::2]
    return preact


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    """activation(x @ weight.T + bias) + residual."""
    out = activate(F.linear(x, weight, bias), activation)
    return out if residual is None else out + residual


def grad_linear_act(
    grad: Tensor, weight: Tensor, preact: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """The gradient of what an activation was applied to, and its sum over all rows.

    Args:
        grad: (..., outputs), of the product after the activation.
        weight: (outputs, width), of that product.
        preact: (..., columns).
        activation: as in `activate`.
    """
    change = grad @ weight
    if activation == "swiglu":
        change = _swiglu_gradient(change, preact)
    else:
        change = change * _slope(preact, activation)
    wide = torch.promote_types(change.dtype, torch.float32)
    return change, change.flatten(0, -2).sum(0, dtype=wide)


def feed_forward(
    x: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    bias_in: Tensor | None,
    bias_out: Tensor | None,
    activation: str,
) -> Tensor:
    """Two products with an activation between them."""
    return F.linear(linear_act(x, weight_in, bias_in, activation, None), weight_out, bias_out)


def _slope(z: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return (z > 0).to(z.dtype)
    if activation == "squared_relu":
        return 2 * F.relu(z)
    if activation == "gelu":
        share = torch.sigmoid(1.5957691216057308 * (z + 0.044715 * z**3))
        return share + z * share * (1 - share) * 1.5957691216057308 * (1 + 3 * 0.044715 * z**2)
    return torch.ones_like(z)


def _swiglu_gradient(change: Tensor, preact: Tensor) -> Tensor:
    gate, up = preact[..., 0::2], preact[..., 1::2]
    share = torch.sigmoid(gate)
    pair = change * up * share * (1 + gate * (1 - share)), change * gate * share
    return torch.stack(pair, dim=-1).flatten(-2)
