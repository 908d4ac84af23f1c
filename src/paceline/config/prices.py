"""Prices: what a cluster's hours, energy and storage cost; `paceline.plan.scale` adds them up.

No price is built in: they differ by contract and change by the month, so an unknown price stays
unknown and with it whatever depends on it. In a job.toml a plain number is enough
(`usd_per_device_hour = 2.5`); a Figure says where it comes from as well.
"""

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from paceline.config.figure import Figure
from paceline.config.frozen import FrozenConfig
from paceline.config.layers import require


def _as_figure(given: Any) -> Any:
    if isinstance(given, int | float) and not isinstance(given, bool):
        return {"value": given, "origin": "assumed", "source": "given without a source"}
    return given


def _not_negative(figure: Figure | None) -> Figure | None:
    if figure is not None:
        value = figure.value
        require(0 <= value < math.inf, f"{value} was given; give a finite number of 0 or more.")
    return figure


def _positive(figure: Figure | None) -> Figure | None:
    if figure is not None:
        value = figure.value
        require(0 < value < math.inf, f"{value} was given; give a finite number above 0.")
    return figure


Price = Annotated[Figure | None, BeforeValidator(_as_figure), AfterValidator(_not_negative)]
"""A Figure of at least 0, a plain number, or None: unknown."""
PositiveFigure = Annotated[Figure | None, BeforeValidator(_as_figure), AfterValidator(_positive)]
"""A Figure above 0, a plain number, or None: unknown."""


class Prices(FrozenConfig):
    """What a cluster costs, in US dollars; what is left out is unknown."""

    usd_per_device_hour: Price = None
    """Rent of one device with its share of host, network and power."""
    usd_per_gb_month: Price = None
    """Storage of checkpoints, per 1e9 bytes and month."""
    power_overhead: PositiveFigure = None
    """Energy of the whole site over that of the devices alone (hosts, network, cooling)."""
