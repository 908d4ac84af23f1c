"""Layout: how a model sits on a cluster.

The mesh axes, from the outermost to the innermost (ranks that are neighbours along an inner axis
are neighbours in rank order, hence on one host):

- `pp` cuts the layers into stages,
- `dp` replicates the model, `fsdp` shards parameters, gradients and optimizer state,
- `cp` shares out the tokens of a sequence, `tp` the heads and columns of each layer.

Their product is the number of ranks. `ep` is no further factor: it shares out the experts over
ranks of the data axes (dp, fsdp, cp), from the innermost.

A person writes a `LayoutSpec`, with "auto" (or nothing) where they have no wish. `plan` makes a
`Layout` of it: the same settings, each decided. What can't run is refused (`config.feasible`)
before any process starts.
"""

from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field

from paceline.config.frozen import Auto, Count, CountOrNone, FrozenConfig, Ways

Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]
ParamDtype = Literal["fp64", "fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]
Kernels = Literal["auto", "reference", "triton"]
ScheduleName = Literal[
    "none",
    "gpipe",
    "1f1b",
    "interleaved",
    "zb_h1",
    "interleaved_zb",
    "zbv",
    "dualpipev",
    "dualpipe",
]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
Zero = Literal[0, 1, 2, 3]
Counts = Annotated[tuple[Count, ...], Field(strict=False)]
Mib = Annotated[float, Field(gt=0, le=2**20)]


class MeshCoordinates(NamedTuple):
    """Where a rank sits on the mesh: its index along each axis."""

    pp: int
    dp: int
    fsdp: int
    cp: int
    tp: int


class LayoutSpec(FrozenConfig):
    """How the work of a step is split over the ranks, and in which precision it is done."""

    dp: Auto | Ways = "auto"
    """Number of replicas of the model (DDP; with fsdp > 1, replicas of sharded groups)."""
    fsdp: Auto | Ways = "auto"
    """Number of ranks over which parameters, gradients and optimizer state are sharded (FSDP2)."""
    tp: Auto | Ways = "auto"
    """Number of ranks that share the heads and columns of every layer (tensor parallel)."""
    pp: Auto | Ways = "auto"
    """Number of ranks that the layers are pipelined over."""
    cp: Auto | Ways = "auto"
    """Number of ranks that share the tokens of every sequence (context parallel)."""
    ep: Auto | Ways = "auto"
    """Number of ranks, of those of dp, fsdp and cp, that share the experts of every layer."""

    zero: Auto | Zero = "auto"
    """What fsdp > 1 keeps sharded: 1 optimizer state, 2 gradients too, 3 parameters too."""
    sequence_parallel: Auto | bool = "auto"
    """With tp: share out the tokens between the layers' products too (norms, residuals)."""
    async_tp: bool = False
    """With tp on CUDA, compiled: overlap its collectives with the products they feed."""
    ulysses: Auto | Ways = "auto"
    """Ranks of cp that exchange heads for tokens; cp / ulysses ranks pass keys in a ring."""

    schedule: Auto | ScheduleName = "auto"
    """Order of a pipeline's work; "none" without pp."""
    stages_per_rank: Auto | Ways = "auto"
    """Stages each pipeline rank holds: free for the interleaved schedules, 1 or 2 for others."""
    split: Auto | Counts = "auto"
    """Layers of each pipeline stage, first to last; none without pp."""

    micro_batch: Auto | Count = "auto"
    """Samples that one rank puts through the model at once; the rest is gradient accumulation."""
    precision: Auto | Precision = "auto"
    """Arithmetic of forward and backward: fp16 adds loss scaling, fp8 is that of the products."""
    param_dtype: ParamDtype = "fp32"
    """Type of the stored parameters; with bf16 the optimizer keeps an fp32 master copy."""
    optimizer_state: Literal["full", "8bit"] = "full"
    """Adam's moments: as precise as the parameters (fp32 at least), or 8 bits in blocks."""
    recompute: Auto | Recompute = "auto"
    """Activation checkpointing: keep all, recompute all but matrix products, recompute blocks."""
    recompute_layers: Literal["all"] | Count = "all"
    """How many layers of each stage recompute, the first ones first."""
    offload: Annotated[
        tuple[Literal["activations", "optimizer", "params"], ...], Field(strict=False)
    ] = ()
    """What waits in host memory until it is needed; params takes the optimizer along."""
    compile: Auto | bool = "auto"
    """Whether each block goes through torch.compile."""
    kernels: Kernels = "auto"
    """Plain torch, or fused Triton kernels (CUDA). "auto" stays so in a concrete layout: each
    operator takes its kernel where it was measured to be faster on the rank's own device."""
    bucket_mib: Auto | Mib = "auto"
    """Size of DDP's gradient buckets, MiB: each is reduced as soon as its gradients are there."""
    sync_batch_norm: bool = False
    """Let batch norms train by the statistics of all data ranks' micro-batches together, as one
    rank with all of them would; else by each rank's own. Running statistics are averaged anyway."""
    rebalance_every: CountOrNone = 0
    """With ep: steps between moves of experts to even out the load of the ranks; 0: never."""

    @property
    def undecided(self) -> list[str]:
        """Settings that a plan still has to decide."""
        return [name for name, value in vars(self).items() if name != "kernels" and value == "auto"]


class Layout(LayoutSpec):
    """A concrete layout: the settings of LayoutSpec, each decided; by default those of one rank."""

    dp: Ways = 1
    fsdp: Ways = 1
    tp: Ways = 1
    pp: Ways = 1
    cp: Ways = 1
    ep: Ways = 1
    zero: Zero = 0
    sequence_parallel: bool = False
    ulysses: Ways = 1
    schedule: ScheduleName = "none"
    stages_per_rank: Ways = 1
    split: Counts = ()
    micro_batch: Count = 1
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    compile: bool = False
    bucket_mib: Mib = 25.0

    @property
    def num_ranks(self) -> int:
        """Product of the mesh axes."""
        return self.num_data_ranks * self.pp * self.cp * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Ranks that get different samples: those of dp and fsdp."""
        return self.dp * self.fsdp

    @property
    def scatters_each(self) -> bool:
        """Whether shards of gradients are exchanged in every micro-batch, where sums are exact."""
        return self.zero >= 2 and self.ep == self.pp == 1

    @property
    def is_plain(self) -> bool:
        """Whether it has no axes but dp and fsdp, which take any module."""
        return all(axis == 1 for axis in (self.tp, self.pp, self.cp, self.ep))

    @property
    def summary(self) -> str:
        """The axes in use, as people say it: "pp 4 (1f1b) x fsdp 8 x tp 2"."""
        notes = {"pp": self.schedule, "fsdp": f"zero {self.zero}"}
        used = [
            f"{axis} {getattr(self, axis)}" + (f" ({notes[axis]})" if axis in notes else "")
            for axis in ("pp", "dp", "fsdp", "cp", "tp", "ep")
            if getattr(self, axis) != 1
        ]
        return " x ".join(used) or "one rank"

    def place(self, rank: int) -> MeshCoordinates:
        """Where a rank sits: tp is the innermost axis, pp the outermost."""
        index = []
        for axis in (self.tp, self.cp, self.fsdp, self.dp, self.pp):
            rank, at = divmod(rank, axis)
            index.append(at)
        return MeshCoordinates(*reversed(index))

    def data_rank(self, rank: int) -> int:
        """Which share of the samples a rank works on, of num_data_ranks."""
        place = self.place(rank)
        return place.dp * self.fsdp + place.fsdp
