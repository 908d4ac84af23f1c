"""What a person's loss may return, and how much a micro-batch counts.

A scalar; a dict or an output object with `loss` (those of `transformers`); or a pair of one of
these and a dict of further means, `(loss, {"acc": ...})`. A loss that is a mean over something else
than the samples, as over tokens that aren't ignored, states their number as "weight", in either
dict.
"""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor, nn

from paceline.comm.records import all_gather
from paceline.config.errors import InputError
from paceline.train.custom.feed import Part
from paceline.train.custom.uneven import Tell, UnevenLabels
from paceline.train.weighed import Weighed

Loss = Callable[[nn.Module, Any], Any]
"""Maps (module, batch) to the mean loss over the batch, in one of the forms above."""

WEIGHT = "weight"
_FORMS = (
    "return a scalar tensor, a dict or an object with `loss`, or a pair (loss, "
    '{"acc": ..., "weight": ...})'
)


class StatedLoss:
    """A person's loss as the loop calls it.

    Ranks add up what losses state in one vector, so all must state the same. They compare it once
    in training and once in evaluations, where a loss may give other figures.
    """

    def __init__(self, loss: Loss, micro_batch: int, num_ranks: int) -> None:
        self._loss, self._micro_batch, self._num_ranks = loss, micro_batch, num_ranks
        self._stated: dict[bool, tuple[str, ...]] = {}
        self._uneven: UnevenLabels | None = None

    def warn_by(self, tell: Tell) -> None:
        """From now on, tell where samples have labels that are ignored and no weight is stated."""
        self._uneven = UnevenLabels(tell)

    def __call__(self, module: nn.Module, part: Part) -> Weighed:
        """Loss of a micro-batch, and by how much it counts.

        Raises:
            InputError: it is in no form that is known, or states other things than before.
        """
        loss, figures = stated(self._loss(module, part.batch))
        self._must_be_same(module.training, tuple(sorted(figures)))
        if self._uneven is not None and WEIGHT not in figures:
            self._uneven.look(part.batch)
        weight = figures.pop(WEIGHT, part.num_samples / self._micro_batch)
        return Weighed(loss, weight if part.num_samples else 0.0, figures)

    def _must_be_same(self, training: bool, names: tuple[str, ...]) -> None:
        if training not in self._stated:
            everyone = [names]
            if self._num_ranks > 1:
                everyone = [tuple(each) for each in all_gather(names)]
            self._stated[training] = next((each for each in everyone if each != names), names)
        before = self._stated[training]
        if names != before:
            raise InputError(
                f"the loss states {_listed(names)} beside the loss of one batch and "
                f"{_listed(before)} of another: it must always state the same."
            )


def stated(returned: Any) -> tuple[Tensor, dict[str, Any]]:
    """A loss in any form, as its scalar tensor and what else it states.

    Raises:
        InputError: it is in no form that is known.
    """
    figures: dict[str, Any] = {}
    is_pair = type(returned) is tuple and len(returned) == 2 and isinstance(returned[1], Mapping)
    if is_pair:
        returned, figures = returned[0], dict(returned[1])
    if isinstance(returned, Mapping):
        # Whatever else stands in it may be logits: figures are stated in a pair.
        figures |= {key: returned[key] for key in (WEIGHT,) if key in returned}
        returned = returned.get("loss")
    elif not isinstance(returned, Tensor):
        returned = getattr(returned, "loss", returned)
    if not isinstance(returned, Tensor) or returned.numel() != 1:
        raise InputError(f"the loss returned {_what(returned)}: {_FORMS}.")
    for name, value in figures.items():
        is_number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
        if not isinstance(name, str) or not is_number:
            raise InputError(
                f"the loss states {name!r} as {_what(value)}: each must be one number, the mean "
                "over the batch (a weight: the number of what is averaged)."
            )
        figures[name] = value.reshape(()) if isinstance(value, Tensor) else float(value)
    weight = figures.get(WEIGHT)
    if isinstance(weight, float) and not 0 <= weight < float("inf"):
        raise InputError(f"the loss states a weight of {weight}: it must be a number from 0 on.")
    return returned.reshape(()), figures


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
