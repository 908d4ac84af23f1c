"""Exact evaluations: held-out text by the passes that serve it with the same bits.

A product's rounding depends on how many rows it has, so a trainer's batches and a server's mix of
requests round differently. Here both use passes of one size (`generate.exact`), as a mode.
"""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.config.errors import InputError
from paceline.config.layout import Layout
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.generate.score import Given
from paceline.kernels.loss import IGNORED
from paceline.models.decoder import Decoder
from paceline.train.data import MicroBatch

_SEQUENCES = 2
"""Whose keys and values there is memory for: passes take one after the other."""


def check_exact_eval(layout: Layout) -> None:
    """Refuse a layout whose ranks don't hold the whole network as it is served.

    Raises:
        InputError: such a one.
    """
    wanted = {"param_dtype": "fp32", "compile": False, "recompute": "none"}
    odd = [name for name, value in wanted.items() if getattr(layout, name) != value]
    if layout.precision == "fp8":
        odd.append("precision")
    if not layout.is_plain or layout.fsdp > 1 or odd:
        given = f"layout.{odd[0]} = {getattr(layout, odd[0])!r}" if odd else layout.summary
        raise InputError(
            f"train.exact_eval = true needs ranks that hold the network as it is served, whole and "
            f"in fp32, and this layout has {given}: leave that out, or set exact_eval to false."
        )


class ExactLoss:
    """The mean loss of a micro-batch, by exact passes in the weights' own type."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def __call__(self, module: nn.Module, batch: MicroBatch) -> Tensor:
        """Mean loss in nats, fp64.

        Raises:
            InputError: this device can't keep it; see `generate.exact.check_places`.
        """
        if isinstance(module, DistributedDataParallel):
            module = module.module
        assert isinstance(module, Decoder)
        with torch.autocast(batch.tokens.device.type, enabled=False):
            if self._engine is None:
                serving = Serving(exact=True, max_sequences=_SEQUENCES, host_gb=0.0)
                self._engine = Engine(module, serving)
            losses = torch.cat([*self._engine.losses(texts_of(batch))])
        return losses.double().mean().to(batch.tokens.device)


def texts_of(batch: MicroBatch) -> list[Given]:
    """The texts of a micro-batch: each sample, cut where documents begin if these are apart, up to
    the last token that counts."""
    texts = []
    documents = batch.document_ids
    for row, (tokens, targets) in enumerate(zip(batch.tokens, batch.targets, strict=True)):
        sizes = [len(tokens)]
        if documents is not None:
            sizes = documents[row].unique_consecutive(return_counts=True)[1].tolist()
        parts = zip(tokens.split(sizes), targets.split(sizes), strict=True)
        for own, following in parts:
            if counted := int((following != IGNORED).sum()):
                texts.append(Given(own[:counted].tolist(), following[:counted].tolist()))
    return texts
