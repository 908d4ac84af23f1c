"""Rules about the machine: an unknown peak, lowered clocks."""

from collections.abc import Mapping
from typing import Any

from paceline.explain.finding import Evidence, Finding
from paceline.explain.subject import Subject

# As nvidia-smi calls what isn't the power limit's ordinary work.
_HELD_DOWN = {
    *("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown"),
    "sw_power_cap",
}
_COMPUTING = ("matmul", "attention", "recompute")


def peak_missing(subject: Subject) -> Finding | None:
    """Nothing can be held against the device's peak: it isn't known."""
    if subject.job is None or subject.facts.get("peak_flops") is not None:
        return None
    device = subject.job.cluster.device
    return Finding(
        "",
        f"The {subject.job.layout.precision} peak of {device.name} is not known: no MFU, no "
        "prediction.",
        (
            Evidence(
                "settings", "Without it losses are measured, but not held against what is possible."
            ),
        ),
        0.0,
        0.0,
        advice="Measure this machine once with `paceline bench`, and train with "
        "--set cluster.file=cluster.toml.",
    )


def clock_throttling(subject: Subject) -> Finding | None:
    """Heat or power holds a device's clock down, and the others wait for it."""
    slow = [gpu for gpu in _gpus(subject) if _HELD_DOWN & set(gpu["clocks"].get("reasons") or ())]
    if not slow:
        return None
    clocks = [(gpu["clocks"].get("sm_mhz"), gpu["clocks"].get("max_sm_mhz")) for gpu in slow]
    share = min((now / most for now, most in clocks if now and most), default=1.0)
    work_s = subject.step_s if subject.account is None else subject.work_s(*_COMPUTING)
    reasons = sorted(_HELD_DOWN & {word for gpu in slow for word in gpu["clocks"]["reasons"]})
    return Finding.of(
        subject,
        f"{len(slow)} of {len(_gpus(subject))} devices run at {share:.0%} of their clock.",
        work_s * (1 - share),
        [Evidence("machine", f"`paceline doctor` read {', '.join(reasons)} beside the job.")],
        advice="Look at cooling, power supplies and power limit (nvidia-smi -q -d "
        "PERFORMANCE,CLOCK).",
    )


def _gpus(subject: Subject) -> list[Mapping[str, Any]]:
    """The devices as the doctor found them."""
    found = (subject.doctor.get("facts") or {}).get("gpus") or ()
    return [gpu for gpu in found if gpu.get("clocks")]
