"""The layout of a published run, and of its batch what closes.

Cells that are missing are inferred where only one value fits (data ranks from the number of
devices) or where the system has a habit (one sample a time in a pipeline, enough to keep a device
busy without one), and their names are kept with the run. What leaves several possibilities is not
predicted.
"""

import math
import re
from typing import Literal, NamedTuple, cast

from paceline.config.layout import Layout, ScheduleName
from paceline.config.model import Model
from paceline.config.schedule import DEMANDS, STAGES_PER_RANK, smallest_micro_batches
from paceline.published.networks import UnpredictableError
from paceline.published.recompute import recompute_of
from paceline.published.software import RunSoftware
from paceline.published.table import PublishedLine

_BUSY_TOKENS = 16384


class MeshSizes(NamedTuple):
    """Sizes of the mesh."""

    data: int
    tp: int
    pp: int
    cp: int
    ep: int


class RankBatch(NamedTuple):
    """One step of one data rank."""

    micro_batch: int
    num_micro_batches: int


def layout_of(
    line: PublishedLine, model: Model, software: RunSoftware
) -> tuple[Layout, int, list[str]]:
    """The layout of a line, samples of a step that it closes with, and what was inferred.

    Raises:
        UnpredictableError: where the line leaves the layout open, or contradicts itself.
    """
    inferred: list[str] = []
    axes = _axes(line, software, inferred)
    if axes.pp > model.num_layers:
        raise UnpredictableError("fewer layers than stages")
    schedule = _schedule(line, model, axes.pp)
    stages = STAGES_PER_RANK.get(schedule, 1) or _stages_per_rank(line, model, axes.pp)
    multiple = 1 if schedule == "none" else smallest_micro_batches(schedule, axes.pp)
    batch = _batch(line, axes, multiple, inferred)
    fsdp, zero = sharding_of(line, software, axes, inferred)
    recompute, layers = recompute_of(line, model, inferred)
    split: tuple[int, ...] = ()
    if axes.pp > 1:
        num_stages = axes.pp * stages // DEMANDS[schedule].num_directions
        if num_stages > model.num_layers or axes.pp % DEMANDS[schedule].num_directions:
            raise UnpredictableError("layers don't close over stages")
        split = even_split(model.num_layers, num_stages)
    share = math.ceil(model.num_layers / axes.pp * layers) if layers < 1 else "all"
    layout = Layout(
        dp=axes.data // fsdp,
        fsdp=fsdp,
        zero=zero,
        tp=axes.tp,
        pp=axes.pp,
        cp=axes.cp,
        ep=axes.ep,
        sequence_parallel=axes.tp > 1 and _sequence_parallel(line, software),
        async_tp=software.async_tp and axes.tp > 1,
        schedule=schedule,
        stages_per_rank=stages,
        split=split,
        micro_batch=batch.micro_batch,
        precision=_LAYOUT_PRECISION[software.precision],
        param_dtype=software.param_dtype,
        recompute=recompute,
        optimizer_state="8bit" if _has_codes(line) else "full",
        offload=("optimizer",) if _offloads_optimizer(line) else (),
        recompute_layers=share if recompute != "none" else "all",  # type: ignore[arg-type]
        compile=software.compile,
    )
    return layout, axes.data * batch.micro_batch * batch.num_micro_batches, inferred


# tf32 and fp4 run as the nearest word of a Layout, on a device with their rates (`__init__`).
_LAYOUT_PRECISION: dict[str, Literal["fp32", "bf16", "fp16", "fp8"]] = {
    "fp32": "fp32",
    "tf32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "fp8",
    "fp4": "fp8",
}


def _axes(line: PublishedLine, software: RunSoftware, inferred: list[str]) -> MeshSizes:
    devices = line.count("gpus")
    if not devices:
        raise UnpredictableError("no number of devices")
    tp, pp, cp = line.count("tp"), line.count("pp"), line.count("cp")
    if tp is None and pp is None and devices > 1 and not _is_data_only(line, software):
        raise UnpredictableError("no layout")
    tp, pp, cp = tp or 1, pp or 1, cp or 1
    data = line.count("dp")
    if data is None:
        if devices % (tp * pp * cp):
            raise UnpredictableError("ranks don't close")
        data = devices // (tp * pp * cp)
        inferred.append("dp")
    if data * tp * pp * cp != devices:
        raise UnpredictableError("ranks don't close")
    batch = line.count("global_batch_seqs")
    if batch and batch < data and data % batch == 0 and not line.count("micro_batch"):
        # More data ranks than samples: the surplus can only share sequences.
        cp, data = cp * (data // batch), batch
        inferred.append("cp")
    # Whole experts are spread over the ranks of tp too.
    holders = data * cp * (tp if software.stack.expert_tp == "one" else 1)
    return MeshSizes(data, tp, pp, cp, _expert_ranks(line, holders, inferred))


def _expert_ranks(line: PublishedLine, most: int, inferred: list[str]) -> int:
    ep = line.count("ep") or 1
    if not line.count("experts"):
        return 1
    if most % ep:
        # Of ranks that don't divide, those that do.
        inferred.append("ep")
        return math.gcd(most, ep)
    return ep


def _schedule(line: PublishedLine, model: Model, pp: int) -> ScheduleName:
    """By the name that is published, else by the number of stages."""
    if pp == 1:
        return "none"
    columns = ("pp_schedule", "framework", "compile_flash_flags")
    words = " ".join(line.text(column) for column in columns).lower()
    named = re.search(r"\b(dualpipe[ -]?v|dualpipe|zb-?v|zb-?h1|gpipe)\b", words)
    if named:
        plain = re.sub(r"[ -]", "", named[1])
        return cast(ScheduleName, "zb_h1" if plain == "zbh1" else plain)
    return "interleaved" if _stages_per_rank(line, model, pp) > 1 else "1f1b"


def _is_data_only(line: PublishedLine, software: RunSoftware) -> bool:
    words = f"{line.text('fsdp_or_zero')} {line.text('framework')}".lower()
    return software.family.startswith("fsdp") or bool(re.search(r"ddp|zero-?3|fsdp", words))


def _stages_per_rank(line: PublishedLine, model: Model, pp: int) -> int:
    """Virtual stages as published, as far as there are layers for them."""
    wished = line.count("vpp") or 1
    return max(1, min(wished, model.num_layers // pp)) if pp > 1 else 1


def even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage as systems share them out.

    Where they don't divide, the embedding and the head count as a layer if that closes; otherwise
    the stages after the first take the rest.
    """
    share, rest = divmod(num_layers, num_stages)
    if rest and share and rest == num_stages - 2:
        return (share, *[share + 1] * (num_stages - 2), share)
    if rest and rest == num_stages - 1:
        return (*[share + 1] * (num_stages - 1), share) if share else ()
    return tuple(share + (1 <= stage <= rest) for stage in range(num_stages))


def _batch(line: PublishedLine, axes: MeshSizes, multiple: int, inferred: list[str]) -> RankBatch:
    """Micro-batches of a data rank: a multiple of what the schedule takes."""
    total, micro = line.count("global_batch_seqs"), line.count("micro_batch")
    accumulated = line.count("grad_accum") or _accumulated_in(line)
    if micro is None:
        per_rank = (total or axes.data) / axes.data
        # What accumulation leaves; else pipelines run one sample at a time, and others as many as
        # keep a device busy: a person has tuned it.
        busy = max(1, _BUSY_TOKENS * axes.cp // (line.count("seq") or 1))
        micro = 1 if axes.pp > 1 else busy
        if accumulated:
            micro = max(1, round(per_rank / accumulated))
        elif total is not None and axes.pp == 1:
            share = max(1, round(per_rank))
            micro = max(part for part in range(1, min(busy, share) + 1) if share % part == 0)
        follows = total is not None and accumulated is not None
        if not follows and not 1 < axes.pp == per_rank:  # fewer don't fill a pipeline
            inferred.append("micro_batch")
    if total is None:
        if micro is None or not accumulated:
            inferred.append("global_batch_seqs")
        total = micro * axes.data * (accumulated or 1)
    exact = total / (axes.data * micro)
    number = max(1, round(exact / multiple)) * multiple
    if abs(number - exact) > 0.5 * multiple + 1e-9 or (exact < 1 and axes.data * micro != total):
        raise UnpredictableError("batch doesn't close")
    if number != exact:
        inferred.append("num_micro_batches")
    return RankBatch(micro, number)


def _accumulated_in(line: PublishedLine) -> int | None:
    """Micro-batches of a step that the notes name: "gradient accumulation 4", "accum steps = 8"."""
    words = line.text("notes").lower()
    found = re.search(r"\bgrad\w*[ _]accum\w*(?:[ _]steps?)?\s*(?:of|=|:|x)?\s*(\d+)\b", words)
    return int(found[1]) or None if found else None


def sharding_of(
    line: PublishedLine, software: RunSoftware, axes: MeshSizes, inferred: list[str]
) -> tuple[int, Literal[0, 1, 2, 3]]:
    """Ranks that shard, and how much: (fsdp, zero)."""
    text = line.text("fsdp_or_zero").lower()
    stage: Literal[0, 1, 2, 3] = 0
    if re.search(r"zero-?3|full_?shard|hybrid_?shard|\b[fh]sdp2?\b", text):
        stage = 3
    if re.search(r"zero-?2|shard_grad_op", text):
        stage = 2
    if re.search(r"zero-?1|distributed ?optimizer|distributed fused", text):
        stage = 1
    if not text and software.family.startswith("fsdp") and axes.data > 1:
        stage = 3
        inferred.append("fsdp_or_zero")
    if axes.data * axes.cp == 1 or stage == 0:
        return 1, 0
    if axes.pp > 1:
        # Published systems keep a stage's parameters gathered and its gradients whole for a step.
        stage = 1
    ranks = _shard_group(line, text) or axes.data
    fits = 1 < ranks <= axes.data and axes.data % ranks == 0
    return (ranks if fits else axes.data), stage


def _states_words(line: PublishedLine) -> str:
    columns = ("fsdp_or_zero", "framework", "precision", "compile_flash_flags", "notes")
    return "; ".join(line.text(column) for column in columns).lower()


def _has_codes(line: PublishedLine) -> bool:
    """Whether the optimizer's moments are 8-bit codes (bitsandbytes and its like)."""
    said = r"8-?bit\W{0,2}(?:paged )?(?:\w+ )?(?:optim|adam|moments)|adamw?[ _-]?8-?bit"
    return bool(re.search(said, _states_words(line)))


def _offloads_optimizer(line: PublishedLine) -> bool:
    """Whether the optimizer's state is on the host, as DeepSpeed's ZeRO-Offload has it."""
    said = (
        r"zero-?offload|optimizer (?:cpu )?offload|offload\w* (?:the )?optimizer|offload_optimizer"
        r"|optimizer on (?:the )?(?:cpu|host)|zero-?infinity"
    )
    words = _states_words(line)
    found = re.search(said, words)
    return found is not None and not re.search(r"(?:no|without) $", words[: found.start()])


def _shard_group(line: PublishedLine, text: str) -> int | None:
    """Ranks that share one copy of the states where several groups have one; None: all do.

    "FSDP2 x8", "shard group 8", "dp_shard 8", "HSDP 4x8" (copies x shards): a number that is
    named. Without one PyTorch's hybrid sharding goes over a node
    (https://docs.pytorch.org/docs/stable/fsdp.html, HYBRID_SHARD).
    """
    words = f"{text}; {line.text('notes').lower()}"
    hybrid = re.search(r"\bhsdp|hybrid_?shard|within (?:a|each|one|the) node", text)
    sizes = re.search(r"\bhsdp2?\D{0,3}(\d+)\s*x\s*(\d+)", words)
    if sizes:
        return int(sizes[2])
    named = re.search(
        r"(?:fsdp2? x|shard(?:s|ed|ing)?(?:[ _](?:group|degree|size))?[ =]+)(\d+)", text
    )
    if hybrid and named is None:
        named = re.search(r"(?:dp_shard|shard(?:ing)?[ _](?:group|degree|size))\D{0,5}(\d+)", words)
    if named:
        return int(named[1])
    return (line.count("gpus_per_node") or 8) if hybrid else None


def _sequence_parallel(line: PublishedLine, software: RunSoftware) -> bool:
    if software.family == "xla":
        # MaxText shares what goes from layer to layer over its tensor axis too, by columns: as much
        # memory as by tokens (https://github.com/AI-Hypercomputer/maxtext, base.yml's
        # logical_axis_rules).
        return True
    stated = line.flag("sp")
    if stated is not None:
        return stated
    return bool(line.text("framework")) and software.family in ("megatron", "fsdp compiled")
