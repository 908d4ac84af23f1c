"""When a job would start, by Slurm's own estimate."""

import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress

from paceline.config.errors import InputError
from paceline.launch.engines.slurm.commands import hosts, refused, rows, run, unix_time
from paceline.render.figures import duration_text

_START = re.compile(r"to start at (\d+)(?:.* on nodes (\S+))?")
_HOLDING = "--states=RUNNING,COMPLETING"
# What is so now and may be otherwise later; everything else stays.
_PASSES = ("nodes are busy", "not available", "drained", "held", "policy", "limit")
_NEVER = "node configuration is not available"


def must_end_in_time(batch_script: str) -> None:
    """Refuse a job that asks for more time than its partition gives: by itself, Slurm takes it and
    lets it wait for ever (slurm.conf(5), EnforcePartLimits).

    Raises:
        InputError: the job does so, or Slurm can't be asked.
    """
    told = dict(re.findall(r"^#SBATCH --(time|partition|qos)=(\S+)$", batch_script, re.MULTILINE))
    if "time" not in told or "qos" in told:  # a QOS may lift the limit
        return
    name = told.get("partition")
    named = () if name is None else (f"--partition={name}",)
    found = list(rows("sinfo", "--noheader", "--format=%P|%l", *named))
    may = {
        place.rstrip("*"): limit for place, limit in found if name is not None or place[-1:] == "*"
    }
    wanted = 60 * int(told["time"])
    if may and all(wanted > _seconds(limit) for limit in may.values()):
        limits = ", ".join(f"{place} ends jobs after {limit}" for place, limit in may.items())
        raise InputError(
            f"the job asks for {duration_text(wanted)}, and Slurm's partition {limits}: lower the "
            "site's max_hours, or set another partition."
        )


def _seconds(limit: str) -> float:
    """Of "2-00:00:00", "10:00" or "infinite"."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if found is None:
        return math.inf
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def estimate(batch_script: str, *options: str) -> float | None:
    """When a job would start if it were submitted now; Unix time.

    It stands on the time limits of what runs, so it is usually too late. Slurm itself is coarser:
    it looks at running jobs in windows of 30 s, 60 s, 120 s and so on, says the end of a window
    (slurm.conf(5), bf_window_linear), and any nodes that are free by then. So the nodes that it
    found are asked when they are free, and Slurm is asked again without those that take longest.

    Args:
        batch_script: its text.
        options: of sbatch, which count more than those of the script.

    Returns:
        None: Slurm can't tell now.

    Raises:
        InputError: it can never start, or Slurm can't be asked; has Slurm's own words.
    """
    said = _ask(batch_script, options)
    start = _start(batch_script, said)
    if start is None:
        words = said.lower()
        if _NEVER not in words and any(each in words for each in _PASSES):
            return None
        raise refused(said)
    with suppress(InputError):  # what a site may keep to itself: then Slurm's own word counts
        return _sooner(batch_script, options, start)
    return start


def fits(batch_script: str, num_nodes: int) -> float | None:
    """When it would start with so many nodes; None: never, or nobody can tell."""
    try:
        return estimate(batch_script, f"--nodes={num_nodes}")
    except InputError:
        return None


def _ask(batch_script: str, options: Sequence[str]) -> str:
    return run("sbatch", "--test-only", *options, script=batch_script).stderr


def _start(batch_script: str, said: str) -> float | None:
    """The start that an answer of Slurm's means; None: it has none."""
    found = _START.search(said)
    if found is None:
        return None
    start = float(found[1])
    with suppress(InputError):
        names = hosts(found[2] or "")
        if names and start > time.time():
            return _free_at(batch_script, start, names)
    return start


def _sooner(batch_script: str, options: Sequence[str], start: float) -> float:
    """The first end of a running job by which other nodes are enough, or `start`."""
    if start <= time.time() or "--exclude" in batch_script:
        return start
    ends: dict[float, list[str]] = {}
    for end, nodes in rows("squeue", "--noheader", _HOLDING, "--format=%e|%N"):
        ends.setdefault(unix_time(end) or math.inf, []).append(nodes)
    earlier = sorted(end for end in ends if end < start)
    first, last = 0, len(earlier)
    while first < last:  # the more nodes are free, the sooner it starts
        middle = (first + last) // 2
        later = ",".join(nodes for end in ends if end > earlier[middle] for nodes in ends[end])
        found = _start(batch_script, _ask(batch_script, (*options, f"--exclude={later}")))
        if found is not None and found <= max(earlier[middle], time.time()):
            last, start = middle, found
        else:
            first = middle + 1
    return start


def _free_at(batch_script: str, start: float, nodes: Sequence[str]) -> float:
    """When the last job ends that runs on these nodes, if that is sooner than `start`.

    Nodes that somebody reserved are Slurm's to judge.
    """
    for line in rows("scontrol", "--oneliner", "show", "reservation"):
        fields = dict(re.findall(r"(\w+)=(\S+)", line[0]))
        is_own = f"--reservation={fields.get('ReservationName')}" in batch_script
        if not is_own and not set(nodes).isdisjoint(hosts(fields.get("Nodes", ""))):
            return start
    ends = rows("squeue", "--noheader", _HOLDING, f"--nodelist={','.join(nodes)}", "--format=%e")
    known = [unix_time(end) for end, *_ in ends]
    if None in known:
        return start
    return min(start, max([time.time(), *(end for end in known if end)]))
