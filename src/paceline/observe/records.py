"""Records: what stands in the files of a Run, key by key, as far as anything here reads it.

A file may hold more than these keys, which are kept as they are, and lack any but those marked
Required: files of earlier versions and of stopped runs do. What it must not do is hold something
else under a name that is known; `config.files` then says so in a sentence.
"""

from typing import Annotated, Any, Literal, Required

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict  # typing's own gives pydantic too little in 3.11

_CONFIG = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
_MOST_COUNT = 2**53  # beyond it a float is no longer exact

Number = float | None
Count = Annotated[int, Field(ge=0, le=_MOST_COUNT)]


@with_config(_CONFIG)
class SpreadRecord(TypedDict):
    """A figure of many ranks."""

    min: float
    median: float
    max: float
    at: Count


Figure = Annotated[list[float], Field(min_length=1)] | SpreadRecord


@with_config(_CONFIG)
class StepRecord(TypedDict, total=False):
    """One step, of metrics.jsonl."""

    step: Required[Count]
    tokens: Count
    samples: Count
    time: Number
    loss: Number
    grad_norm: Number
    lr: Number
    skipped: Count | None
    eval_loss: Number
    eval_perplexity: Number
    eval_auc: Number
    eval_best_auc: Number
    eval_s: Number
    step_time_s: Number
    between_s: Number
    gc_s: Number
    checkpoint_cpu_s: Number
    tokens_per_s: Number
    samples_per_s: Number
    mfu: Number
    memory_bytes: Number
    profiled: bool
    terms: dict[str, Number] | None
    ranks: dict[str, Figure] | None
    comm: dict[str, Any] | None


@with_config(_CONFIG)
class DataFacts(TypedDict, total=False):
    """Of the data, in facts.json."""

    unigram_loss: Number


@with_config(_CONFIG)
class FactsFile(TypedDict, total=False):
    """facts.json."""

    device: str
    unit: Literal["tokens", "samples"]
    num_ranks: Annotated[Count, Field(ge=1)]
    num_ranks_of_host: Annotated[Count, Field(ge=1)]
    threads_per_rank: Annotated[Count, Field(ge=1)]
    num_cores: float | None
    num_cores_of_host: float | None
    num_params: Count
    train_flops_per_token: Number
    peak_flops: Number
    checking: list[str]
    started: Annotated[float, Field(ge=0, le=253402300799)]  # the last second of the year 9999
    data: DataFacts | None


@with_config(_CONFIG)
class PlannedLayout(TypedDict, total=False):
    """A layout and what is expected of it, in plan.json."""

    step_s: Required[Annotated[float, Field(gt=0)]]
    interval_s: Required[Annotated[list[float], Field(min_length=2, max_length=2)]]
    time_s: Required[dict[str, float]]
    peak_memory_bytes: float


@with_config(_CONFIG)
class PlanFile(TypedDict, total=False):
    """plan.json."""

    reasons: dict[str, str]
    notes: list[str]
    layouts: list[PlannedLayout] | None


@with_config(_CONFIG)
class ClocksRecord(TypedDict, total=False):
    """Of a device, in doctor.json."""

    sm_mhz: Number
    max_sm_mhz: Number
    reasons: list[str] | None


@with_config(_CONFIG)
class DoctorGpu(TypedDict, total=False):
    """A device, in doctor.json."""

    clocks: ClocksRecord | None


@with_config(_CONFIG)
class DoctorFacts(TypedDict, total=False):
    """What was read, in doctor.json."""

    gpus: list[DoctorGpu] | None


@with_config(_CONFIG)
class DoctorCheck(TypedDict, total=False):
    """What was judged, in doctor.json."""

    status: Required[str]
    seen: Required[str]
    fix: Required[str | None]


@with_config(_CONFIG)
class DoctorFile(TypedDict, total=False):
    """doctor.json."""

    facts: DoctorFacts | None
    checks: dict[str, DoctorCheck] | None


@with_config(_CONFIG)
class OwnersFile(TypedDict, total=False):
    """memory/rank<k>-step<n>.json of a window on CUDA: address and bytes of lasting blocks."""

    held: dict[str, list[Annotated[list[int], Field(min_length=2, max_length=2)]]]


LINE = TypeAdapter(StepRecord)
FACTS = TypeAdapter(FactsFile)
PLAN = TypeAdapter(PlanFile)
DOCTOR = TypeAdapter(DoctorFile)
OWNERS = TypeAdapter(OwnersFile)
