"""Checks of versions that belong together."""

from paceline.doctor.checks.verdict import NO_GPU, Checks, Verdict, ok, problem, unknown, warning
from paceline.doctor.facts import MachineFacts
from paceline.doctor.software import CUDA_OF_ARCHITECTURE, MINIMUM_DRIVER, version

CHECKS = Checks()
_UNKNOWN = unknown("it is not known which torch is installed")


@CHECKS.add(
    "driver", "driver against torch's CUDA", "an older driver than CUDA needs finds no device"
)
def _driver(facts: MachineFacts) -> Verdict:
    if facts.software is None:
        return _UNKNOWN
    cuda = facts.software.cuda
    if facts.driver is None or facts.gpus[0].maker != "nvidia":
        return unknown("no driver of NVIDIA's was seen")
    if cuda is None:
        return unknown("torch was not built for CUDA")
    needed = MINIMUM_DRIVER.get(version(cuda)[0])
    if needed is None:
        return unknown(f"the driver that CUDA {cuda} needs is not in the table")
    wanted = ".".join(map(str, needed))
    # A compatibility package lets an older driver run it: then the driver says so itself.
    if version(facts.driver.version) < needed and version(facts.driver.cuda or "") < version(cuda):
        return problem(
            f"driver {facts.driver.version}, and torch's CUDA {cuda} needs {wanted}",
            f"install driver {wanted} or newer, or a torch for an older CUDA.",
        )
    return ok(f"driver {facts.driver.version} runs CUDA {cuda} (needs {wanted})")


@CHECKS.add(
    "architecture",
    "devices against torch's CUDA",
    "kernels that weren't compiled for a device don't start",
)
def _architecture(facts: MachineFacts) -> Verdict:
    if facts.software is None:
        return _UNKNOWN
    if not facts.gpus:
        return NO_GPU
    range_ = CUDA_OF_ARCHITECTURE.get(facts.gpus[0].architecture or "")
    cuda = facts.software.cuda
    if cuda is None or range_ is None:
        return unknown("which CUDA these devices need is not in the table")
    first, last = range_
    name = facts.gpus[0].architecture
    if version(cuda) < first:
        wanted = ".".join(map(str, first))
        return problem(
            f"CUDA {cuda} doesn't know {name}", f"install a torch for CUDA {wanted} or newer."
        )
    if last is not None and version(cuda)[:2] > last:
        wanted = ".".join(map(str, last))
        return problem(
            f"CUDA {cuda} dropped {name}", f"install a torch for CUDA {wanted} or older."
        )
    return ok(f"CUDA {cuda} knows {name}")


@CHECKS.add(
    "versions",
    "Paceline's and torch's requirements (cuDNN, NCCL, Triton) against what is installed",
    "torch is tested with exactly those",
)
def _together(facts: MachineFacts) -> Verdict:
    if facts.software is None:
        return _UNKNOWN
    if not facts.software.required:
        return unknown("no package says what it asks for")
    wrong = [each for each in facts.software.required if not each.fits]
    if wrong:
        told = "; ".join(
            f"{each.by} asks for {each.package}{each.versions}, here is {each.installed or 'none'}"
            for each in wrong
        )
        fixed = " ".join(f'"{each.package}{each.versions}"' for each in wrong)
        return problem(told, f"pip install {fixed}.")
    return ok(f"{len(facts.software.required)} requirements of Paceline and torch are met")


@CHECKS.add(
    "nccl-version",
    "the NCCL that is loaded against the one that torch came with",
    "another one in LD_LIBRARY_PATH is older than its headers, or differs between hosts",
)
def _nccl_loaded(facts: MachineFacts) -> Verdict:
    if facts.software is None:
        return _UNKNOWN
    pins = [
        each.installed
        for each in facts.software.required
        if each.package.startswith("nvidia-nccl") and each.installed
    ]
    loaded = [*(facts.nccl.versions if facts.nccl else ()), *filter(None, [facts.software.nccl])]
    if not pins or not loaded:
        return unknown("no NCCL package beside a loaded NCCL was seen")
    other = [each for each in loaded if version(each)[:3] != version(pins[0])[:3]]
    if other:
        return warning(
            f"NCCL {other[0]} is loaded, torch came with {pins[0]}",
            "LD_LIBRARY_PATH or LD_PRELOAD brings another one: unset it, unless it is meant.",
        )
    return ok(f"NCCL {loaded[0]}, the one that torch came with")


@CHECKS.add(
    "monitoring",
    "programs that watch devices and hosts",
    "clocks, errors and traffic are known afterwards only if somebody wrote them down",
)
def _monitoring(facts: MachineFacts) -> Verdict:
    if facts.software is None:
        return _UNKNOWN
    if facts.software.monitors:
        return ok(", ".join(facts.software.monitors))
    if not facts.gpus:
        return unknown("no accelerator to watch; a run has its own metrics (paceline top)")
    return warning(
        "neither DCGM nor a Prometheus exporter of the host is installed",
        "install dcgm-exporter and node_exporter beside the run's own metrics.",
    )
