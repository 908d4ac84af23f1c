"""Points: many layouts as columns, so that one formula prices one layout or ten million.

Each column is an array of the same length n (or of length 1, where all points share the value);
every formula of the planner is written for arrays and broadcasts. Settings that are words become
their index in a tuple of this file. `Points.of` makes the columns of layouts; the search
makes them directly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.comm.algorithms import MOST_RANKS
from paceline.config.catalogue.own_stack import own_stack
from paceline.config.comm import Codec, Comm, codec
from paceline.config.feasible import settings_of
from paceline.config.finetune import Finetune
from paceline.config.hardware import Cluster, Device
from paceline.config.job import JobOnCluster, JobSpec
from paceline.config.layout import PRECISIONS, Layout
from paceline.config.model import Model
from paceline.config.schedule import NUM_DIRECTIONS, SPLITS_BACKWARD, num_stages
from paceline.config.stack import Stack

Array = npt.NDArray[Any]

# Bytes of a number in memory; fp8's products read 8-bit copies of 16-bit tensors.
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
ARITHMETIC_BYTES = np.array([BYTES[name] for name in PRECISIONS], float)


def decoder_of(job: JobSpec) -> Model:
    """The shapes of a Job whose model knows its layers: those of a decoder."""
    assert isinstance(job.model, Model), "only decoders know their layers"
    return job.model


@dataclass(frozen=True)
class Setting:
    """What stays the same over all layouts that are compared: a `config.feasible.Purpose`."""

    model: Model
    cluster: Cluster
    seq_len: int
    """Tokens of a sample."""
    global_batch: int
    """Samples of a step."""
    stack: Stack
    expert_imbalance: float = 1.0
    """Load of the busiest rank's experts over the mean."""
    loss_share: float = 1.0
    """Part of the tokens that the head and the loss see: those that a masked language model asks
    for."""
    comm: Comm = field(default_factory=Comm)
    """What crosses each axis and how often; what is "auto" there is priced as exact."""
    shard_algorithm: str = "backend"
    """Who scatters gradients and gathers parameters, see `comm.algorithms`."""
    state_bytes: float | None = None
    """What another optimizer than AdamW keeps of a parameter, bytes in fp32; None: AdamW's, as the
    stack keeps it."""
    has_muon: bool = False
    """Whether the optimizer is Muon, see `price.muon`."""
    finetune: Finetune = field(default_factory=Finetune)
    """What is trained."""

    @classmethod
    def of(cls, job: JobOnCluster) -> "Setting":
        """That of a decoder's Job."""
        train = job.train
        stack = job.cluster.stack or own_stack(job.cluster.device.kind)
        setting = cls(decoder_of(job), job.cluster, train.seq_len, train.global_batch, stack)
        algorithm = job.comm.fsdp.algorithm
        if algorithm == "auto":  # which of ours, the layout decides: gloo's own is never it
            is_ours = setting.device.is_cpu and setting.cluster.num_devices <= MOST_RANKS
            algorithm = "halving_doubling" if is_ours else "backend"
        state = None if job.optim.name == "adamw" else job.optim.state_bytes(_inner(setting.model))
        setting = replace(setting, finetune=job.finetune, state_bytes=state)
        setting = replace(setting, has_muon=job.optim.name == "muon")
        return replace(setting, shard_algorithm=algorithm, comm=job.comm)

    @property
    def of_teacher(self) -> "Setting | None":
        """What reads the same tokens beside the network, forward alone; None: nothing does."""
        teacher = self.finetune.teacher
        return None if teacher is None else replace(self, model=teacher, finetune=Finetune())

    @property
    def busiest_load(self) -> float:
        """`expert_imbalance` of a rank's own work: copies of hot experts take what is above the
        mean."""
        return 1.0 if self.comm.ep.hot_experts else self.expert_imbalance

    @property
    def device(self) -> Device:
        """Of the cluster."""
        return self.cluster.device

    def has_params_outside(self, points: "Points") -> Array:
        """Whether parameters and optimizer wait outside the devices: on hosts, or in the store that
        weights are streamed from: (n,) or a scalar, bool."""
        streams = self.device.streamed_bytes_per_s is not None
        return np.logical_or(points.offload_params.astype(bool), streams)

    @property
    def attention(self) -> str:
        """`Stack.attention`; a network without a fused kernel has its scores in memory anywhere."""
        return self.stack.attention if self.model.has_fused_attention else "unfused"

    @property
    def moments_bytes(self) -> float:
        """What the optimizer keeps of a parameter, bytes in fp32."""
        return self.stack.moments_bytes if self.state_bytes is None else self.state_bytes

    @property
    def replica_codec(self) -> Codec:
        """In what form replicas exchange gradients."""
        form = self.comm.dp.compress
        return codec("none" if form == "auto" else form)

    @property
    def worker_codec(self) -> Codec:
        """In what form workers of local updates exchange what they changed."""
        form = self.comm.local.compress
        return codec("none" if form == "auto" else form)

    @property
    def shard_codec(self) -> Codec:
        """In what form gradients are scattered to shards."""
        form = self.comm.fsdp.compress
        return codec("none" if form == "auto" else form)

    @property
    def weight_codec(self) -> Codec:
        """In what form parameters are gathered from shards."""
        return codec(self.comm.fsdp.compress_weights)

    @property
    def is_exact(self) -> bool:
        """Whether nothing between data ranks is coded: searches needn't ask what coding costs."""
        codecs = (self.replica_codec, self.shard_codec, self.weight_codec, self.worker_codec)
        return all(each.kind == "none" for each in codecs)

    @property
    def codes_between_nodes(self) -> bool:
        """Whether gradients are scattered exactly inside nodes, and coded from node to node."""
        return self.shard_codec.kind != "none" and self.shard_algorithm == "hierarchical"

    def shards_inside(self, shards: Array, stride: Array) -> Array:
        """Of such a group of shards: how many of a node are taken together; else 1 (n,)."""
        if not self.codes_between_nodes:
            return np.ones(1)
        return np.clip(self.cluster.devices_per_node // stride, 1, shards)

    @property
    def updates_locally(self) -> bool:
        """Whether replicas are workers, which do steps of their own between exchanges."""
        return self.comm.local.method != "none"


def _inner(model: Model) -> float:
    """Part of the parameters that is in blocks: nearly all of it matrices."""
    return sum(map(model.num_block_params, range(model.num_layers))) / model.num_params


@dataclass(frozen=True, eq=False)
class Points:
    """Columns of layouts, see `paceline.config.layout.Layout` for each setting."""

    workers: Array
    """Replicas that step each for itself, under local updates; their `dp` is 1."""
    dp: Array
    fsdp: Array
    zero: Array
    tp: Array
    sequence_parallel: Array
    async_tp: Array
    cp: Array
    ulysses: Array
    ep: Array
    pp: Array
    schedule: Array
    """Index into SCHEDULES."""
    stages_per_rank: Array
    micro_batch: Array
    num_micro_batches: Array
    """Of one data rank in one step: those of the pipeline, or of gradient accumulation."""
    precision: Array
    """Index into PRECISIONS."""
    param_dtype: Array
    """Index into PRECISIONS."""
    optimizer_8bit: Array
    recompute: Array
    """Index into RECOMPUTE."""
    recompute_share: Array
    """Part of the layers of each stage that recompute: 1 for "all"."""
    offload_activations: Array
    offload_optimizer: Array
    offload_params: Array
    compile: Array
    bucket_bytes: Array
    """Of DDP's gradient buckets."""

    def __len__(self) -> int:
        return max(np.size(column) for column in vars(self).values())

    def take(self, where: Array) -> "Points":
        """The points at these indices (or where this mask holds)."""
        columns = {
            name: column if np.size(column) == 1 else column[where]
            for name, column in vars(self).items()
        }
        return Points(**columns)

    @property
    def num_ranks(self) -> Array:
        """Product of the mesh axes."""
        return self.workers * self.ranks_of_a_worker

    @property
    def ranks_of_a_worker(self) -> Array:
        """Those that step together: all ranks but under local updates."""
        return self.dp * self.fsdp * self.cp * self.tp * self.pp

    @property
    def num_data_ranks(self) -> Array:
        """Ranks that get different samples."""
        return self.workers * self.dp * self.fsdp

    @property
    def num_stages(self) -> Array:
        """Stages that a micro-batch passes."""
        return num_stages(self.pp, self.schedule, self.stages_per_rank)

    @property
    def num_directions(self) -> Array:
        """Ends of a pipeline that micro-batches enter at."""
        return NUM_DIRECTIONS[self.schedule]

    @property
    def splits_backward(self) -> Array:
        """Whether the schedule splits backward passes: bool."""
        return SPLITS_BACKWARD[self.schedule]

    @property
    def value_bytes(self) -> Array:
        """Bytes of a number in forward and backward."""
        return ARITHMETIC_BYTES[self.precision]

    @property
    def param_bytes(self) -> Array:
        """Bytes of a stored parameter."""
        return ARITHMETIC_BYTES[self.param_dtype]

    @property
    def is_ddp(self) -> Array:
        """Whether replicas of the whole network are DDP's: dp without any other axis."""
        others = self.fsdp * self.tp * self.pp * self.cp * self.ep
        return (self.dp > 1) & (others == 1)

    @property
    def is_fsdp(self) -> Array:
        """Whether FSDP2 holds the parameters (`parallel.apply`): wherever there are data ranks and
        DDP, which takes whole networks, can't."""
        return (self.dp * self.fsdp * self.cp > 1) & ~self.is_ddp

    @property
    def frees_weights(self) -> Array:
        """Whether a stage's blocks free their weights behind each pass, so that a backward pass
        isn't split (parallel/pp/stage.py)."""
        return (self.pp > 1) & (self.zero == 3)

    @classmethod
    def of(cls, layouts: Sequence[Layout], setting: Setting) -> "Points":
        """The columns of layouts."""
        rows = [_row(layout, setting) for layout in layouts]
        table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        return cls.of_table(table, setting)

    @classmethod
    def of_table(cls, table: Mapping[str, Array], setting: Setting) -> "Points":
        """Some of a table's columns, in which dp counts all replicas."""
        one = np.ones_like(table["dp"])
        workers, dp = (table["dp"], one) if setting.updates_locally else (one, table["dp"])
        table = {**table, "workers": workers, "dp": dp}
        return cls(**{each.name: table[each.name] for each in fields(cls)})


def _row(layout: Layout, setting: Setting) -> dict[str, Any]:
    settings = settings_of(layout, setting.global_batch) | {
        "workers": 1,
        "optimizer_8bit": layout.optimizer_state == "8bit",
        "recompute_share": _recompute_share(layout, setting.model),
        "bucket_bytes": layout.bucket_mib * 2**20,
    }
    return {each.name: settings[each.name] for each in fields(Points)}


def _recompute_share(layout: Layout, model: Model) -> float:
    if layout.recompute == "none":
        return 0.0
    if layout.recompute_layers == "all":
        return 1.0
    stages = max(1, len(layout.split))
    return min(1.0, layout.recompute_layers * stages / model.num_layers)
