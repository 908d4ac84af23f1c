"""Published runs: lines of a table become layouts that the planner can predict.

A line names a network, a machine, a layout, software, and what was measured. `read_runs` turns each
into a Setting and a Layout; the software becomes a Stack by its features, never by the name of the
source (`paceline.published.software`). What was not published is inferred and named, and a run
that can't be predicted says why: nothing is left out in silence.

Columns are those of the tables in `benchmarks/data`; a table may have fewer (a short one of
Megatron GPT runs: gpus, global_batch_seqs, micro_batch, hidden, heads, layers, seq, tp, dp, pp,
step_time_ms) and others besides, which are ignored.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.hardware import CATALOGUE, Device
from paceline.plan.points import Setting
from paceline.published.adapters import finetune_of
from paceline.published.convnets import network_named, predict_images_per_s
from paceline.published.layouts import layout_of
from paceline.published.machines import cluster_of, device_of, label_in
from paceline.published.networks import UnpredictableError, model_of
from paceline.published.software import RunSoftware, software_of
from paceline.published.table import PublishedLine, read_lines
from paceline.published.works import ImageWork, LanguageWork, PublishedWork

__all__ = ["ImageWork", "LanguageWork", "PublishedRun", "PublishedWork", "read_runs"]

# Of a masked language model's tokens: 15 % are masked (https://arxiv.org/abs/1810.04805).
_MASKED_SHARE = 0.15
# Load of the busiest rank's experts over the mean where tokens choose freely, as an estimator for
# training takes it (https://github.com/mlc-ai/pith-train/pull/18). Benchmarks force it to 1.
_NATURAL_IMBALANCE = 1.2
_DECIDE_MEMORY = {"micro_batch", "activation_ckpt", "fsdp_or_zero"}


@dataclass(frozen=True)
class PublishedRun:
    """One line of a table."""

    name: str
    group: str
    """Where it was published: lines of one group share their way of measuring."""
    work: PublishedWork | None
    """None: it can't be predicted."""
    reason: str
    """Why it can't, "" where it can."""
    step_s: float | None
    """Measured seconds of a step of `work.global_batch` samples."""
    peak_memory_bytes: float | None
    """Measured, of one device."""
    is_memory_open: bool
    """Whether too little was published to predict it."""
    memory_kind: str
    """What was measured: "reserved", "allocated" or "in use" (everything on the device)."""
    out_of_memory: bool
    """Published not to fit."""
    measures_steps: bool
    """Whether the source measured seconds of a step; otherwise tokens per second."""
    config_key: str
    """Equal for repeats of one set-up."""
    weight: float = 1.0
    """1 / repeats."""


def read_runs(paths: Sequence[Path]) -> list[PublishedRun]:
    """All lines of some tables.

    Raises:
        InputError: a file that is no such table, or a cell that can't be right.
    """
    runs = [run for path in paths for run in _runs_of(path)]
    repeats = Counter(run.config_key for run in runs)
    names = Counter(run.name for run in runs)
    return [
        replace(
            run,
            name=run.name if names[run.name] == 1 else f"{run.name} #{number}",
            weight=1 / repeats[run.config_key],
        )
        for number, run in enumerate(runs, 1)
    ]


def _runs_of(path: Path) -> list[PublishedRun]:
    lines = read_lines(path)
    columns = set(lines[0].cells) if lines else set()
    speeds = {"step_time_s", "step_time_ms", "tokens_per_s_per_gpu", "images_per_s"}
    if not speeds & columns:
        raise InputError(
            f"{path} is not a table of runs: it needs lines below the first and one of the columns "
            f"{', '.join(sorted(speeds))}; see `paceline validate --help`."
        )
    return [_run(line, index) for index, line in enumerate(lines)]


def _run(line: PublishedLine, index: int) -> PublishedRun:
    name = line.text("id") or f"{line.file}-{index + 1}"
    work, reason = None, ""
    try:
        work = _image_work(line) if line.number("images_per_s") else _language_work(line)
    except UnpredictableError as error:
        reason = str(error)
    speed = _units_per_s(line, work) if work else None
    step_s = work.units / speed if work and speed else None
    oom = line.text("outcome").lower() == "oom"
    memory = line.number("peak_mem_gb")
    if work and step_s is None and memory is None and not oom:
        work, reason = None, "nothing measured"
    return PublishedRun(
        name=name,
        group=line.text("source_group") or line.file,
        work=work,
        reason=reason,
        step_s=None if oom else step_s,
        peak_memory_bytes=_memory_bytes(line),
        is_memory_open=_is_memory_open(line, work),
        memory_kind=_memory_kind(line),
        out_of_memory=oom,
        measures_steps=line.text("primary_metric") in ("", "step_time_s"),
        config_key=line.text("config_key") or f"{line.where} {name}",
    )


def _language_work(line: PublishedLine) -> LanguageWork:
    finetune, usual = finetune_of(line)
    model, inferred = model_of(line)
    software = software_of(line)
    device, assumed = _device(line, software)
    layout, global_batch, missing = layout_of(line, model, software)
    cluster, network = cluster_of(device, layout.num_ranks, line)
    setting = Setting(
        model, cluster, model.max_seq_len, global_batch, software.stack, finetune=finetune
    )
    if line.text("workload").lower().startswith("mlm"):
        setting = replace(setting, loss_share=_MASKED_SHARE)
    if "natural routing" in line.text("notes").lower():
        setting = replace(setting, expert_imbalance=_NATURAL_IMBALANCE)
    inferred += [*usual, *assumed, *missing, *network]
    return LanguageWork(layout, software, tuple(inferred), setting)


def _image_work(line: PublishedLine) -> ImageWork:
    side, devices = line.count("image_size"), line.count("gpus")
    network = network_named(line.text("model"), side) if side else None
    if network is None or side is None:
        raise UnpredictableError("unknown network")
    if not devices:
        raise UnpredictableError("no number of devices")
    software = software_of(line)
    device, assumed = _device(line, software)
    cluster, missing = cluster_of(device, devices, line)
    batch, precision = line.count("batch_per_gpu"), software.precision
    found = predict_images_per_s(
        cluster, line.text("model"), side, precision, batch, software.stack
    )
    if isinstance(found, str):
        raise UnpredictableError(f"unknown {found}")
    inferred = (*assumed, *missing, *(() if batch else ("batch_per_gpu",)))
    return ImageWork(found.layout, software, inferred, network, cluster)


def _device(line: PublishedLine, software: RunSoftware) -> tuple[Device, list[str]]:
    """The device, with the rate of the run's arithmetic under the word that the layout uses."""
    label, assumed = line.text("gpu"), []
    if not label:
        label, assumed = label_in(line.file) or "", ["gpu"]
    device = device_of(label) if label else None
    if device is None:
        raise UnpredictableError(f"unknown device {label}".strip())
    if device.peak(software.precision) is None:
        raise UnpredictableError(f"no {software.precision} on {device.name}")
    stands_for = {"tf32": "fp32", "fp4": "fp8"}.get(software.precision)
    if stands_for is not None and not line.number("images_per_s"):
        return _running_as(device.name, software.precision, stands_for), assumed
    return device, assumed


@lru_cache(maxsize=64)
def _running_as(name: str, precision: str, stands_for: str) -> Device:
    """A device whose rate of one arithmetic stands under the name of another; one object each."""
    device = CATALOGUE[name]
    peaks = {**device.peak_flops, stands_for: device.peak_flops[precision]}
    return device.replace(peak_flops=peaks)


def _units_per_s(line: PublishedLine, work: PublishedWork) -> float | None:
    """Tokens or images per second of all devices, from what the source measured.

    Where tokens/s were rounded coarsely and TFLOP/s of our definition (6 FLOPs per matmul
    parameter, causal attention halved) stand beside them, these decide.
    """
    if isinstance(work, ImageWork):
        return line.number("images_per_s")
    samples = line.count("global_batch_seqs") or work.global_batch
    step = line.number("step_time_s") or (line.number("step_time_ms") or 0) / 1e3 or None
    per_device = line.number("tokens_per_s_per_gpu")
    by_step = samples * (work.units / work.global_batch) / step if step else None
    by_rate = per_device * work.num_devices if per_device else None
    if by_rate is not None and isinstance(work, LanguageWork):
        by_rate = _finer(line, work, by_rate)
    if line.text("primary_metric") in ("", "step_time_s"):
        return by_step or by_rate
    return by_rate or by_step


def _finer(line: PublishedLine, work: LanguageWork, tokens_per_s: float) -> float:
    tflops = line.number("tflops_per_gpu")
    if work.setting.finetune.is_adapted:
        return tokens_per_s  # their FLOPs are counted in other ways
    rounded = "coarse" in line.text("notes") and "causal-halved" in line.text("mfu_definition")
    if not rounded or not tflops:
        return tokens_per_s
    flops = work.setting.model.train_flops_per_token(work.setting.seq_len)
    finer = tflops * 1e12 * work.num_devices / flops
    return finer if abs(finer / tokens_per_s - 1) < 0.05 else tokens_per_s


def _is_memory_open(line: PublishedLine, work: PublishedWork | None) -> bool:
    """Whether cells that decide the memory are inferred, or guesses of the table."""
    guessed = (
        r"(batch|checkpointing|recompute)[^;]*(assumed|not (re)?stated|not checked)"
        r"|sources conflict|layout[^;]* doubtful"
    )
    if work is None or re.search(guessed, line.text("notes").lower()):
        return True
    return not _DECIDE_MEMORY.isdisjoint(work.inferred)


def _memory_bytes(line: PublishedLine) -> float | None:
    """Measured peak of a device. Some tools print GiB under the name of GB; nvidia-smi prints MiB,
    of which people call a thousand a GB."""
    memory, notes = line.number("peak_mem_gb"), line.text("notes").lower()
    if memory is None:
        return None
    is_gib = "gb as printed" in line.text("peak_mem_raw").lower()
    is_gib = is_gib and bool(re.search(r"printed gb[^;]*reports [^;]*gib", notes))
    if "nvidia-smi" in notes:
        return memory * 1000 * 2**20
    return memory * (2**30 if is_gib else 1e9)


def _memory_kind(line: PublishedLine) -> str:
    """Megatron and LitGPT print the most that was allocated, other trainers what was reserved."""
    notes = line.text("notes").lower()
    if "nvidia-smi" in notes:
        return "in use"
    prints_allocated = re.search(r"megatron|litgpt", line.text("framework").lower())
    return "allocated" if "allocated" in notes or prints_allocated else "reserved"
