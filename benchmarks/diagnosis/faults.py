"""The faults: what is wrong, what is right instead, and what the first finding must be called.

Each is a function of a stream of random numbers, which draws the strength of the fault and the rank
that has it: rules can't know them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")
Settings = tuple[str, ...]
Injections = Mapping[str, Mapping[str, Any]]
MBIT = 1e6


@dataclass(frozen=True)
class Way:
    """One of two twins: what is done in this way only."""

    settings: Settings = ()
    """Of the Job, as for --set."""
    injections: Injections = field(default_factory=dict)
    rate_bits_per_s: float | None = None
    """Of every link between hosts."""


@dataclass(frozen=True)
class Fault:
    """A pair of runs that differ in one thing."""

    expected: tuple[str, ...]
    """Names that the first finding may have; empty for a healthy run, which has no twin."""
    wrong: Way
    right: Way
    settings: Settings = ()
    """Of both."""
    num_hosts: int = 1
    known_rate_bits_per_s: float | None = None
    """Of the links, as the Cluster file states it that both runs are given."""
    memory_bytes: float | None = None
    """Of a device, as the Cluster file states it; None: as it is."""
    is_in_every_step: bool = True
    """Else steps differ, and their mean counts instead of their median."""
    needs_bf16: bool = False
    """Whether it is none on a machine that has no products in bf16."""

    @property
    def num_ranks(self) -> int:
        """Product of the mesh axes that the settings name."""
        sizes = dict(text.split("=", 1) for text in self.settings + self.wrong.settings)
        ranks = 1
        for axis in ("dp", "fsdp", "tp", "pp", "cp"):
            ranks *= int(sizes.get(f"layout.{axis}", 1))
        return ranks


class Draw(Random):
    """Random numbers of a fault and a seed."""

    def __init__(self, fault: str, seed: int) -> None:
        super().__init__(f"{fault} {seed}")
        self._seed = seed

    def in_turn(self, options: Sequence[T]) -> T:
        """One of a few, another one at the next seed."""
        return options[self._seed % len(options)]


Make = Callable[[Draw], Fault]
_AS_IT_IS = Way()
_DP2 = ("layout.dp=2",)
_ACCUMULATING = (*_DP2, "layout.micro_batch=4", "train.global_batch=32")
_PP2 = ("layout.pp=2", "layout.schedule=1f1b", "model.num_layers=8", "layout.micro_batch=2")
_EXPERTS = (
    "model.experts={num_experts=8,experts_per_token=2,ffn_size=384}",
    "layout.dp=2",
    "layout.ep=2",
)


def _slow_rank(draw: Draw) -> Fault:
    slower = {
        "slow_blocks": {"rank": draw.randrange(2), "times": draw.randint(1, 3)},
        "sleepy_blocks": {"rank": draw.randrange(2), "seconds": draw.uniform(0.005, 0.02)},
    }
    name = draw.in_turn([*slower])
    return Fault(("straggler-rank",), Way(injections={name: slower[name]}), _AS_IT_IS, _DP2)


def _slow_link(draw: Draw) -> Fault:
    slow = Way(rate_bits_per_s=draw.uniform(200, 600) * MBIT)
    return Fault(("slow-link",), slow, _AS_IT_IS, _DP2, num_hosts=2)


def _slow_loader(draw: Draw) -> Fault:
    way = Way(injections={"slow_loader": {"seconds": draw.uniform(0.03, 0.15)}})
    return Fault(("loader-bound",), way, _AS_IT_IS, _DP2)


def _item_per_micro_batch(draw: Draw) -> Fault:
    read = {"metrics_of_every_micro_batch": {"num_metrics": draw.randint(30, 90)}}
    return Fault(("sync-points",), Way(injections=read), _AS_IT_IS, _ACCUMULATING)


def _missing_no_sync(draw: Draw) -> Fault:
    way = Way(injections={"reduce_every_micro_batch": {}})
    settings = (*_ACCUMULATING, f"train.global_batch={draw.in_turn((32, 64))}")
    return Fault(("reduce-every-micro-batch",), way, _AS_IT_IS, settings)


def _tiny_buckets(draw: Draw) -> Fault:
    deep = ("model.hidden_size=64", "model.ffn_size=192", "model.num_layers=24")
    short = ("train.seq_len=64", "train.global_batch=4", "layout.micro_batch=2")
    wrong = Way((f"layout.bucket_mib={draw.in_turn((0.005, 0.01, 0.02))}",))
    return Fault(
        ("buckets-too-small",), wrong, Way(("layout.bucket_mib=25",)), (*_DP2, *deep, *short)
    )


def _uneven_pipeline(draw: Draw) -> Fault:
    long = draw.in_turn((6, 7))
    split = draw.in_turn((f"[{long},{8 - long}]", f"[{8 - long},{long}]"))
    wrong, right = Way((f"layout.split={split}",)), Way(("layout.split=[4,4]",))
    return Fault(("uneven-stages",), wrong, right, _PP2)


def _few_micro_batches(draw: Draw) -> Fault:
    wrong = Way((f"layout.micro_batch={draw.in_turn((16, 8))}",))
    settings = (*_PP2[:2], "train.seq_len=256")
    return Fault(("few-micro-batches",), wrong, Way(("layout.micro_batch=2",)), settings)


def _shared_out(share: float) -> Way:
    """Untrained routers are uneven by themselves: whom tokens go to is dealt out."""
    return Way(injections={"shared_out": {"share": share}})


def _skewed_experts(draw: Draw) -> Fault:
    wrong, right = _shared_out(draw.uniform(0.5, 0.9)), _shared_out(0.0)
    return Fault(("expert-imbalance",), wrong, right, _EXPERTS)


def _checkpoint_stall(draw: Draw) -> Fault:
    injections = {"slow_disk": {"bytes_per_s": draw.uniform(30e6, 60e6)}}
    wrong = Way((f"checkpoint.every={draw.in_turn((2, 3))}",), injections)
    return Fault(("checkpoint-stall",), wrong, _AS_IT_IS, _DP2, is_in_every_step=False)


def _garbage_storm(draw: Draw) -> Fault:
    way = Way(injections={"collect_garbage": {"num_objects": draw.randint(1_000_000, 3_000_000)}})
    return Fault(("garbage-collection",), way, _AS_IT_IS, _DP2)


def _fp32(_draw: Draw) -> Fault:
    wrong, right = Way(("layout.precision=fp32",)), Way(("layout.precision=bf16",))
    return Fault(("fp32",), wrong, right, _DP2, needs_bf16=True)


def _needless_recompute(draw: Draw) -> Fault:
    wrong = Way((f"layout.recompute={draw.in_turn(('full', 'selective'))}",))
    return Fault(("recompute-not-needed",), wrong, _AS_IT_IS, _DP2)


def _needless_sharding(draw: Draw) -> Fault:
    wrong = Way(("layout.fsdp=2", "layout.dp=1", f"layout.zero={draw.in_turn((3, 2))}"))
    right = Way(("layout.fsdp=1", *_DP2))
    return Fault(("sharding-not-needed",), wrong, right, ("model.vocab_size=4096",))


def _small_kernels(draw: Draw) -> Fault:
    wrong, right = Way(("layout.micro_batch=1",)), Way(("layout.micro_batch=8",))
    length = f"train.seq_len={draw.in_turn((32, 64))}"
    return Fault(("small-kernels",), wrong, right, (*_DP2, length))


# ---- beyond the fifteen -------------------------------------------------------------------------


def _slow_loader_of_one(draw: Draw) -> Fault:
    loader = {"rank": draw.randrange(2), "seconds": draw.uniform(0.03, 0.15)}
    return Fault(("loader-bound",), Way(injections={"slow_loader": loader}), _AS_IT_IS, _DP2)


def _busy_neighbour(draw: Draw) -> Fault:
    rank = draw.randrange(2)
    alone = {"busy_neighbour": {"rank": rank, "core": rank, "num_burners": 0}}
    shared = {"busy_neighbour": {"rank": rank, "core": rank, "num_burners": 1}}
    return Fault(("straggler-rank",), Way(injections=shared), Way(injections=alone), _DP2)


def _busy_machine(_draw: Draw) -> Fault:
    return Fault(("cores-taken",), Way(injections={"busy_machine": {}}), _AS_IT_IS, _DP2)


def _anomaly_detection(_draw: Draw) -> Fault:
    return Fault(("checking-left-on",), Way(injections={"detect_anomaly": {}}), _AS_IT_IS, _DP2)


def _slow_stage(draw: Draw) -> Fault:
    way = Way(injections={"slow_blocks": {"rank": draw.randrange(2), "times": draw.randint(1, 3)}})
    return Fault(("straggler-rank",), way, _AS_IT_IS, _PP2)


def _evaluation(draw: Draw) -> Fault:
    wrong = Way((f"train.eval_every={draw.in_turn((1, 2))}", "train.eval_batches=2"))
    return Fault(("evaluation-stall",), wrong, _AS_IT_IS, _DP2, is_in_every_step=False)


def _slow_log(draw: Draw) -> Fault:
    way = Way(injections={"slow_log": {"seconds": draw.uniform(0.03, 0.15)}})
    return Fault(("logging-stall",), way, _AS_IT_IS, _DP2)


def _many_threads(draw: Draw) -> Fault:
    way = Way(injections={"more_threads": {"num_threads": draw.in_turn((4, 8))}})
    return Fault(("thread-oversubscription",), way, _AS_IT_IS, _DP2)


def _python_work(draw: Draw) -> Fault:
    way = Way(injections={"python_work": {"seconds": draw.uniform(0.02, 0.06)}})
    return Fault(("host-bound",), way, _AS_IT_IS, _DP2)


def _uneven_lengths(draw: Draw) -> Fault:
    seed = draw.randrange(1000)
    uneven = {"uneven_lengths": {"shortest": 32, "longest": 224, "seed": seed}}
    even = {"uneven_lengths": {"shortest": 128, "longest": 128, "seed": seed}}
    settings = (*_DP2, "train.seq_len=224")
    return Fault(
        ("length-imbalance",), Way(injections=uneven), Way(injections=even), settings,
        is_in_every_step=False,
    )  # fmt: skip


def _one_bucket(draw: Draw) -> Fault:
    rate = draw.in_turn((200, 1000)) * MBIT
    wrong, right = (
        Way(("layout.bucket_mib=1000",), {}, rate),
        Way(("layout.bucket_mib=4",), {}, rate),
    )
    expected = ("buckets-too-large", "no-overlap")
    return Fault(expected, wrong, right, _DP2, num_hosts=2, known_rate_bits_per_s=rate)


def _compression_missing(_draw: Draw) -> Fault:
    rate = 200 * MBIT
    wrong, right = Way((), {}, rate), Way(("comm.dp.compress=int8",), {}, rate)
    expected = ("compression-missing",)
    return Fault(expected, wrong, right, _DP2, num_hosts=2, known_rate_bits_per_s=rate)


def _tp_across_hosts(_draw: Draw) -> Fault:
    rate = 1000 * MBIT
    wrong = Way(("layout.dp=1", "layout.tp=2"), {}, rate)
    right = Way(("layout.tp=1", *_DP2), {}, rate)
    expected = ("tp-across-nodes",)
    return Fault(expected, wrong, right, num_hosts=2, known_rate_bits_per_s=rate)


# ---- nothing is wrong --------------------------------------------------------------------------


def _healthy(*settings: str, way: Way = _AS_IT_IS, memory_bytes: float | None = None) -> Make:
    return lambda _draw: Fault((), way, way, settings, memory_bytes=memory_bytes)


LISTED: dict[str, Make] = {
    "slow rank": _slow_rank,
    "slow link": _slow_link,
    "slow loader": _slow_loader,
    ".item() per micro-batch": _item_per_micro_batch,
    "missing no_sync": _missing_no_sync,
    "tiny buckets": _tiny_buckets,
    "uneven pipeline": _uneven_pipeline,
    "too few micro-batches": _few_micro_batches,
    "skewed experts": _skewed_experts,
    "checkpoint stall": _checkpoint_stall,
    "garbage collection storm": _garbage_storm,
    "fp32": _fp32,
    "needless recompute": _needless_recompute,
    "needless sharding": _needless_sharding,
    "small kernels": _small_kernels,
}
MORE: dict[str, Make] = {
    "slow loader of one rank": _slow_loader_of_one,
    "busy neighbour": _busy_neighbour,
    "busy machine": _busy_machine,
    "anomaly detection": _anomaly_detection,
    "slow pipeline stage": _slow_stage,
    "evaluation too often": _evaluation,
    "slow log": _slow_log,
    "too many threads": _many_threads,
    "Python work": _python_work,
    "uneven lengths": _uneven_lengths,
    "one bucket": _one_bucket,
    "compression missing": _compression_missing,
    "tp across hosts": _tp_across_hosts,
}
HEALTHY: dict[str, Make] = {
    "healthy, one rank": _healthy("train.global_batch=8"),
    "healthy, dp 2": _healthy(*_DP2),
    # Replicas of all of it would need 136 MB.
    "healthy, fsdp 2": _healthy("layout.fsdp=2", "layout.zero=1", memory_bytes=115e6),
    "healthy, pp 2": _healthy(*_PP2),
    "healthy, ep 2": _healthy(*_EXPERTS, way=_shared_out(0.0)),
    "healthy, tp 2": _healthy("layout.tp=2"),
}
FAULTS = LISTED | MORE | HEALTHY


def fault_of(name: str, seed: int) -> Fault:
    """The fault of this name that a seed draws."""
    return FAULTS[name](Draw(name, seed))
