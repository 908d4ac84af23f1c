"""muP: initial weights and learning rates under which one learning rate is right for every width,
and for every depth.

By table 3 of https://arxiv.org/abs/2203.03466, for optimizers whose steps don't depend on the size
of gradients. With m = hidden_size / base_width, and l = num_layers / base_layers (1 without it):

| parameters | initial standard deviation | learning rate |
|---|---|---|
| embedding, norms, biases | init_std | lr |
| matrices of blocks | init_std / sqrt(m) | lr / m |
| head, routers of experts | init_std / m | lr / m |
| besides: matrices and biases that write to the residual stream | 1 / l | 1 / l |

Scores of attention are q k / d x sqrt(base_head_dim) instead of q k / sqrt(d): the factor
sqrt(base_head_dim / d) between them lies in the query's matrix (and bias), initial weights and
learning rate alike, which is the same for such optimizers (table 8 there). So nothing is added to
the forward pass, and what is exported is an ordinary network.

With base_layers, what attention and feed-forward layers (experts too) add to the residual stream is
multiplied by 1 / l (CompleteP, https://arxiv.org/abs/2505.01618): a factor on the matrices and
biases that write to the stream, initial weights and learning rates alike. Initial weights of such
matrices have the factor 1 / sqrt(2 base_layers) of a network of base_layers; without base_layers it
is 1 / sqrt(2 num_layers). Two things differ from factors in the forward pass: AdamW's weight decay
follows the learning rate, so these matrices decay l times as slowly, as all matrices of blocks
decay m times as slowly; and gradients shrink with 1 / l before `eps` in all other matrices of
blocks, which matters where they are as small as eps.
"""

import math

from paceline.config.family import ModelFamily
from paceline.config.model import Model

_OUTPUTS = (".router.weight", ".shared_gate.weight")
_WRITES = ("o_proj", "down_proj", "down_bias")


def writes_residual(name: str) -> bool:
    """Whether what a parameter of a block gives is added to the residual stream."""
    return name.removesuffix(".weight").removesuffix(".bias").endswith(_WRITES)


def init_factor(model: Model, name: str) -> float:
    """What a parameter's initial values are multiplied by."""
    if model.parametrization is None or model.base_width is None:
        return 1.0
    scale = model.base_width / model.hidden_size
    if _is_output(name):
        return scale
    own = math.sqrt(scale) if _is_inner(name) else 1.0
    return own * _query_factor(model, name) * math.sqrt(_depth_factor(model, name))


def lr_factor(model: ModelFamily, name: str) -> float:
    """What a parameter's learning rate is multiplied by."""
    if not isinstance(model, Model) or model.parametrization is None or model.base_width is None:
        return 1.0
    scale = model.base_width / model.hidden_size
    own = scale if _is_output(name) or _is_inner(name) else 1.0
    return own * _query_factor(model, name) * _depth_factor(model, name)


def _is_output(name: str) -> bool:
    return name == "head.weight" or name.endswith(_OUTPUTS)


def _is_inner(name: str) -> bool:
    return name.removesuffix(".weight").endswith(("_proj", ".proj"))


def _query_factor(model: Model, name: str) -> float:
    if model.base_head_dim is None or ".q_proj." not in name:
        return 1.0
    return math.sqrt(model.base_head_dim / model.head_dim)


def _depth_factor(model: Model, name: str) -> float:
    """Its root is that of initial values, which the network divides by sqrt(num_layers) already."""
    if model.base_layers is None or not writes_residual(name):
        return 1.0
    return model.base_layers / model.num_layers
