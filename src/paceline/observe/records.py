"""Records: what stands in the files of a Run, key by key, as far as anything here reads it.

A file may hold more than these keys, which are kept as they are, and lack any but those marked
Required: files of earlier versions and of stopped runs do. What it must not do is hold something
else under a name that is known; `config.files` then says so in a sentence.
"""

from typing import Annotated, Any, Literal, Required

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter, with_config
from typing_extensions import TypedDict  # typing's own gives pydantic too little in 3.11

_CONFIG = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
_MOST_COUNT = 2**53  # beyond it a float is no longer exact

Number = float | None
Count = Annotated[int, Field(ge=0, le=_MOST_COUNT)]
Seconds = Annotated[float, Field(ge=0)]
Moment = Annotated[float, Field(ge=0, le=253402300799)]  # the last second of the year 9999


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
    generation: Count
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
    stream_latency_s: Number
    stream_backlog_tokens: Count
    mfu: Number
    memory_bytes: Number
    profiled: bool
    terms: dict[str, Number] | None
    figures: dict[str, Number] | None
    ranks: dict[str, Figure] | None
    comm: dict[str, Any] | None


@with_config(_CONFIG)
class DataFacts(TypedDict, total=False):
    """Of the data, in facts.json."""

    unigram_loss: Number


@with_config(_CONFIG)
class OriginRecord(TypedDict, total=False):
    """Where exported weights are from: paceline.json beside them."""

    run: Required[str]
    """The name of the run."""
    step: Required[Count]
    path: str
    """Of the Run directory, when it was exported."""
    checkpoint: str | None
    """The sum of its manifest, which has those of all its files."""


@with_config(_CONFIG)
class ExportRecord(TypedDict, total=False):
    """One export, of exports.jsonl."""

    time: Required[Moment]
    step: Required[Count]
    folder: Required[str]
    dtype: str
    checkpoint: str | None


@with_config(_CONFIG)
class SampleRecord(TypedDict, total=False):
    """What a network made of prompts after a step, of samples.jsonl."""

    step: Required[Count]
    prompts: Required[list[str]]
    texts: Required[list[str]]
    """That follow them."""
    seconds: Number


@with_config(_CONFIG)
class TaskRecord(TypedDict, total=False):
    """What a task of lm-evaluation-harness found of a network, of tasks.jsonl."""

    time: Required[Moment]
    step: Required[Count]
    task: Required[str]
    metrics: Required[dict[str, Number]]
    """By the harness's names."""
    errors: dict[str, Number]
    """Standard errors of some of them."""
    shots: Count
    """Examples before each question."""
    questions: Count | None
    chat: bool
    """Whether the chat template made the prompts."""
    checkpoint: str | None


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
    started: Moment
    data: DataFacts | None
    data_key: str | None
    """What names the data by its contents."""
    commit: str | None
    """Of the folder that the run was started in."""
    parent: OriginRecord | None
    """Of the weights that it started from."""


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


@with_config(_CONFIG)
class _EventRecord(TypedDict, total=False):
    """What every line of events.jsonl has."""

    time: Required[Moment]


@with_config(_CONFIG)
class GenerationEvent(_EventRecord, total=False):
    """Who trains together from now on."""

    event: Required[Literal["generation"]]
    generation: Required[Count]
    nodes: Required[list[str]]
    """Names: those that train in order of rank, then spares."""
    num_active: Count
    num_ranks: Count
    layout: str | None
    leader: str | None
    reason: str | None


# In this form because a key of it is a keyword.
LostEvent = TypedDict(
    "LostEvent",
    {
        "time": Required[Moment],
        "event": Required[Literal["lost"]],
        "generation": Required[Count],
        "class": Required[str],
        "node": str | None,
        "rank": Count | None,
        "host": str | None,
        "place": str | None,
        "sentence": str | None,
    },
    total=False,
)
"""What was lost, or holds up the others."""
with_config(_CONFIG)(LostEvent)


@with_config(_CONFIG)
class DecisionEvent(_EventRecord, total=False):
    """What is done about a loss or a return."""

    event: Required[Literal["decision"]]
    generation: Count
    action: Required[str]
    sentence: str | None


@with_config(_CONFIG)
class RecoveredEvent(_EventRecord, total=False):
    """A generation has its state."""

    event: Required[Literal["recovered"]]
    generation: Required[Count]
    step: Count
    source: str | None
    recomputed: Count | None
    bytes: Number
    seconds: dict[str, Seconds | None] | None


@with_config(_CONFIG)
class FirstStepEvent(_EventRecord, total=False):
    """The first finished step of a generation."""

    event: Required[Literal["first_step"]]
    generation: Required[Count]
    step: Count
    seconds: Seconds | None
    """Since the loss was noticed."""


@with_config(_CONFIG)
class EndEvent(_EventRecord, total=False):
    """A start of the run is over."""

    event: Required[Literal["end"]]
    generation: Count
    state: str | None
    exit_code: int | None


@with_config(_CONFIG)
class StartEvent(_EventRecord, total=False):
    """A start of a run that has no agents."""

    event: Required[Literal["start"]]
    generation: Count
    began: Required[Moment]
    """Unix time at which the command began."""
    step: Count
    """From which it goes on."""
    num_devices: Required[Annotated[Count, Field(ge=1)]]


@with_config(_CONFIG)
class TakenBackEvent(_EventRecord, total=False):
    """Steps were lost, and are done again."""

    event: Required[Literal["taken_back"]]
    generation: Count
    steps: Required[Count]
    began: Required[Moment]
    """Unix time at which the first of them began; `ended`: at which the last one ended."""
    ended: Required[Moment]


@with_config(_CONFIG)
class OtherEvent(_EventRecord, total=False):
    """One that is kept for people: a notice, a spike, an audit."""

    event: Required[str]
    generation: Count


def _kind_of_event(value: Any) -> str:
    kind = value.get("event") if isinstance(value, dict) else None
    known = ("generation", "lost", "decision", "recovered", "first_step", "end")
    return kind if kind in (*known, "start", "taken_back") else "other"


Event = Annotated[
    Annotated[GenerationEvent, Tag("generation")]
    | Annotated[LostEvent, Tag("lost")]
    | Annotated[DecisionEvent, Tag("decision")]
    | Annotated[RecoveredEvent, Tag("recovered")]
    | Annotated[FirstStepEvent, Tag("first_step")]
    | Annotated[EndEvent, Tag("end")]
    | Annotated[StartEvent, Tag("start")]
    | Annotated[TakenBackEvent, Tag("taken_back")]
    | Annotated[OtherEvent, Tag("other")],
    Discriminator(_kind_of_event),
]
"""A line of events.jsonl."""

LINE = TypeAdapter(StepRecord)
EVENT: TypeAdapter[Any] = TypeAdapter(Event)
FACTS = TypeAdapter(FactsFile)
ORIGIN = TypeAdapter(OriginRecord)
EXPORT = TypeAdapter(ExportRecord)
SAMPLE = TypeAdapter(SampleRecord)
TASK = TypeAdapter(TaskRecord)
PLAN = TypeAdapter(PlanFile)
DOCTOR = TypeAdapter(DoctorFile)
OWNERS = TypeAdapter(OwnersFile)
