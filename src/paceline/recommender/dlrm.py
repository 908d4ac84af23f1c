"""DLRM: dense features and rows of embedding tables to the logit of a click.

The network holds its MLPs only; rows come with the batch, from wherever tables live
(`paceline.recommender.parameter_server.tables`). The bottom MLP maps dense features to a vector as
wide as a row; the dot products of all pairs among it and the rows go, beside it, through the top
MLP.

Paper: https://arxiv.org/abs/1906.00091.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from paceline.config.recommender import Dlrm
from paceline.models.shares import assign


class DlrmNetwork(nn.Module):
    """The dense part of a DLRM."""

    def __init__(self, model: Dlrm) -> None:
        super().__init__()
        self.bottom = _mlp(model.bottom_widths, last_is_linear=False)
        self.top = _mlp(model.top_widths, last_is_linear=True)
        self._num_vectors = len(model.tables) + 1

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Dense features (batch, num_dense), rows (batch, tables, dim) -> logits (batch,)."""
        bottom = self.bottom(dense)  # (batch, dim)
        vectors = torch.cat([bottom.unsqueeze(1), rows.to(bottom.dtype)], dim=1)
        products = vectors @ vectors.transpose(1, 2)  # (batch, vectors, vectors)
        first, second = torch.tril_indices(
            self._num_vectors, self._num_vectors, offset=-1, device=dense.device
        )
        return self.top(torch.cat([bottom, products[:, first, second]], dim=1)).squeeze(1)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Normal weights and biases with the deviations of DLRM's own code.

        Weights: sqrt(2 / (inputs + outputs)); biases: sqrt(1 / outputs). In place, also on a
        sharded module: give every rank a generator with the same seed.
        """
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                spread = (2 / (layer.in_features + layer.out_features)) ** 0.5
                for parameter, std in (
                    (layer.weight, spread),
                    (layer.bias, layer.out_features**-0.5),
                ):
                    drawn = torch.randn(parameter.shape, generator=generator) * std
                    assign(parameter, drawn)


def _mlp(widths: Sequence[int], *, last_is_linear: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers[:-1] if last_is_linear else layers))


def original_state(state: Mapping[str, Tensor], tables: Sequence[Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of DLRM's own code, which computes the same with them.

    Args:
        state: under the names of `DlrmNetwork.state_dict()`.
        tables: of each the rows, (rows, dim).

    Source: https://github.com/facebookresearch/dlrm (its last layer has a sigmoid behind it).
    """
    rows = {f"emb_l.{number}.weight": table for number, table in enumerate(tables)}
    parts = ((name.partition("."), tensor) for name, tensor in state.items())
    return {f"{mlp[:3]}_l.{layer}": tensor for (mlp, _, layer), tensor in parts} | rows
