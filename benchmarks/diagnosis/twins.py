"""Twins: a faulty run and its mended twin stand ready and take turns; their steps are compared."""

import json
import multiprocessing
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from math import sqrt
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

import psutil

from benchmarks.diagnosis.faults import Fault, Way
from benchmarks.diagnosis.gate import last_gate, open_gate
from benchmarks.diagnosis.rank import forked_rank
from benchmarks.netlab import Laboratory
from paceline.observe.run import Run

FIRST_TURN, TURN = 5, 8
"""Steps up to the end of the first window, which are not compared, and from window to window: see
base.toml."""
_TURN_S = 300.0
# Above it, in percent, another virtual machine has the processors; how long to wait for them.
_STOLEN, _PATIENCE_S = 2.0, 120.0
# The standard error of a gain, over the gain.
_WELL_KNOWN = 0.1
_WARM = multiprocessing.get_context("forkserver")


class FailedError(Exception):
    """A run ended, or hung, before its turns were over."""


def warm_up() -> None:
    """Say what the process imports that ranks are forked from."""
    _WARM.set_forkserver_preload(["paceline.train.session", "benchmarks.diagnosis.rank"])


@dataclass(frozen=True)
class Twin:
    """A run that stands ready and waits for its turns."""

    folder: Path
    num_ranks: int
    ranks: Any
    """Its processes: `are_running`, `wait(timeout_s)`."""
    prepare: Callable[[], None]
    """Called before each turn."""

    @property
    def run(self) -> Run:
        """What it writes."""
        return Run(self.folder / "runs/run")

    def take_turn(self, number: int) -> None:
        """Open a gate, and wait until all ranks have reached the next one.

        Raises:
            FailedError: they didn't.
        """
        self.prepare()
        open_gate(self.folder, number)
        self.reach(number + 1)

    def reach(self, number: int) -> None:
        """Wait until all ranks stand at a gate.

        Raises:
            FailedError: they didn't in time.
        """
        deadline = time.monotonic() + _TURN_S
        while last_gate(self.folder, self.num_ranks) < number:
            if not self.ranks.are_running or time.monotonic() > deadline:
                raise FailedError(f"{self.folder} ended or hung before gate {number}: see output-*")
            time.sleep(0.1)


def measure(fault: Fault, folder: Path, settings: Sequence[str], num_turns: range) -> None:
    """Run both ways in turns; a healthy run has no twin. Leaves `folder`/<way>/runs/run.

    Args:
        settings: of the Job, besides those of the fault; enough steps for the most turns.
        num_turns: of each run after the first one, which is not compared: as few or as many.
            Between them, twins go on until their gain is known well enough.

    Raises:
        FailedError: a run broke off.
    """
    ways = (
        {"faulty": fault.wrong, "mended": fault.right}
        if fault.expected
        else {"healthy": fault.right}
    )
    with ExitStack() as stack:
        lab = stack.enter_context(Laboratory(fault.num_hosts)) if fault.num_hosts > 1 else None
        twins = [
            stack.enter_context(_started(fault, way, folder / name, settings, lab))
            for name, way in ways.items()
        ]
        for twin in twins:
            twin.reach(0)
        for number in range(num_turns.stop):  # 0 is the first one
            _wait_for_processors()
            # A B, B A, A B: neither is always the first after the other.
            for twin in twins if number % 2 == 0 else reversed(twins):
                twin.take_turn(number)
            if number >= num_turns.start and _is_known(fault, twins):
                break
        for twin in twins:
            twin.run.stop_file.touch()
            open_gate(twin.folder, number + 1)
        for twin in twins:
            twin.ranks.wait(_TURN_S)


def _wait_for_processors() -> None:
    """Wait while a hypervisor gives them to others: all ranks stand at a gate now."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        if getattr(psutil.cpu_times_percent(interval=0.5), "steal", 0.0) <= _STOLEN:
            break


def _is_known(fault: Fault, twins: Sequence[Twin]) -> bool:
    """Whether more turns would hardly change what is known of a gain."""
    if len(twins) == 1:
        return True
    faulty, mended = (twin.run for twin in twins)
    gain = gain_of(fault, faulty, mended)
    return gain.error <= _WELL_KNOWN * abs(gain.gain)


@contextmanager
def _started(
    fault: Fault, way: Way, folder: Path, settings: Sequence[str], lab: Laboratory | None
) -> Iterator[Twin]:
    """Start one way of a fault; its ranks are killed with the context."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    asked = [*settings, *fault.settings, *way.settings]
    twin = {"settings": asked, "injections": dict(way.injections)}
    (folder / "twin.json").write_text(json.dumps(twin, indent=1))
    if lab is None:
        with _Forked(folder, _environments(fault.num_ranks)) as ranks:
            yield Twin(folder, fault.num_ranks, ranks, lambda: None)
        return
    command = (sys.executable, "-m", "benchmarks.diagnosis.rank", folder)
    port = {"MASTER_PORT": str(_free_port())}  # both twins are on the same hosts
    with lab.start(command, settings=port) as ranks:
        yield Twin(folder, fault.num_hosts, ranks, lambda: lab.set_rate(way.rate_bits_per_s))


class _Forked:
    """The ranks of a run on this machine, as its torchrun would start them."""

    def __init__(self, folder: Path, environments: Sequence[Mapping[str, str]]) -> None:
        self._processes = [
            _WARM.Process(target=forked_rank, args=(folder, each, os.getpid()))
            for each in environments
        ]

    def __enter__(self) -> "_Forked":
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_failure: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    @property
    def are_running(self) -> bool:
        """Whether no rank has ended yet."""
        return all(process.is_alive() for process in self._processes)

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of all ranks."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))


def _environments(num_ranks: int) -> list[dict[str, str]]:
    """What a launcher tells the ranks; nothing where there is one."""
    if num_ranks == 1:
        return [{}]
    common = {
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": _free_port(),
    }
    each = ({**common, "RANK": number, "LOCAL_RANK": number} for number in range(num_ranks))
    return [{name: str(value) for name, value in facts.items()} for facts in each]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


# ---- what the steps took -----------------------------------------------------------------------


def steady_turns(lines: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Seconds from step to step, in each turn, of steps that nothing of ours disturbed.

    Left out: a run's first steps, profiled ones, the one before (the profiler is armed) and the one
    after (traces were written, and the twin had its turn).
    """
    turns: list[list[float]] = [[]]
    for before, line, after in zip([{}, *lines], lines, [*lines[1:], {}], strict=False):
        if before.get("profiled"):
            turns.append([])
        is_disturbed = any(each.get("profiled") for each in (before, line, after))
        if line["step"] > FIRST_TURN and not is_disturbed:
            turns[-1].append(line["step_time_s"] + line["between_s"])
    return [turn for turn in turns if turn]


class Gain(NamedTuple):
    """What mending a fault gave."""

    gain: float
    """The share of the faulty step that is gone."""
    spread: float
    """Half of what the middle half of the gains of single pairs of turns differs by."""
    pairs: int
    """Of turns."""
    faulty_s: float
    """Of a step."""
    mended_s: float

    @property
    def error(self) -> float:
        """The standard error of the gain, by the spread (of a median of normal values)."""
        return 1.86 * self.spread / sqrt(self.pairs)


def gain_of(fault: Fault, faulty: Run, mended: Run) -> Gain:
    """Compare two runs that took turns: turn by turn, for machines are faster now and slower then.

    Where single steps stand out in a fault, the mean of all steps counts.
    """
    turns = [steady_turns(run.metrics()) for run in (faulty, mended)]
    wrong, right = ([*map(median, each)] for each in turns)
    gains = [1 - after / before for before, after in zip(wrong, right, strict=True)]
    low, _, high = quantiles(gains, n=4) if len(gains) > 1 else gains * 3
    if fault.is_in_every_step:
        return Gain(median(gains), (high - low) / 2, len(gains), median(wrong), median(right))
    before, after = (fmean(chain.from_iterable(each)) for each in turns)
    return Gain(1 - after / before, (high - low) / 2, len(gains), before, after)
