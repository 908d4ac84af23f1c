"""What Slurm's controller, and its accounting, say of one job."""

import re
from dataclasses import dataclass

from paceline.config.errors import InputError
from paceline.launch.engines.slurm.commands import hosts, refused, rows, run, unix_time

# Others may follow whose values a person chose: a value counts where its name stands first.
_FIELD = re.compile(r"(?:^|\s)(\w+)=(\S*)")
_UNKNOWN_JOB = "Invalid job id"


@dataclass(frozen=True)
class JobState:
    """Of a job that the controller knows. Times are Unix seconds."""

    word: str
    """PENDING, RUNNING, ...: squeue(1), "Job state codes"."""
    reason: str
    """Slurm's; "" or "None": it has not looked at the job yet."""
    restarts: int
    exit_code: int | None
    """Of the batch script; None: it has not ended, never ran, or a signal ended it."""
    nodes: tuple[str, ...]
    start: float | None
    """When it started; of one that waits, when it will, as Slurm estimates."""
    submitted: float
    """When it began to wait; of a job that was put back, then."""
    end: float | None
    """None: it has not ended."""
    partition: str
    batch_node: str
    """Where the batch script runs, or ran."""


def job_state(job: str) -> JobState | None:
    """None: the controller has forgotten it, some minutes after its end.

    Raises:
        InputError: the controller can't be asked.
    """
    done = run("scontrol", "--oneliner", "show", "job", job)
    if done.returncode != 0:
        if _UNKNOWN_JOB in done.stderr + done.stdout:
            return None
        raise refused(done.stderr)
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(done.stdout):
        fields.setdefault(name, value)
    word, reason = fields.get("JobState", ""), fields.get("Reason", "").replace("_", " ")
    if reason in ("", "None") and fields.get("Dependency", "(null)") != "(null)":
        reason = "Dependency"
    is_over = word not in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED")
    nodes = hosts(fields.get("NodeList", ""))
    return JobState(
        word,
        reason,
        int(fields.get("Restarts", "0")),
        exit_code_of(fields.get("ExitCode", "")) if is_over and nodes else None,
        nodes,
        unix_time(fields.get("StartTime", "")),
        unix_time(fields.get("SubmitTime", "")) or 0.0,
        unix_time(fields.get("EndTime", "")) if is_over else None,
        fields.get("Partition", ""),
        fields.get("BatchHost", ""),
    )


@dataclass(frozen=True)
class Row:
    """An entry of Slurm's accounting: a job has one for each time that it was queued."""

    state: str
    exit_code: int | None
    submitted: float
    started: float | None
    ended: float | None
    nodes: tuple[str, ...]
    num_devices: int | None
    """That Slurm handed out as gres; None: none of them are."""


def accounting(job: str) -> tuple[Row, ...]:
    """All entries of a job, the oldest first; none where Slurm keeps no accounts."""
    fields = "State,ExitCode,Submit,Start,End,NodeList,AllocTRES"
    options = ("--allocations", "--duplicates", "--noheader", "--parsable2")
    try:
        entries = list(rows("sacct", f"--jobs={job}", f"--format={fields}", *options))
    except InputError:
        return ()
    found = []
    for state, code, submit, start, end, nodes, tres in entries:
        began = unix_time(start) if nodes != "None assigned" else None
        found.append(
            Row(
                state.split()[0],
                exit_code_of(code),
                unix_time(submit) or 0.0,
                began,
                unix_time(end),
                hosts(nodes),
                _devices(tres),
            )
        )
    return tuple(sorted(found, key=lambda row: (row.submitted, row.started or row.submitted)))


def exit_code_of(text: str) -> int | None:
    """Of "75:0"; None where a signal ended it: "0:15"."""
    code, _, number = text.partition(":")
    return int(code) if code.isdecimal() and number in ("", "0") else None


def _devices(tres: str) -> int | None:
    found = re.search(r"gres/gpu=(\d+)", tres)
    return int(found[1]) if found else None
