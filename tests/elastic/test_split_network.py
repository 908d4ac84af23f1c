"""Four nodes in networks of their own, cut in every way: one side goes on, and never two."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import pytest

from benchmarks.netlab import Laboratory, why_not
from benchmarks.netlab.laboratory import DEVICE, _name
from benchmarks.netlab.wires import ip
from tests.command_line import environment
from tests.elastic.cluster import Nodes

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.usefixtures("networks_alone"),
]
HOSTS = range(4)
NOBODY = "02:00:00:00:00:99"


def _partitions(hosts: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    if not hosts:
        yield []
        return
    first, rest = hosts[0], hosts[1:]
    for count in range(len(rest) + 1):
        for others in combinations(rest, count):
            left = tuple(host for host in rest if host not in others)
            for more in _partitions(left):
                yield [(first, *others), *more]


def _send_to(lab: Laboratory, one: int, other: int, card: str) -> None:
    to = ("to", lab.address(other), "lladdr", card, "dev", DEVICE, "nud", "permanent")
    ip("neigh", "replace", *to, inside=_name(f"host{one}"))


def _card(host: int) -> str:
    shown = ip("-o", "link", "show", DEVICE, inside=_name(f"host{host}")).split()
    return shown[shown.index("link/ether") + 1]


def _cut(lab: Laboratory, sides: list[tuple[int, ...]]) -> None:
    """What hosts of different sides send each other goes to a card that nobody has."""
    side_of = {host: side for side in sides for host in side}
    for one in HOSTS:
        for other in HOSTS:
            if side_of[one] != side_of[other]:
                _send_to(lab, one, other, NOBODY)


def _mend(lab: Laboratory) -> None:
    cards = {host: _card(host) for host in HOSTS}
    for one in HOSTS:
        for other in HOSTS:
            if one != other:
                _send_to(lab, one, other, cards[other])


def test_at_most_one_side_of_a_split_network_goes_on(tmp_path: Path):
    everyway = [sides for sides in _partitions(tuple(HOSTS)) if len(sides) > 1]
    assert len(everyway) == 14
    with Nodes(tmp_path, 4) as nodes, Laboratory(4) as lab, ExitStack() as agents:
        for host in HOSTS:
            name = f"host{host}"
            command = [sys.executable, "-m", "tests.elastic.cluster", name, tmp_path, 4]
            settings = {**environment(tmp_path), "PACELINE_ADDRESS": lab.address(host)}
            agents.enter_context(lab.start(command, settings=settings, only_on=host))
        at = nodes.until_step(1, world=4, more=4)
        for sides in everyway:
            _cut(lab, sides)
            at = nodes.until_step(at + 1, more=4)
            time.sleep(1.0)  # whoever else would go on has begun
            began = time.monotonic()
            time.sleep(0.5)
            late = [line for line in nodes.steps() if line["time"] > began]
            assert late, "one side goes on"
            going_on = {int(line["node"].removeprefix("host")) for line in late}
            assert any(going_on <= set(side) for side in sides), (sides, going_on)
            assert len({line["generation"] for line in late}) == 1
            largest = max(sides, key=len)
            if len(largest) > 2:
                assert going_on == set(largest), "most of them go on"
            _mend(lab)
            at = nodes.until_step(at + 1, world=4, more=4)
        nodes.assert_one_history()
        nodes.remember()
