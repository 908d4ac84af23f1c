"""Slurm's words for states and reasons, in those of the contract (pure).

Names are those of squeue(1), "Job state codes" and "Job reason codes", of releases 20.11 to 25.05;
a word that is not here is "running" or "unknown", and stands in `Observation.said`.
"""

from paceline.config.errors import EXIT_SAVED
from paceline.launch.contract import Reason, State

_STATES: dict[str, State] = {
    "PENDING": "queued",
    "REQUEUED": "queued",
    "REQUEUE_FED": "queued",
    "REQUEUE_HOLD": "queued",
    "RESV_DEL_HOLD": "queued",
    "SPECIAL_EXIT": "queued",
    "CONFIGURING": "queued",
    "COMPLETED": "finished",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "FAILED": "failed",
    "TIMEOUT": "failed",
    "DEADLINE": "failed",
    "OUT_OF_MEMORY": "failed",
    "LAUNCH_FAILED": "failed",
    "RECONFIG_FAIL": "failed",
    "NODE_FAIL": "lost",
    "BOOT_FAIL": "lost",
    "PREEMPTED": "lost",
}
_HELD = {"REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}

# By how a reason begins; the first that fits.
_REASONS: tuple[tuple[str, Reason], ...] = (
    ("DependencyNeverSatisfied", "unschedulable"),
    ("Dependency", "dependency"),
    ("Priority", "priority"),
    ("Resources", "resources"),
    ("Licenses", "resources"),
    ("BurstBuffer", "resources"),
    # Also where they are only reserved for jobs in higher partitions, which is the usual case.
    ("Nodes required for job", "resources"),
    ("JobHeld", "held"),
    ("JobLaunchFailure", "held"),
    ("launch failed requeued held", "held"),
    ("SchedDefer", "begin_time"),
    ("BeginTime", "begin_time"),
    ("Reservation", "begin_time"),
    ("Cleaning", "requeued"),
    ("ReqNodeNotAvail", "node_down"),
    ("NodeDown", "node_down"),
    ("PartitionDown", "node_down"),
    ("PartitionInactive", "node_down"),
    ("PartitionConfig", "unschedulable"),
    ("Partition", "unschedulable"),  # its limit of time, or of nodes
    ("BadConstraints", "unschedulable"),
    ("InvalidAccount", "unschedulable"),
    ("InvalidQOS", "unschedulable"),
    ("QOSNotAllowed", "unschedulable"),
    ("AccountNotAllowed", "unschedulable"),
    ("QOS", "limit"),
    ("MaxQOS", "limit"),
    ("JobArrayTaskLimit", "limit"),
    ("MaxJob", "limit"),
    ("MaxMem", "limit"),
    ("MaxCpu", "limit"),
    ("Assoc", "quota"),
    ("MaxAssoc", "quota"),
    ("Max", "quota"),
    ("Prolog", "starting"),
)


def state_of(word: str, exit_code: int | None) -> State:
    """Of a job, from the first word of Slurm's state and the batch script's exit code."""
    state = _STATES.get(word, "running")
    return "saved" if state == "failed" and exit_code == EXIT_SAVED else state


def reason_of(word: str, said: str, restarts: int) -> Reason:
    """Why a job is queued.

    Args:
        word: of its state.
        said: Slurm's reason.
        restarts: how often it was started again.
    """
    if word == "CONFIGURING":
        return "starting"
    if word in _HELD:
        return "held"
    found = [reason for begin, reason in _REASONS if said.startswith(begin)]
    if found[:1] == ["begin_time"] and restarts:  # Slurm lets it wait for some seconds
        return "requeued"
    return found[0] if found else "unknown"
