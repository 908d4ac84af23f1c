"""Comm: what a run sends over each axis, in which form, and how often.

The default sends everything, exactly, at every step. Whatever is lossy (compression, local updates)
a person asks for, by name or as "auto", which asks the planner whether it pays on this cluster's
links: often it does not (6 of more than 200 set-ups of https://arxiv.org/abs/2103.00543).
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from paceline.config.frozen import Auto, Count, CountOrNone, FrozenConfig, Ways

CODECS = ("none", "fp16", "bf16", "int8", "fp8", "int4", "quinary", "onebit", "topk", "powersgd")
BLOCK = 256
"""Values that share a scale in the codecs int8, fp8, int4, quinary and onebit."""


class Codec(NamedTuple):
    """A compression by name, with its argument where it has one."""

    kind: str
    """One of CODECS."""
    argument: float = 0.0
    """topk: the share of values that are sent. powersgd: the rank."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.argument:g}" if self.argument else self.kind


def codec(text: str) -> Codec:
    """Read "int8", "topk:0.01", "powersgd:4".

    Raises:
        ValueError: one clause with what is required.
    """
    kind, _, argument = text.partition(":")
    if kind not in CODECS:
        raise ValueError(f'{text!r} is no compression: use "auto" or one of {", ".join(CODECS)}.')
    if kind == "topk":
        if not re.fullmatch(r"0?\.\d+", argument) or float(argument) == 0:
            raise ValueError(f'{text!r} needs the share of values to send: "topk:0.01".')
    elif kind == "powersgd":
        if not re.fullmatch(r"[1-9]\d*", argument):
            raise ValueError(f'{text!r} needs the rank of the approximation: "powersgd:4".')
    elif argument:
        raise ValueError(f'{text!r}: {kind} takes no argument, write "{kind}".')
    return Codec(kind, float(argument or 0))


# Bits of a value without its share of the block's scale, 32 bits for BLOCK values.
_BITS = {
    "fp16": 16, "bf16": 16, "int8": 8, "fp8": 8, "int4": 4, "quinary": 8 * 77 / BLOCK, "onebit": 1,
}  # fmt: skip
_SCALE_BITS = 32


def coded_bits(codec: Codec) -> float:
    """Bits of a value in the payload of a codec, which isn't "none" or "powersgd".

    topk: bf16 values, 8 or 16 low bits of each position, the high ones in unary.
    """
    if codec.kind == "topk":
        low_bits = 8 if codec.argument * 2048 >= 1 else 16
        return codec.argument * (16 + low_bits + 1) + 2**-low_bits
    has_scale = codec.kind not in ("fp16", "bf16")
    return _BITS[codec.kind] + (_SCALE_BITS / BLOCK if has_scale else 0)


def _checked(text: str) -> str:
    if text != "auto":
        codec(text)
    return text


def _only(*kinds: str) -> AfterValidator:
    def check(text: str) -> str:
        if text != "auto" and codec(text).kind not in kinds:
            raise ValueError(f"{text!r} can't be used here: use one of {', '.join(kinds)}.")
        return text

    return AfterValidator(check)


Compress = Annotated[str, AfterValidator(_checked)]
_BLOCKWISE = _only("none", "fp16", "bf16", "int8", "fp8", "int4", "onebit")
BlockCompress = Annotated[str, AfterValidator(_checked), _BLOCKWISE]
Algorithm = Literal[
    "backend", "ring", "pairwise", "halving_doubling", "tree", "hierarchical", "one_shot"
]
"""See `paceline.comm.algorithms`."""


class DpComm(FrozenConfig):
    """Gradients over the replicas: DDP's buckets, or the replicate axis of HSDP."""

    compress: Compress = "none"
    """In what form gradients travel, with error feedback; "auto": whatever is fastest, of few bits
    only in runs of 300 steps or more, and then after 30 exact ones (`comm.warmup_steps`)."""
    algorithm: Auto | Algorithm = "auto"
    """Who sums up what isn't compressed: the backend's all-reduce, or one of ours."""


class FsdpComm(FrozenConfig):
    """Shards: the reduction of gradients and the gathering of parameters."""

    compress: BlockCompress = "none"
    """In what form gradients are reduced and scattered, with error feedback: nearly 4 bytes per
    parameter on every rank; "auto" as for dp, and only where that fits. With algorithm =
    "hierarchical" only between nodes: inside them gradients are added up exactly."""
    compress_weights: Annotated[
        str, AfterValidator(_checked), _only("none", "bf16", "fp16", "int8", "fp8", "int4")
    ] = "none"
    """In what form parameters are gathered: rounded stochastically, the shards stay exact."""
    algorithm: (
        Auto
        | Literal["backend", "ring", "pairwise", "halving_doubling", "hierarchical", "one_shot"]
    ) = "auto"
    """Who scatters gradients and gathers parameters: the backend (gloo's reduce-scatter sends twice
    the bytes), or one of ours."""


class PpComm(FrozenConfig):
    """Activations and their gradients between pipeline stages."""

    compress: BlockCompress = "none"
    """In what form they travel, rounded to the nearest, without error feedback."""


class EpComm(FrozenConfig):
    """Tokens on their way to the experts and back."""

    compress: BlockCompress = "none"
    """In what form they and their gradients travel, rounded to the nearest, without error
    feedback."""
    hot_experts: CountOrNone = 0
    """Up to so many experts of each layer, the hot ones, that every rank gets a copy of while the
    layer computes: their tokens stay where they are. As many as even out the ranks' loads best."""
    hot_every: Count = 10
    """Steps between choices of these, by the tokens that experts got since the last one."""


class EmbeddingComm(FrozenConfig):
    """Rows of a recommender's tables: who holds them, and how fresh they have to be."""

    by: Literal["all_to_all", "server"] = "all_to_all"
    """all_to_all: each rank holds whole tables, and rows travel by collectives. server: processes
    beside the ranks hold rows by a consistent hash, pulled and pushed by the ranks."""
    servers: Ways = 2
    """Server processes, spread over the nodes."""
    mode: Literal["synchronous", "stale", "asynchronous"] = "synchronous"
    """synchronous: a pull sees the updates of all earlier steps, no later ones. stale: of all steps
    but the last `staleness` ones (stale synchronous parallel, Ho et al., NIPS 2013).
    asynchronous: whatever has arrived."""
    staleness: Count = 2
    """Steps by which rows may lag (stale), or that a cached row lives (asynchronous)."""
    cache_rows: CountOrNone = 0
    """Rows that a worker keeps, the hot ones, within the staleness."""
    checkpoint_every: Count = 100
    """Steps between the servers' own checkpoints: what a killed server loses at most."""


class LocalUpdates(FrozenConfig):
    """Steps that replicas do each for itself between rounds (over dp; the layout's other axes go on
    as they are)."""

    method: Literal["none", "local_sgd", "diloco", "streaming"] = "none"
    """local_sgd averages parameters (https://arxiv.org/abs/1805.09767); diloco steps an outer
    optimizer on the mean of what replicas changed (https://arxiv.org/abs/2311.08105); streaming
    does so fragment by fragment, beside the computation (https://arxiv.org/abs/2501.18512)."""
    every: Auto | Count = 50
    """Steps between two rounds (of the same fragment); "auto": as few as leave 95 % of the time to
    computing on the cluster's links, 10 to 500."""
    outer_lr: float = Field(0.7, gt=0, le=1e3)
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """Nesterov's, of the outer optimizer; 0.6 with outer_lr 0.9 ends better where diloco has a few
    dozen rounds instead of hundreds (benchmarks/local_updates.py)."""
    fragments: Ways = 1
    """Parts that streaming exchanges one after another."""
    overlap_steps: Auto | CountOrNone = 0
    """Steps that streaming computes while a fragment is on its way; "auto": as few as that takes, 5
    at most."""
    compress: BlockCompress = "none"
    """In what form outer gradients travel; "auto": none, int8 or int4, the first that needs no more
    steps between rounds than are set, or 50."""

    @property
    def is_open(self) -> bool:
        """Whether the planner has something of it to choose."""
        return "auto" in (self.every, self.overlap_steps, self.compress)

    @property
    def round_steps(self) -> int:
        """Steps between two rounds; where that is open as many as without a wish."""
        return 50 if self.every == "auto" else self.every

    @property
    def late_steps(self) -> int:
        """Steps that a fragment may be on its way; where that is open none."""
        return 0 if self.overlap_steps == "auto" else self.overlap_steps

    @property
    def settled(self) -> "LocalUpdates":
        """With these, and exact rounds, where something is open."""
        compress = "none" if self.compress == "auto" else self.compress
        return self.replace(
            every=self.round_steps, overlap_steps=self.late_steps, compress=compress
        )

    @model_validator(mode="before")
    @classmethod
    def _without_min_workers(cls, raw: Any) -> Any:
        """The job.toml of each earlier Run has it, mostly as 0, which says nothing."""
        if not isinstance(raw, Mapping) or "min_workers" not in raw:
            return raw
        if raw["min_workers"] != 0:
            raise ValueError(
                "min_workers is gone: let elastic.min_nodes say on how many nodes the run goes on."
            )
        return {name: value for name, value in raw.items() if name != "min_workers"}


class Comm(FrozenConfig):
    """Communication of a run, axis by axis."""

    dp: DpComm = DpComm()
    fsdp: FsdpComm = FsdpComm()
    pp: PpComm = PpComm()
    ep: EpComm = EpComm()
    embeddings: EmbeddingComm = EmbeddingComm()
    local: LocalUpdates = LocalUpdates()
    warmup_steps: CountOrNone = 0
    """First steps of a run that send gradients exactly, whatever is set above."""
    compress_from: Count = 1024
    """Tensors with fewer values than this are always sent exactly (norms, biases)."""
    priority: Literal["normal", "high"] = "normal"
    """high: on GPUs, NCCL's kernels and those of compression are scheduled before the network's."""
    timeout_s: float = Field(1800, gt=0, le=1e7)
    """How long a rank waits for another one before it ends the run and says whom it lost."""

    @property
    def effectless(self) -> dict[str, int]:
        """What is set of how forms are used, where nothing travels in one; and its default."""
        gradients = {self.dp.compress, self.fsdp.compress}
        others = (self.pp.compress, self.ep.compress, self.local.compress)
        all_forms = gradients | {self.fsdp.compress_weights, *others}
        unused = {"warmup_steps": (0, gradients), "compress_from": (1024, all_forms)}
        return {
            name: default
            for name, (default, forms) in unused.items()
            if getattr(self, name) != default and forms == {"none"}
        }

    @property
    def settled(self) -> "Comm":
        """Without these."""
        return self.replace(**self.effectless) if self.effectless else self
