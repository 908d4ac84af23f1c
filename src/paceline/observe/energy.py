"""Energy of a run: what the nodes of its starts counted, a file each in energy/.

A file is written anew every half minute and at the end, so a node that is lost takes at most that
much of its count along.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter

from paceline.config import files
from paceline.config.errors import InputError
from paceline.observe.records import Moment
from paceline.observe.run import Run

FOLDER = "energy"
_Joules = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]


@dataclass(frozen=True)
class EnergyRecord:
    """What a node took in one start. Times are Unix seconds."""

    node: str
    began: Moment
    until: Moment
    devices_j: _Joules | None
    host_j: _Joules | None
    """Of processors and memory, whatever else runs there."""
    missing: tuple[str, ...] = ()
    """Sentences: what isn't counted, and why."""

    def write(self, run: Run) -> None:
        """Into the Run; replaces what was written before of this start.

        Raises:
            OSError: the disk is full or gone.
        """
        run.write_json(f"{FOLDER}/{self.node}-{self.began:.3f}.json", asdict(self))


_RECORD = TypeAdapter(EnergyRecord)


@dataclass(frozen=True)
class EnergyUse:
    """Sums of records."""

    devices_j: float | None
    """None: no node counted it."""
    hosts_j: float | None
    missing: tuple[str, ...]

    @property
    def joules(self) -> float | None:
        """Of all that is counted; None: nothing is."""
        known = [one for one in (self.devices_j, self.hosts_j) if one is not None]
        return sum(known) if known else None


def energy_of(run: Run) -> EnergyUse | None:
    """What a Run took over all starts and nodes; None: it wrote down nothing of it."""
    records, missing = [], []
    for file in sorted((run.path / FOLDER).glob("*.json")):
        try:
            records.append(files.read_json(file, _RECORD, "remove it"))
        except InputError as error:
            missing.append(str(error))
    if not records and not missing:
        return None
    told = dict.fromkeys([*missing, *(each for one in records for each in one.missing)])
    return EnergyUse(
        _sum([one.devices_j for one in records]), _sum([one.host_j for one in records]), tuple(told)
    )


def _sum(figures: Sequence[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else None
