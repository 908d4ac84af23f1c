"""Labels: over how many of them a loss is a mean, seen where it is computed.

A batch is cut into micro-batches on ranks, and a mean over labels must count by these. The batch
doesn't tell their number: whether the model shifts its labels, and what else the loss is a mean
over, is the code's to say. But where the loss is what one call of torch's `cross_entropy` or
`nll_loss` returned, as it is in most losses and in most models of `transformers`, that call knows.
So these two are listened to while a person's loss runs. A loss that something was added to, that a
kernel computes, or that compiled code computes, isn't known: then a run says once what happens
where samples have different numbers of labels that are ignored.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _nn
from torch.utils._pytree import tree_leaves

from paceline.kernels.loss import IGNORED

Tell = Callable[[str], None]

BY_LABELS = (
    "The loss is a mean over labels: micro-batches count by their labels that are not ignored "
    "(docs/own-models.md)."
)
BY_SAMPLES = (
    f"Samples have different numbers of labels that are ignored ({IGNORED}), the loss states no "
    "weight, and it is not what cross_entropy returned: micro-batches count by their samples, not "
    'by their labels. If the loss is a mean over labels, return {"loss": mean, "weight": '
    f"(labels != {IGNORED}).sum()}} (docs/own-models.md)."
)
# Each look waits for the device, so only a run's first micro-batches are looked at. Assumed.
MOST_LOOKS = 64


class Mean(NamedTuple):
    """A mean over labels that was computed."""

    loss: Tensor
    labels: Tensor
    ignored: int
    """Such labels don't count."""
    class_weights: Tensor | None
    """By how much a label counts, (classes,); None: each as one."""

    def number(self) -> Tensor:
        """What it is a mean over, ()."""
        counts = self.labels != self.ignored
        if self.class_weights is None:
            return counts.sum()
        return (self.class_weights[self.labels.where(counts, 0)] * counts).sum()


_heard: list[Mean] = []
_MEAN = 1  # as torch numbers reductions


def _listening(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, which leaves in `_heard` what it took a mean over."""

    def listening(
        logits: Tensor,
        labels: Tensor,
        weight: Tensor | None,
        reduction: int,
        ignored: int,
        *more: Any,
    ) -> Tensor:
        loss = function(logits, labels, weight, reduction, ignored, *more)
        is_mean = reduction == _MEAN and not labels.is_floating_point()
        if is_mean and not torch.compiler.is_compiling():
            _heard.append(Mean(loss, labels, ignored, weight))
        return loss

    return listening


# What `torch.nn.functional` calls, so that these are heard by whatever name they were imported.
_FUNCTIONS = {name: getattr(_nn, name) for name in ("cross_entropy_loss", "nll_loss_nd")}
# Always the same: compiled code is compiled anew where it finds another function.
_LISTENING = {name: _listening(function) for name, function in _FUNCTIONS.items()}


@contextmanager
def means_over_labels() -> Iterator[list[Mean]]:
    """Collect the means over labels that are computed meanwhile; they are let go at the end."""
    vars(_nn).update(_LISTENING)
    try:
        yield _heard
    finally:
        vars(_nn).update(_FUNCTIONS)
        _heard.clear()


def mean_of(loss: Tensor, means: Sequence[Mean]) -> Mean | None:
    """The one that is the loss itself."""
    return next((mean for mean in means if mean.loss is loss), None)


class UnevenLabels:
    """Looks for samples that differ in how many of their labels are ignored, and tells once."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._looks_left = MOST_LOOKS
        self._kept: dict[int, int] = {}

    def look(self, batch: Any) -> None:
        """At a micro-batch that counts by its samples; its labels are any tensors of whole numbers,
        (samples, ...)."""
        if not self._looks_left:
            return
        self._looks_left -= 1
        for place, leaf in enumerate(tree_leaves(batch)):
            if isinstance(leaf, Tensor) and leaf.ndim and leaf.dtype in (torch.int64, torch.int32):
                self._count(place, leaf)

    def _count(self, place: int, labels: Tensor) -> None:
        """`place` tells a batch's tensors apart; the same one holds labels in each."""
        ignored = (
            (labels == IGNORED).flatten(1) if labels.ndim > 1 else (labels == IGNORED)[:, None]
        )
        for number in ignored.sum(dim=1).unique().tolist():
            if self._looks_left and self._kept.setdefault(place, number) != number:
                self._looks_left = 0
                self._tell(BY_SAMPLES)
