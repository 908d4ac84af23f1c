"""The checks: one table, each row a small pure function from facts to a verdict."""

from collections.abc import Mapping

from paceline.doctor.checks import devices, fabric, host, nccl, software
from paceline.doctor.checks.verdict import Checks, Verdict
from paceline.doctor.facts import MachineFacts

GROUPS: Mapping[str, Checks] = {
    "Devices": devices.CHECKS,
    "Links and network": fabric.CHECKS,
    "NCCL": nccl.CHECKS,
    "Software": software.CHECKS,
    "Host": host.CHECKS,
}
"""All of them, in the order in which they are shown."""


def examine(facts: MachineFacts) -> dict[str, Verdict]:
    """The verdict of every check, by its name."""
    return {check.name: check.judge(facts) for checks in GROUPS.values() for check in checks}
