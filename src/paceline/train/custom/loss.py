"""What a person's loss may return, and how much a micro-batch counts.

A scalar; a dict or an output object with `loss` (those of `transformers`); or a pair of one of
these and a dict of further means, `(loss, {"acc": ...})`. A loss that is a mean over something else
than the samples states their number as "weight", in either dict; of labels it is found
(`custom.labels`).
"""

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor, nn

from paceline.comm.local_part import is_shared
from paceline.comm.records import all_gather
from paceline.config.errors import InputError
from paceline.train.custom.labels import (
    BY_LABELS,
    Mean,
    Tell,
    UnevenLabels,
    mean_of,
    means_over_labels,
)
from paceline.train.custom.reading import CustomMicroBatch
from paceline.train.weighted_loss import WeightedLoss

Loss = Callable[[nn.Module, Any], Any]
"""Maps (module, batch) to the mean loss over the batch, in one of the forms above."""

WEIGHT = "weight"
_FORMS = (
    "return a scalar tensor, a dict or an object with `loss`, or a pair (loss, "
    '{"acc": ..., "weight": ...})'
)


class _Form(NamedTuple):
    """What a loss gives beside itself."""

    names: tuple[str, ...]
    """Of what it states."""
    labels_of_one: int
    """So many labels weigh one: a power of two, by which numbers are divided without rounding. 0:
    it isn't known to be a mean over labels, or says how much it counts."""


class UserLoss:
    """A person's loss as the loop calls it.

    Ranks add up what losses state in one vector, and weigh them alike, so all must be of one form.
    They compare it once in training and once in evaluations, where a loss may give other figures.
    """

    def __init__(self, loss: Loss, micro_batch: int, num_ranks: int) -> None:
        self._loss, self._micro_batch, self._num_ranks = loss, micro_batch, num_ranks
        self._forms: dict[bool, _Form] = {}
        self._tell: Tell | None = None
        self._uneven: UnevenLabels | None = None

    def tell_by(self, tell: Tell) -> None:
        """From now on, tell by what micro-batches count, where that is more than their samples."""
        self._tell, self._uneven = tell, UnevenLabels(tell)

    def __call__(self, module: nn.Module, part: CustomMicroBatch) -> WeightedLoss:
        """Loss of a micro-batch, and by how much it counts.

        Raises:
            InputError: it is in no form that is known, or in another one than before.
        """
        with means_over_labels() as means:
            loss, figures = parse_loss(self._loss(module, part.batch))
            form = self._form(module.training, tuple(sorted(figures)), mean_of(loss, means))
            weight = figures.pop(WEIGHT, part.num_samples / self._micro_batch)
            if form.labels_of_one:
                weight = _number_of_labels(loss, means) / form.labels_of_one
        if not form.labels_of_one and WEIGHT not in form.names and self._uneven is not None:
            self._uneven.look(part.batch)
        return WeightedLoss(loss, weight if part.num_samples else 0.0, figures)

    def _form(self, training: bool, names: tuple[str, ...], mean: Mean | None) -> _Form:
        """The form of all ranks."""
        if training not in self._forms:
            is_found = mean is not None and WEIGHT not in names
            mine = (names, _power_of_two(mean.labels.numel()) if mean and is_found else 0)
            ranks = all_gather(mine) if self._num_ranks > 1 else [mine]
            other = next((tuple(each) for each, _ in ranks if tuple(each) != names), names)
            labels = [number for _, number in ranks]
            self._forms[training] = _Form(other, max(labels) if all(labels) else 0)
            if training and all(labels) and self._tell is not None:
                self._tell(BY_LABELS)
        form = self._forms[training]
        if names != form.names:
            raise InputError(
                f"the loss states {_listed(names)} beside the loss of one batch and "
                f"{_listed(form.names)} of another: it must always state the same."
            )
        return form


def _number_of_labels(loss: Tensor, means: Sequence[Mean]) -> Tensor:
    """Of a loss that was a mean over labels before, though now something may be added to it."""
    mean = mean_of(loss, means) or next(iter(means), None)
    if mean is None:
        raise InputError(
            "the loss was what cross_entropy returned and is something else now, so that its parts "
            'can\'t be weighed against each other: let it state its "weight" (docs/own-models.md).'
        )
    return mean.number().float()


def _power_of_two(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)


def parse_loss(returned: Any) -> tuple[Tensor, dict[str, Any]]:
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
    if is_shared(returned):  # of what a plan of tp left cut
        returned = returned.full_tensor()
    return returned if returned.ndim == 0 else returned.reshape(()), figures


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
