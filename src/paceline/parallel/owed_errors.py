"""Who owes what compression lost, by numbers that a checkpoint keeps.

Errors belong to parameters by name, and the ranks that hold the same parameters are numbered. A
pipeline may hold copies of a parameter (tied embeddings, DualPipe), each with an error of its own,
two of them on one rank even: so the number counts copies too. Who has the same number, modulo how
many there are now, goes on with an error. So the sum of what is owed stays.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from paceline.comm.mesh import Meshes
from paceline.parallel.tied_parameters import count_copies


class _Copy(NamedTuple):
    name: str
    number: int
    """Of those who owe something of this parameter."""


class Owners:
    """Which error is whose.

    Args:
        names: of this rank's parameters; copies share one.
        rank, num_ranks: this rank among those that hold the same parameters.
        meshes: of all ranks, which all call where there is a pipeline.
    """

    def __init__(
        self, names: Mapping[nn.Parameter, str], rank: int, num_ranks: int, meshes: Meshes
    ) -> None:
        counts = count_copies(names.values(), meshes.dense)
        seen: Counter[str] = Counter()
        self._copies: dict[str, _Copy] = {}
        self._num_owners = {name: num_ranks * counts.total(name) for name in names.values()}
        self.labels: dict[nn.Parameter, str] = {}
        """Of parameters: the name, but for a second copy on this rank."""
        for parameter, name in names.items():
            number = (counts.before(name) + seen[name]) * num_ranks + rank
            label = f"{name} {seen[name]}" if seen[name] else name
            self.labels[parameter], self._copies[label] = label, _Copy(name, number)
            seen[name] += 1

    def numbered(self, errors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """{label: error} as a checkpoint keeps it: {number: {name: error}}."""
        saved: dict[str, dict[str, Tensor]] = {}
        for label, error in errors.items():
            name, number = self._copies[label]
            saved.setdefault(str(number), {})[name] = error
        return saved

    def to_load(
        self, kind: str, saved: Iterable[str], room: Callable[[str, str], Tensor]
    ) -> dict[str, dict[str, Tensor]]:
        """Room for what this rank takes over, as `numbered` gives it.

        Args:
            kind: of the paths "kind.0.layer.weight".
            saved: paths of all tensors that were saved.
            room: makes the memory for a path and a label.
        """
        state: dict[str, dict[str, Tensor]] = {}
        for path in saved:
            if path.startswith(f"{kind}."):
                _, number, name = path.split(".", 2)
                label = self._taker(int(number), name)
                if label is not None:
                    state.setdefault(number, {})[name] = room(path, label)
        return state

    def labelled(self, state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """What `to_load` made, now filled: {number: {label: error}}."""
        found: dict[str, dict[str, Tensor]] = {}
        for number, errors in state.items():
            for name, error in errors.items():
                label = self._taker(int(number), name)
                assert label is not None
                found.setdefault(number, {})[label] = error
        return found

    def _taker(self, number: int, name: str) -> str | None:
        """The label of this rank that goes on with an error."""
        if name not in self._num_owners:
            return None
        copy = _Copy(name, number % self._num_owners[name])
        return next((label for label, each in self._copies.items() if each == copy), None)
