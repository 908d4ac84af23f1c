"""Slow: which host's card or which single link is far below the rest, from the matrix of pairs.

The rule, for pairs of different hosts (or, where all ranks are on one, for pairs of ranks):
- a place is slow in a direction if most of what it sends (or receives) is slower, by `FACTOR`, than
  the faster quarter of the links between the other places. It is its card (or, on one host, its
  core, its PCIe slot);
- a link between two places that are not slow is slow if it is slower, by `FACTOR`, than what both
  its ends usually do.

Where more than half of the places would be slow, that is how the network is built (racks, a slower
tier), and none is named. Two places have one link: there is nothing to compare it with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median, median_high
from typing import Literal

import numpy as np

FACTOR = 2.0
"""Assumed: shared cards and noise make less of a difference, a link that fell back to a lower rate
(or to another interface) more."""

Direction = Literal["sends", "receives"]


@dataclass(frozen=True)
class SlowLink:
    """A place or a link that is slower than the rest."""

    places: tuple[str, ...]
    """One: its card. Two: the link from the first to the second."""
    directions: tuple[Direction, ...]
    """Of a card; none: of a link."""
    bytes_per_s: float
    usual_bytes_per_s: float
    """What it is compared with."""

    @property
    def factor(self) -> float:
        """How many times slower."""
        return self.usual_bytes_per_s / self.bytes_per_s

    @property
    def sentence(self) -> str:
        """For a person."""
        rates = f"{self.bytes_per_s / 1e6:,.0f} MB/s, {self.usual_bytes_per_s / 1e6:,.0f} MB/s"
        if len(self.places) == 1:
            does = " and ".join(self.directions)
            return f"{self.places[0]} {does} slowly: {rates} between the others."
        return f"The link from {self.places[0]} to {self.places[1]} is slow: {rates} is usual."


def slow_links(bytes_per_s: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[SlowLink]:
    """What is slower than the rest by `FACTOR`, the slowest first.

    Args:
        bytes_per_s: (ranks, ranks) by sender and receiver; the diagonal counts for nothing.
        hosts: of each rank.
    """
    names, links = _links(bytes_per_s, hosts)
    cards = _cards(names, links)
    if 2 * len(cards) > len(names):
        cards = []
    known = {card.places[0] for card in cards}
    slow = [*cards, *_single(links, names, known)]
    return sorted(slow, key=lambda each: -each.factor)


def _links(
    bytes_per_s: Sequence[Sequence[float]], hosts: Sequence[str]
) -> tuple[list[str], dict[tuple[str, str], float]]:
    """Places, and the median rate from each to each other."""
    places = list(hosts) if len(set(hosts)) > 1 else [f"rank {at}" for at in range(len(hosts))]
    rates: dict[tuple[str, str], list[float]] = {}
    for row, sender in enumerate(places):
        for column, receiver in enumerate(places):
            if sender != receiver:
                rates.setdefault((sender, receiver), []).append(bytes_per_s[row][column])
    return list(dict.fromkeys(places)), {link: median(found) for link, found in rates.items()}


def _cards(names: Sequence[str], links: dict[tuple[str, str], float]) -> list[SlowLink]:
    found = []
    for name in names:
        others = [rate for link, rate in links.items() if name not in link]
        if not others:
            continue
        usual = float(np.quantile(others, 0.75))
        own = {direction: _usual(links, name, direction) for direction in _DIRECTIONS}
        slow = tuple(each for each, rate in own.items() if rate * FACTOR < usual)
        if slow:
            found.append(SlowLink((name,), slow, min(own.values()), usual))
    return found


def _single(
    links: dict[tuple[str, str], float], names: Sequence[str], known: set[str]
) -> Iterator[SlowLink]:
    """Slow links between places that are not slow themselves."""
    if len(names) < 3:
        return
    for (sender, receiver), rate in links.items():
        ends = _usual(links, sender, "sends"), _usual(links, receiver, "receives")
        if rate * FACTOR < min(ends) and not known & {sender, receiver}:
            yield SlowLink((sender, receiver), (), rate, min(ends))


_DIRECTIONS: tuple[Direction, ...] = ("sends", "receives")


def _usual(links: dict[tuple[str, str], float], name: str, direction: Direction) -> float:
    """What a place does on most of its links, the faster half where it is even."""
    end = _DIRECTIONS.index(direction)
    return median_high(rate for link, rate in links.items() if link[end] == name)
