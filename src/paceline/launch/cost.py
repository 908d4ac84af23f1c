"""Cost of runs: the ledger of each, with prices, and what was got for it.

Only what is held is paid for, so a queue costs nothing. A price is what the person gave, that of
the site that the run was launched on, or the Job's (`cluster.prices`); without one there is device
time alone.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.config.site import NodeType, site_named
from paceline.launch.attempts import attempts_of, launched_attempts
from paceline.launch.ledger import Ledger, ledger
from paceline.launch.records import launched_runs, launches_of, submitted_numbers
from paceline.launch.run_records import RunRecords
from paceline.launch.run_spans import spans_of
from paceline.observe.energy import EnergyUse, energy_of
from paceline.observe.run import Run, complete_steps, run_named
from paceline.observe.summary import number

HOUR_US = 3_600_000_000


@dataclass(frozen=True)
class Price:
    """What a device costs an hour."""

    usd: float
    source: str
    """Who says so."""

    def of(self, device_us: int) -> float:
        """USD of so much device time, in microseconds."""
        return self.usd * device_us / HOUR_US


@dataclass(frozen=True)
class RunCost:
    """What a run cost, and what was got for it."""

    run: Run
    name: str
    """Of its directory."""
    ledger: Ledger
    price: Price | None
    """None: nobody gave one."""
    num_steps: int
    """That were kept."""
    num_lost_steps: int
    """That were done again."""
    unit: str
    """What it counts: tokens or samples."""
    num_units: int
    """Of kept steps."""
    num_epochs: float | None
    """Times that the train split was read; None: its length isn't known."""
    num_checkpoints: int
    """That are there."""
    planned_us: int | None
    """Device time of as many steps as were kept, as plan.json has it; None: it predicts none."""
    energy: EnergyUse | None
    """What its nodes counted; None: none did."""

    @property
    def usd(self) -> float | None:
        """Of all attempts."""
        return None if self.price is None else self.price.of(self.ledger.held_us)

    @property
    def planned_usd(self) -> float | None:
        """Of `planned_us`."""
        if self.price is None or self.planned_us is None:
            return None
        return self.price.of(self.planned_us)

    def joules_per(self, count: float) -> float | None:
        """Joules for each of so many; None: none are known, or there is none."""
        joules = None if self.energy is None else self.energy.joules
        return joules / count if joules is not None and count else None

    def per(self, count: float | None) -> float | None:
        """USD for each of so many; None: no price is known, or there is none."""
        return self.usd / count if self.usd is not None and count else None


def cost_of(records: RunRecords, price: Price | None = None) -> RunCost:
    """What a Run cost so far.

    Args:
        records: of the Run.
        price: None: of the site of its newest launch, else of its Job, where they have one.

    Raises:
        InputError: a file of it is damaged.
    """
    run, found = records.run, records.found
    attempts = attempts_of(records)
    lost = [event["steps"] for event in records.named("taken_back")]
    return RunCost(
        run=run,
        name=run.path.name,
        ledger=ledger(attempts, spans_of(records, attempts), time.time()),
        price=price or _price_of_launch(run) or _price_of_job(records.job),
        num_steps=records.num_steps,
        num_lost_steps=max(sum(lost), 0 if found is None else found.recomputed),
        unit=records.unit,
        num_units=records.num_units,
        num_epochs=_num_epochs(records),
        num_checkpoints=len(complete_steps(run.checkpoint_folder)),
        planned_us=_planned_us(records),
        energy=energy_of(run),
    )


def cost_of_launches(run: Run, price: Price | None = None) -> RunCost:
    """What launches cost that have made no Run: a script's, whose Runs have names of their own, or
    such as wait, or ended before anything was trained.

    Args:
        run: of their name.
        price: as in `cost_of`.

    Raises:
        InputError: a record is damaged.
    """
    return RunCost(
        run=run,
        name=run.path.name,
        ledger=ledger(launched_attempts(run), (), time.time()),
        price=price or _price_of_launch(run),
        num_steps=0,
        num_lost_steps=0,
        unit="samples",
        num_units=0,
        num_epochs=None,
        num_checkpoints=0,
        planned_us=None,
        energy=energy_of(run),
    )


def site_price(place: str, *, spot: bool = False) -> Price:
    """What a site says that a device costs.

    Args:
        place: a site's name; or its name, "/" and that of a node type, where it has several.
        spot: of a device that may be taken away.

    Raises:
        InputError: there is no such site or node type, or it has no price.
    """
    name, _, asked = place.partition("/")
    types = site_named(name).node_types
    known = [asked] if asked else list(types)
    if len(known) != 1 or known[0] not in types:
        listed = ", ".join(f"{name}/{each}" for each in types) or "it has none"
        raise InputError(
            f"--site {place} is not one kind of machine: name one of its node types ({listed})."
        )
    price = _price_at(name, known[0], types, spot=spot)
    if price is None:
        key = "spot_usd_per_device_hour" if spot else "usd_per_device_hour"
        raise InputError(
            f"site {name} has no price for {known[0]}: give {key} there, or --price USD."
        )
    return price


def runs_of(paths: Sequence[Path]) -> list[Run]:
    """Runs of these names or directories; none are given: all in runs/, and what was launched there
    and has made no Run.

    Raises:
        InputError: there is none.
    """
    folder = Path("runs")
    if paths:
        return [run_named(path, folder) for path in paths]
    found = [Run(path.parent) for path in folder.glob("*/job.toml")]
    counted = {launch.resolve() for run in found for launch in run.launch_folder.glob("*")}
    for run in map(Run, launched_runs(folder)):
        submitted = submitted_numbers(run.path)
        launches = {(run.launch_folder / str(number)).resolve() for number in submitted}
        if not run.exists and launches - counted:
            found.append(run)
    if not found:
        raise InputError("no run is named and there is none in runs/: name a run's directory.")
    return sorted(found, key=lambda run: run.path)


def _price_of_launch(run: Run) -> Price | None:
    for launch in reversed(launches_of(run.path)):
        request, types = launch.record.request, launch.record.site.node_types
        if request.node_type in types:
            return _price_at(launch.record.site_name, request.node_type, types, spot=request.spot)
    return None


def _price_at(site: str, name: str, types: Mapping[str, NodeType], *, spot: bool) -> Price | None:
    one = types[name]
    usd = one.spot_usd_per_device_hour if spot else one.usd_per_device_hour
    return None if usd is None else Price(usd, f"site {site}, {name}{', spot' if spot else ''}")


def _price_of_job(job: Job) -> Price | None:
    figure = job.cluster.prices.usd_per_device_hour
    return None if figure is None else Price(figure.value, f"job.toml, {figure.source}")


def _num_epochs(records: RunRecords) -> float | None:
    of_epoch = number((records.facts.get("data") or {}).get(f"train_{records.unit}"))
    return records.num_units / of_epoch if of_epoch and records.num_units else None


def _planned_us(records: RunRecords) -> int | None:
    for one in (records.run.plan().get("layouts") or [])[:1]:
        return round(one["step_s"] * 1e6) * records.num_steps * records.job.layout.num_ranks
    return None
