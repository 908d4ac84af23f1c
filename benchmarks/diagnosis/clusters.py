"""The Cluster files that the runs are given: what `paceline bench` finds where they will run."""

import subprocess
import sys
from pathlib import Path

from benchmarks.diagnosis.faults import Fault
from benchmarks.netlab import Laboratory, rate_text
from benchmarks.netlab.ranks import Finished
from paceline.bench.command import to_text
from paceline.config.job import read_cluster
from paceline.observe.run import write_atomic

_MOST_S = 1800.0


def cluster_for(fault: Fault, folder: Path) -> Path:
    """A Cluster file for as many ranks, hosts, such links and so much memory."""
    file = _measured(fault, folder)
    if fault.memory_bytes is None:
        return file
    cluster = read_cluster(file)
    device = cluster.device
    assert device.memory_bytes is not None
    memory = device.memory_bytes.replace(value=fault.memory_bytes, origin="assumed")
    smaller = file.with_stem(f"{file.stem}-{fault.memory_bytes / 1e6:.0f}MB")
    return write_atomic(
        smaller, to_text(cluster.replace(device=device.replace(memory_bytes=memory)))
    )


def _measured(fault: Fault, folder: Path) -> Path:
    """What was measured for as many ranks, hosts and such links, now or in an earlier start."""
    rate = fault.known_rate_bits_per_s
    links = "" if rate is None else f"-{rate_text(rate).replace(' ', '').replace('/', '-')}"
    file = folder / f"{fault.num_hosts}x{fault.num_ranks // fault.num_hosts}{links}.toml"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "paceline", "bench", "--quick", "--out", str(file)]
        if fault.num_hosts == 1:
            command += ["--ranks", str(fault.num_ranks)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_MOST_S)
        else:
            with Laboratory(fault.num_hosts, rate) as lab:
                _must_succeed(lab.run(command, timeout_s=_MOST_S))
    return file


def _must_succeed(ranks: list[Finished]) -> None:
    for rank in ranks:
        if rank.code != 0:
            raise RuntimeError(f"rank {rank.rank} ended with {rank.code}:\n{rank.output}")
