"""Checks of the devices: that they are all there, healthy, unhindered and free."""

from collections import Counter
from collections.abc import Callable

from paceline.doctor.checks.verdict import (
    NO_GPU,
    Checks,
    Verdict,
    listed,
    ok,
    problem,
    unknown,
    warning,
)
from paceline.doctor.facts import MachineFacts
from paceline.doctor.nvidia import Gpu

CHECKS = Checks()
_HARD = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
_COUNTED = ("hw_therm_slowdown", "hw_power_brake", "sw_therm_slowdown")
_BUSY_BYTES = 2 * 2**30
"""More than driver, display and monitors take. Assumed."""
_LOW_CLOCK = 0.9


def _those(facts: MachineFacts, is_bad: Callable[[Gpu], bool | None]) -> list[Gpu]:
    return [gpu for gpu in facts.gpus if is_bad(gpu)]


def _named(gpus: list[Gpu]) -> str:
    return listed(gpu.index for gpu in gpus)


@CHECKS.add(
    "devices",
    "accelerators on the bus, seen by their driver",
    "a job can't start, or starts smaller, without a card that fell off",
)
def _present(facts: MachineFacts) -> Verdict:
    on_bus = sum(facts.system.pci_devices.values()) if facts.system else 0
    if facts.driver_error:
        return problem(
            f"nvidia-smi fails: {facts.driver_error[:120]}",
            "load or reinstall the driver (dmesg | grep NVRM says why); after an update, reboot.",
        )
    if not facts.gpus and facts.software and facts.software.num_devices:
        return unknown(
            f"torch sees {facts.software.num_devices} devices; nvidia-smi or rocm-smi, which tell "
            "the rest, were not there"
        )
    if not facts.gpus and on_bus:
        makers = ", ".join(facts.system.pci_devices) if facts.system else ""
        return problem(
            f"{on_bus} accelerators on the PCIe bus ({makers}), none seen by a driver",
            "install the driver; in a container, pass the devices in (docker run --gpus all).",
        )
    if not facts.gpus:
        return unknown("no accelerator was seen: ranks run on the cores, over gloo")
    if len(facts.gpus) < on_bus:
        return problem(
            f"{len(facts.gpus)} of {on_bus} accelerators are left",
            "one has fallen off the bus (dmesg | grep Xid): reset or replace it.",
        )
    names = Counter(gpu.name for gpu in facts.gpus)
    return ok(", ".join(f"{number} x {name}" for name, number in names.items()))


@CHECKS.add(
    "torch-build",
    "which devices this torch was built for, and sees",
    "a CPU build trains on a GPU machine without a word, and far slower",
)
def _torch_sees(facts: MachineFacts) -> Verdict:
    found = facts.software
    if found is None:
        return unknown("it is not known which torch is installed")
    if not facts.gpus:
        return unknown(f"no accelerator was seen; torch {found.torch}")
    maker = facts.gpus[0].maker
    build = found.hip if maker == "amd" else found.cuda
    wanted = "ROCm" if maker == "amd" else "CUDA"
    if build is None:
        return problem(
            f"torch {found.torch} was not built for {wanted}",
            f"install torch from the {wanted} index of https://pytorch.org/get-started.",
        )
    hidden = (
        "CUDA_VISIBLE_DEVICES" in facts.environment or "HIP_VISIBLE_DEVICES" in facts.environment
    )
    if found.num_devices < len(facts.gpus) and not hidden:
        return problem(
            f"torch sees {found.num_devices} of {len(facts.gpus)} devices",
            'run python -c "import torch; torch.cuda.init()", which says why.',
        )
    return ok(f"torch {found.torch} ({wanted} {build}) sees {found.num_devices}")


@CHECKS.add(
    "devices-alike",
    "names and memory of the devices",
    "every step waits for the slowest and must fit the smallest",
)
def _alike(facts: MachineFacts) -> Verdict:
    kinds = Counter((gpu.name, gpu.memory_bytes) for gpu in facts.gpus)
    if len(kinds) < 2:
        return ok("all alike") if facts.gpus else NO_GPU
    told = ", ".join(f"{n} x {name} ({(m or 0) / 2**30:.0f} GiB)" for (name, m), n in kinds.items())
    return warning(
        told, "train on devices of one kind (CUDA_VISIBLE_DEVICES): all wait for the slowest."
    )


@CHECKS.add(
    "ecc",
    "ECC, uncorrected errors, rows that wait to be replaced",
    "uncorrected errors end jobs, or change numbers where ECC is off",
)
def _memory_health(facts: MachineFacts) -> Verdict:
    known = _those(facts, lambda gpu: gpu.health.ecc is not None)
    if not known:
        return unknown("no device tells of ECC") if facts.gpus else NO_GPU
    failed = _those(facts, lambda gpu: gpu.health.remap_failed)
    wrong = _those(facts, lambda gpu: bool(gpu.health.uncorrected))
    pending = _those(facts, lambda gpu: gpu.health.remap_pending)
    without = _those(facts, lambda gpu: gpu.health.ecc is False)
    if failed:
        return problem(
            f"no spare rows left on {_named(failed)}", "take it out and have it replaced."
        )
    if wrong:
        return problem(
            f"uncorrected errors on {_named(wrong)} since the driver was loaded",
            "reset it (nvidia-smi --gpu-reset), run dcgmi diag -r 3, replace it if it returns.",
        )
    if pending:
        return warning(f"rows wait to be replaced on {_named(pending)}", "reset the device.")
    if without:
        return warning(
            f"ECC is off on {_named(without)}", "switch it on (nvidia-smi -e 1) and reboot."
        )
    return ok("ECC is on, no uncorrected errors")


@CHECKS.add(
    "clock-throttling",
    "what holds the clocks down, now and since the driver was loaded",
    "heat and power brakes halve the clock of one device, and all wait for it",
)
def _throttling(facts: MachineFacts) -> Verdict:
    known = _those(facts, lambda gpu: gpu.clocks.max_sm_mhz is not None or bool(gpu.clocks.reasons))
    if not known:
        return unknown("no device tells what holds its clocks down") if facts.gpus else NO_GPU
    hard = _those(facts, lambda gpu: bool(set(_HARD) & set(gpu.clocks.reasons)))
    if hard:
        words = sorted({word for gpu in hard for word in gpu.clocks.reasons if word in _HARD})
        slow = min((gpu.clocks.sm_mhz or 0) / (gpu.clocks.max_sm_mhz or 1) for gpu in hard)
        return problem(
            f"{', '.join(words)} on {_named(hard)}, down to {slow:.0%} of the highest clock",
            "look at fans, inlet temperature and power supplies; keep jobs off it meanwhile.",
        )
    capped = _those(facts, lambda gpu: "sw_power_cap" in gpu.clocks.reasons)
    if capped:
        return warning(
            f"the power limit holds down {_named(capped)}",
            "expected under heavy products; else raise the limit (nvidia-smi -pl).",
        )
    earlier = _those(facts, lambda gpu: any(gpu.clocks.counters_s.get(w, 0) > 1 for w in _COUNTED))
    if earlier:
        longest = max(gpu.clocks.counters_s.get(w, 0) for gpu in earlier for w in _COUNTED)
        return warning(
            f"not now, but up to {longest:,.0f} s of heat or power brake on {_named(earlier)} "
            "since the driver was loaded",
            "run this again while a job runs; look at cooling and power supplies.",
        )
    return ok("nothing holds the clocks down")


@CHECKS.add(
    "clocks",
    "locked clocks, and busy devices that run at different ones",
    "a lock that somebody left behind costs its part of the speed",
)
def _clock_settings(facts: MachineFacts) -> Verdict:
    if not _those(facts, lambda gpu: bool(gpu.clocks.max_sm_mhz)):
        return unknown("no device tells its clocks") if facts.gpus else NO_GPU
    held = _those(facts, lambda gpu: "applications_clocks_setting" in gpu.clocks.reasons)
    if held:
        return warning(
            f"clocks are locked lower on {_named(held)}", "unlock them: nvidia-smi -rac, -rgc."
        )
    busy = _those(facts, lambda gpu: "gpu_idle" not in gpu.clocks.reasons)
    rates = [gpu.clocks.sm_mhz / gpu.clocks.max_sm_mhz for gpu in busy
             if gpu.clocks.sm_mhz and gpu.clocks.max_sm_mhz]  # fmt: skip
    if rates and min(rates) < _LOW_CLOCK * max(rates):
        return warning(
            f"busy devices run at {min(rates):.0%} to {max(rates):.0%} of their highest clock",
            "the slowest sets the pace: look at its temperature and power limit.",
        )
    return ok("not locked")


@CHECKS.add(
    "power-limit",
    "power limit against the default",
    "matrix products draw the most power, and slow down under a lower limit",
)
def _power_limit(facts: MachineFacts) -> Verdict:
    limits = [
        (gpu, gpu.clocks.power_limit_w, gpu.clocks.default_power_limit_w) for gpu in facts.gpus
    ]
    low = [
        (gpu, limit / usual) for gpu, limit, usual in limits if limit and usual and limit < usual
    ]
    if low:
        return warning(
            f"{_named([gpu for gpu, _ in low])} may draw {min(part for _, part in low):.0%} of the "
            "usual power",
            "set the default again (nvidia-smi -pl) unless the supply can't give it.",
        )
    if not any(limit and usual for _, limit, usual in limits):
        return unknown("no device tells its power limit") if facts.gpus else NO_GPU
    return ok("as the maker set it")


@CHECKS.add(
    "persistence",
    "persistence mode",
    "without it the driver loads anew for each job, and drops its settings",
)
def _persistence(facts: MachineFacts) -> Verdict:
    if not _those(facts, lambda gpu: gpu.persistence is not None):
        return unknown("no device tells") if facts.gpus else NO_GPU
    without = _those(facts, lambda gpu: gpu.persistence is False)
    if without:
        return warning(
            f"off on {_named(without)}", "start nvidia-persistenced, or nvidia-smi -pm 1."
        )
    return ok("on")


@CHECKS.add("slices", "MIG", "slices have no NVLink and no peer-to-peer")
def _whole(facts: MachineFacts) -> Verdict:
    sliced = _those(facts, lambda gpu: gpu.mig)
    if sliced:
        return warning(
            f"{_named(sliced)} are cut into slices (MIG)",
            "NCCL joins slices poorly: switch it off for training (nvidia-smi -mig 0).",
        )
    if not _those(facts, lambda gpu: gpu.mig is not None):
        return unknown("no device tells") if facts.gpus else NO_GPU
    return ok("no slices (MIG)")


@CHECKS.add(
    "devices-free",
    "memory that others hold",
    "what an earlier job left behind is an out-of-memory for the next",
)
def _free(facts: MachineFacts) -> Verdict:
    if not _those(facts, lambda gpu: gpu.used_bytes is not None):
        return unknown("no device tells") if facts.gpus else NO_GPU
    busy = _those(facts, lambda gpu: (gpu.used_bytes or 0) > _BUSY_BYTES)
    if busy:
        most = max(gpu.used_bytes or 0 for gpu in busy)
        return warning(
            f"up to {most / 2**30:.1f} GiB are taken on {_named(busy)}",
            "see who (nvidia-smi): an earlier job's processes must end first.",
        )
    return ok("their memory is free")
