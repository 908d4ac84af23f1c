"""Why a job waits, in sentences: what is ahead of it, how the free devices lie, and with how many
nodes it would start now. Slurm's own reason is in the observation."""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.config import files
from paceline.config.errors import InputError
from paceline.launch.contract import Request, Submitted
from paceline.launch.engines.slurm.commands import ask, hosts, rows
from paceline.launch.engines.slurm.job_state import JobState, job_state
from paceline.launch.engines.slurm.queue import fits
from paceline.launch.engines.slurm.script import BATCH_SCRIPT
from paceline.render.figures import plural

_SOON_S = 60.0
"""Slurm's estimates are no better."""
_MOST_SIZES = 8
_CAN_START = ("idle", "mix", "alloc", "plnd", "comp")
_SILENT = ("*", "~", "#", "!", "%", "$", "@")
"""Marks of a state, sinfo(1): does not answer, sleeps, wakes up, is kept for somebody."""


@dataclass(frozen=True)
class NodeFree:
    """What is free on a node that may be given jobs."""

    name: str
    devices: int
    free: int


def why(job: Submitted, request: Request) -> tuple[str, ...]:
    """See the module; none for a job that does not wait.

    Raises:
        InputError: Slurm can't be asked, or the job's folder is damaged.
    """
    known = job_state(job.id)
    if known is None or known.word != "PENDING":
        return ()
    said = list(_ahead(job.id, known))
    said += free_sentences(_free_nodes(known.partition), _leaves(), request)
    said += _smaller(job, request)
    return tuple(said)


def free_sentences(
    nodes: Sequence[NodeFree], leaves: dict[str, set[str]], request: Request
) -> Iterator[str]:
    """How the free devices lie, for a job that needs some on each of its nodes (pure).

    Args:
        leaves: the nodes below each switch that has nodes; none: the site has no topology.
    """
    free, all_devices = sum(each.free for each in nodes), sum(each.devices for each in nodes)
    if not all_devices:
        return
    fit = {each.name for each in nodes if each.free >= request.devices_per_node}
    yield (
        f"{free} of {all_devices} devices are free. It needs {plural(request.num_nodes, 'node')} "
        f"with {plural(request.devices_per_node, 'free device')} on each; there are {len(fit)}."
    )
    stranded = sum(each.free for each in nodes if each.name not in fit)
    if stranded:
        yield f"{stranded} free devices lie on nodes with fewer than that."
    by_leaf = {leaf: len(fit & names) for leaf, names in leaves.items()}
    if len(by_leaf) > 1:
        best = max(by_leaf, key=lambda leaf: by_leaf[leaf])
        yield f"Of these, at most {by_leaf[best]} are below one switch ({best})."


def _ahead(job: str, known: JobState) -> Iterator[str]:
    """Of the jobs that wait for the same partition, those that come first."""
    waiting = list(
        rows(
            "squeue",
            "--noheader",
            "--states=PENDING",
            f"--partition={known.partition}",
            "--format=%A|%Q|%D",
        )
    )
    own = next((int(priority) for name, priority, _ in waiting if name == job), None)
    if own is None:
        return
    first = [
        (name, int(nodes))
        for name, priority, nodes in waiting
        if (-int(priority), int(name)) < (-own, int(job))
    ]
    if not first:
        yield f"No job in {known.partition} comes first."
        return
    shown = ", ".join(name for name, _ in first[:5]) + (", ..." if len(first) > 5 else "")
    wish = plural(sum(nodes for _, nodes in first), "node")
    come, ask_for = ("comes", "asks for") if len(first) == 1 else ("come", "ask for")
    number = plural(len(first), "job")
    yield f"{number} {come} first in {known.partition} and {ask_for} {wish}: {shown}."
    yield from _priority(job)


def _priority(job: str) -> Iterator[str]:
    """What its priority is made of, where the site's Slurm weighs several things."""
    names = {"%A": "age", "%F": "fair share", "%J": "size", "%P": "partition", "%Q": "QOS"}
    form = "|".join(["%Y", *names])
    try:
        found = list(rows("sprio", "--noheader", f"--jobs={job}", f"--format={form}"))
    except InputError:
        return
    for total, *parts in found:
        pairs = zip(names.values(), parts, strict=True)
        shown = ", ".join(f"{name} {part}" for name, part in pairs if part not in ("", "0"))
        yield f"Its priority is {total}" + (f": {shown}." if shown else ".")


def _free_nodes(partition: str) -> list[NodeFree]:
    form = "NodeList:|,StateCompact:|,Gres:|,GresUsed:|"
    found = {}
    for line in rows("sinfo", "--noheader", "--Node", f"--partition={partition}", "-O", form):
        name, state, gres, used = line[:4]
        if state.startswith(_CAN_START) and not state.endswith(_SILENT):
            devices = devices_of(gres)
            found[name] = NodeFree(name, devices, devices - devices_of(used))
    return list(found.values())


def devices_of(gres: str) -> int:
    """Of "gpu:a100:8(S:0-1),gpu:2(IDX:0-1)"."""
    outside = re.sub(r"\([^)]*\)", "", gres)
    counts = (re.fullmatch(r"gpu(?::[^:,]+)??:(\d+)", each) for each in outside.split(","))
    return sum(int(found[1]) for found in counts if found)


def _leaves() -> dict[str, set[str]]:
    try:
        lines = ask("scontrol", "show", "topology").splitlines()
    except InputError:
        return {}
    found = {}
    for line in lines:
        fields = dict(re.findall(r"(\w+)=(\S+)", line))
        if fields.get("Level") == "0" and "SwitchName" in fields:
            found[fields["SwitchName"]] = set(hosts(fields.get("Nodes", "")))
    return found


def _smaller(job: Submitted, request: Request) -> Iterator[str]:
    """With how many nodes it would start now, and when with the others."""
    script = files.read_text(job.folder / BATCH_SCRIPT, "launch the job again")
    sizes = list(range(request.num_nodes - 1, 0, -1))
    if len(sizes) > _MOST_SIZES:
        sizes = [request.num_nodes >> by for by in range(1, request.num_nodes.bit_length())]
    starts = {size: fits(script, size) for size in sizes}
    now = [size for size, start in starts.items() if start and start < time.time() + _SOON_S]
    for size, start in starts.items():
        if start is not None and size > max(now, default=0):
            yield f"With {plural(size, 'node')} it would start {_when(start)}."
    if now:
        yield f"With {plural(max(now), 'node')} it would start now."


def _when(start: float) -> str:
    left_s = start - time.time()
    if left_s < _SOON_S:
        return "now"
    return f"in {left_s / 60:.0f} minutes" if left_s < 5400 else f"in {left_s / 3600:.1f} hours"
