"""For each rule a Subject of which it speaks, and near twins of which it must not.

The twins are what other frameworks and other jobs leave: another device, a serving engine, graphs,
warm-up, one rank of many, two networks trained in turn, a loader instead of a failing device.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.elastic import Elastic
from paceline.config.job_sections import Checkpoint
from paceline.config.layers import Experts
from paceline.explain.subject import Subject
from paceline.observe import caveats
from paceline.observe.caveats import TraceDevice
from paceline.observe.run import json_lines
from paceline.observe.tables.gaps import BETWEEN_KERNELS
from tests.explain.accounts import H100, MODEL, V100, account, job, line, subject
from tests.observe.interrupted import Simulated, simulated
from tests.plan.planned import cluster, tiers

Make = Callable[[Path], Subject]
"""Of a folder in which the Subject may leave files."""


@dataclass(frozen=True)
class Case:
    """When a rule speaks, and when it is silent though much is alike."""

    speaks: Make
    silent: Mapping[str, Make] = field(default_factory=dict)
    """By what is different."""


WORK = {"matmul": 60.0, "other_kernels": 20.0, "optimizer": 10.0, "host_gap": 5.0}
DP = {**WORK, "exposed_comm.dp": 40.0}
IDLE = {"matmul": 40.0, "host_gap": 60.0}
BUCKET = {"name": "all_reduce", "axis": "dp", "group_size": 2, "members": "[0, 1]"}
TURING = TraceDevice("Tesla T4", (7, 5), 15_800_000_000, is_amd=False)
MI100 = TraceDevice("AMD Instinct MI100", (9, 0), 34_000_000_000, is_amd=True)
MANY_CORES = {"num_cores": 64}


def of(made: Any = None, one: Any = None, **more: Any) -> Make:
    return lambda _folder: subject(made, one, **more)


def on_device(terms: Mapping[str, float] = IDLE, **more: Any) -> Make:
    return of(account([terms], is_device=True, **more))


def gap(name: str, ms: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "duration_ms": ms, **more}


def kernel(name: str, term: str, ms: float, op: str = "aten::x", **more: Any) -> dict[str, Any]:
    return {"name": name, "op": op, "term": term, "total_ms": ms, **more}


def lines(step_ms: float = 100, **more: Any) -> list[dict[str, Any]]:
    return [line(step, step_ms, **more) for step in range(1, 21)]


def with_files(made: Any, **files: Any) -> Make:
    def make(folder: Path) -> Subject:
        for name, text in files.items():
            file = folder / name.replace("__", "/").replace("_", ".", 1)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text if isinstance(text, str) else json.dumps(text))
        return subject(made, folder=folder)

    return make


# ---- ranks ---------------------------------------------------------------------------------------

SLOW, FAST = {**WORK, "matmul": 80.0}, {**WORK, "straggler_wait": 20.0}
MEETING = [{**BUCKET, "bytes": 8 << 20, "duration_ms": 5, "exposed_ms": 0, "times": 4}]


def slow_rank(**more: Any) -> Make:
    given = {"collectives": MEETING, **more}
    return of(account([FAST, SLOW], is_device=True, **given))


_SAME = [kernel("gemm", "matmul", 60, rank=rank, count=100) for rank in (0, 1)]
_MORE = [kernel("gemm", "matmul", 60, rank=rank, count=100 + 30 * rank) for rank in (0, 1)]
_LATE_LOADER = [{**WORK, "straggler_wait": 30.0}, {**WORK, "data_wait": 30.0}]
_HOP = {"name": "send", "axis": "pp", "bytes": 1 << 20, "duration_ms": 1}
_APART = [{**BUCKET, "bytes": 8 << 20, "duration_ms": 5, "rank": r, "members": f"[{r}, {r + 2}]"}
          for r in (0, 1)]  # fmt: skip
_EXPERTS = MODEL.replace(experts=Experts(num_experts=8, experts_per_token=2, ffn_size=384))
_UNEVEN = [[SLOW, FAST, SLOW, FAST], [FAST, SLOW, FAST, SLOW]]
_TOKENS = [{"name": "all_to_all", "axis": "ep", "duration_ms": 0, "rank": rank, "bytes": sent}
           for rank, sent in ((0, 2_000_000), (1, 3_000_000))]  # fmt: skip
_EVEN_TOKENS = [{**each, "bytes": 2_000_000} for each in _TOKENS]

# ---- exchanges -----------------------------------------------------------------------------------


def exchanging(*collectives: Mapping[str, Any], ranks: int = 2, **more: Any) -> Make:
    facts = more.pop("facts", MANY_CORES)
    made = account([DP] * ranks, collectives=collectives, **more)
    return of(made, facts=facts)


_EACH = [{**BUCKET, "bytes": 8 << 20, "duration_ms": 10, "micro_batch": at} for at in range(1, 5)]
_TWO_NETWORKS = [
    {**BUCKET, "bytes": size, "duration_ms": 10, "micro_batch": at}
    for at, size in ((1, 8 << 20), (2, 9 << 20))
]
_FORWARD = [{**each, "in_backward": False} for each in _EACH]
_SHIFTED = [{**BUCKET, "bytes": 8 << 20, "duration_ms": 10, "micro_batch": at, "step": 9 + at}
            for at in (1, 2, 3)]  # fmt: skip
_TINY = {**BUCKET, "bytes": 10_000, "duration_ms": 0.5, "times": 80, "micro_batch": 1}
_NUMBER = {**BUCKET, "bytes": 24, "duration_ms": 0.45}
_WHOLE = {**BUCKET, "bytes": 32 << 20, "duration_ms": 40, "micro_batch": 1}
_LATE = {**BUCKET, "bytes": 4 << 20, "duration_ms": 5, "times": 8, "micro_batch": 1}
_HIDDEN = {**_LATE, "exposed_ms": 0.2}
_SLOW_LINK = {**BUCKET, "bytes": 4_500_000, "duration_ms": 40, "micro_batch": 1}
_AGREE = {**BUCKET, "bytes": 8, "duration_ms": 2, "times": 9}
_GATHERS = [{"name": "all_gather", "axis": "fsdp", "bytes": 1 << 22, "duration_ms": 5,
             "micro_batch": at} for at in range(4)]  # fmt: skip


def _two_nodes() -> Any:
    two = cluster(nodes=1).replace(devices_per_node=1, num_nodes=2, tiers=tiers(1e11, 6e7)[1:])
    return two.replace(tiers=(two.tiers[0].replace(num_devices=2),))


def _slow_cluster() -> Any:
    slow = cluster(nodes=1).replace(devices_per_node=1, num_nodes=2, tiers=tiers(1e11, 1.2e7)[1:])
    return slow.replace(tiers=(slow.tiers[0].replace(num_devices=2),))


_OVER_SLOW = [
    {**BUCKET, "bytes": 4 << 20, "times": 8, "micro_batch": 1, "duration_ms": 380,
     "exposed_ms": 370},
    {**BUCKET, "bytes": 8, "duration_ms": 0.1, "times": 2},
]  # fmt: skip
_WAITS = [{"matmul": 60.0, "exposed_comm.dp": 3000.0}] * 2
_SENT = account(_WAITS, collectives=_OVER_SLOW, is_device=True)
_BY_TP = account([{"matmul": 60.0, "exposed_comm.tp": 400.0}] * 2)

# ---- kernels -------------------------------------------------------------------------------------

_FP32 = kernel("ampere_sgemm_128x64_nn", "matmul", 60)
_SOFTMAX = kernel("softmax_warp_forward<float>", "other_kernels", 10)
_BMM = kernel("cutlass_80_tensorop_f16_s16816gemm", "matmul", 10, "aten::bmm", count=2)
_LOSS = kernel("cunn_SoftMaxForward", "other_kernels", 10, "aten::_log_softmax")
_PLAIN = kernel("vectorized_elementwise_kernel<4, silu>", "other_kernels", 20)
_INDUCTOR = kernel("triton_poi_fused_add_native_layer_norm_3", "other_kernels", 20)
_SHORT = [kernel("elementwise", "other_kernels", 5, count=2000)]
_PAGEABLE = kernel("Memcpy HtoD (Pageable -> Device)", "other_kernels", 4, count=2)
_PINNED = kernel("Memcpy HtoD (Pinned -> Device)", "other_kernels", 4, count=2)
_REPLAY = [gap("cudaGraphLaunch", 1)]


def wide(name: str, device: TraceDevice | None) -> Make:
    return on_device(WORK, kernels=[kernel(name, "matmul", 60)], device=device)


def attention(name: str) -> Make:
    return on_device(WORK, kernels=[_SOFTMAX, _BMM, kernel(name, "attention", 10)])


_TIGHT = job(2, recompute="full")
_SMALL = _TIGHT.cluster.device
_SMALL = _SMALL.replace(memory_bytes=_SMALL.memory_bytes.replace(value=5e7))  # type: ignore[union-attr]
_SMALL_CLUSTER = _TIGHT.cluster.replace(device=_SMALL)
_AGAIN = account([{**WORK, "recompute": 20.0}] * 2)
_GATHERED = account([{**WORK, "exposed_comm.fsdp": 60.0}] * 2)
_PIPE = {"dp": 1, "pp": 2, "schedule": "1f1b", "micro_batch": 2}
_UNEVEN_STAGES = account([{"matmul": 120.0}, {"matmul": 40.0, "bubble": 80.0}])
_HALVES = account([{"matmul": 80.0, "bubble": 26.0}] * 2)

# ---- the host ------------------------------------------------------------------------------------

_SYNC = {"name": "cudaStreamSynchronize", "duration_ms": 4, "times": 16, "at_ms": 2}
_ITEM = gap("aten::item", 2, times=16, at_ms=5)
_COMPILES = gap("_compile.compile_inner (dynamo_timed)", 9)
_MALLOC = gap("cudaMalloc", 3, times=2)
_LOADS = gap("cuModuleLoadData", 40, step=10)


def _evaluating(every: int, eval_s: float, steps: int = 160) -> Make:
    made = job(2)
    made = made.replace(train=made.train.replace(eval_every=every, steps=steps))
    return of(None, made, lines=lines(eval_s=eval_s, between_s=eval_s))


def interrupted_run(made: Simulated, every: int = 0, **elastic: Any) -> Make:
    """A run of nodes that were lost, with a wish for elasticity, and for checkpoints."""

    def make(folder: Path) -> Subject:
        (folder / "events.jsonl").write_text(json_lines(made.events))
        asked = job(2).replace(
            elastic=Elastic(min_nodes=1, **elastic), checkpoint=Checkpoint(every=every)
        )
        return subject(None, asked, lines=made.lines, folder=folder)

    return make


def _undisturbed() -> Simulated:
    made = Simulated()
    made.claim(["n0", "n1"], 2, "start")
    made.recover("start", 0)
    made.train(20)
    return made


_FEW_CORES = {"num_cores": 2, "threads_per_rank": 1, "num_ranks": 2}
_LOG = "Channel 00 : 0 -> 8 via NET/Socket/0\n"

CASES: Mapping[str, Case] = {
    "straggler-rank": Case(
        slow_rank(kernels=_SAME),
        {
            "its loader is slow": of(account(_LATE_LOADER, collectives=MEETING)),
            "two jobs": slow_rank(collectives=_APART),
            "no collectives": slow_rank(collectives=()),
            "stages of a pipeline": slow_rank(collectives=[*MEETING, _HOP]),
            "it has more to do": slow_rank(kernels=_MORE),
            "graphs without kernels": slow_rank(caveats=[caveats.GRAPH_KERNELS_MISSING]),
        },
    ),
    "length-imbalance": Case(
        of(account(_UNEVEN, collectives=MEETING)),
        {
            "two jobs": of(account(_UNEVEN, collectives=_APART)),
            "stages of a pipeline": of(account(_UNEVEN, collectives=[*MEETING, _HOP])),
            "always the same": of(account([FAST, SLOW], collectives=MEETING)),
        },
    ),
    "expert-imbalance": Case(
        of(account([FAST, SLOW], collectives=_TOKENS), job(2, model=_EXPERTS, ep=2)),
        {"even": of(account([FAST, SLOW], collectives=_EVEN_TOKENS),
                    job(2, model=_EXPERTS, ep=2))},
    ),
    "slow-link": Case(
        exchanging(_SLOW_LINK),
        {
            "one rank of two": exchanging(_SLOW_LINK, ranks=1),
            "it waits for a rank": exchanging({**_SLOW_LINK, "wait_ms": 34}),
            "nothing marks steps": exchanging(_SLOW_LINK, caveats=[caveats.NO_STEPS]),
            "a GPU's": exchanging(_SLOW_LINK, is_device=True),
        },
    ),
    "wrong-fabric": Case(
        with_files(account([DP] * 2, collectives=[_SLOW_LINK]),
                   log__rank0_log="NCCL INFO mlx5_0 is there\n" + _LOG),
        {"sockets are all there is": with_files(
            account([DP] * 2, collectives=[_SLOW_LINK]), log__rank0_log=_LOG)},
    ),
    "loader-bound": Case(
        on_device({**WORK, "data_wait": 30.0}),
        {"others hide it": of(account([{**WORK, "matmul": 100.0},
                                       {**WORK, "data_wait": 30.0, "straggler_wait": 10.0}]))},
    ),
    "host-bound": Case(
        on_device(gaps=[gap("aten::mm", 30)]),
        {
            "graphs without kernels": on_device(gaps=[gap("aten::mm", 30)],
                                                caveats=[caveats.GRAPH_KERNELS_MISSING]),
            "no kernels recorded": on_device(gaps=[gap("aten::mm", 30)],
                                             caveats=[caveats.NO_KERNELS]),
            "streams wait for each other": on_device(gaps=[gap(BETWEEN_KERNELS, 30)]),
            "it happens once": on_device(gaps=[_LOADS]),
        },
    ),
    "sync-points": Case(
        on_device(gaps=[_ITEM], syncs=[_SYNC]),
        {
            "one a step": on_device(gaps=[_ITEM], syncs=[{**_SYNC, "times": 1}]),
            "nothing marks steps": on_device(gaps=[_ITEM], syncs=[_SYNC],
                                             caveats=[caveats.NO_STEPS]),
            "one rank of two waits for the other": exchanging(_AGREE, ranks=1),
        },
    ),
    "reduce-every-micro-batch": Case(
        exchanging(*_EACH),
        {
            "once a step, numbered otherwise": exchanging(*_SHIFTED),
            "two networks": exchanging(*_TWO_NETWORKS),
            "of the forward pass": exchanging(*_FORWARD),
            "nothing marks steps": exchanging(*_EACH, caveats=[caveats.NO_STEPS]),
            "an engine that serves": exchanging(*_EACH, caveats=[caveats.INFERENCE]),
        },
    ),
    "buckets-too-small": Case(
        exchanging(_TINY, _NUMBER),
        {"large": exchanging(_LATE, _NUMBER),
         "tensor parallel": exchanging({**_TINY, "axis": "tp"}, _NUMBER)},
    ),
    "buckets-too-large": Case(
        exchanging(_WHOLE),
        {"graphs without kernels": exchanging(_WHOLE, is_device=True,
                                              caveats=[caveats.GRAPH_KERNELS_MISSING]),
         "hidden": exchanging({**_WHOLE, "exposed_ms": 2})},
    ),
    "no-overlap": Case(exchanging(_LATE), {"hidden": exchanging(_HIDDEN)}),
    "regather-in-pipeline": Case(
        on_device(WORK, collectives=[*_GATHERS, _HOP]),
        {"no pipeline": on_device(WORK, collectives=_GATHERS),
         "once a step": on_device(WORK, collectives=[_GATHERS[0], _HOP])},
    ),
    "uneven-stages": Case(
        of(_UNEVEN_STAGES, job(2, **_PIPE, split=(6, 2))),
        {"the best split": of(_UNEVEN_STAGES, job(2, **_PIPE, split=(4, 4)))},
    ),
    "few-micro-batches": Case(
        of(_HALVES, job(2, **{**_PIPE, "micro_batch": 16}, split=(4, 4))),
        {"the smallest": of(_HALVES, job(2, **{**_PIPE, "micro_batch": 1}, split=(4, 4)))},
    ),
    "allocator-retries": Case(
        on_device(gaps=[_MALLOC]),
        {"warming up": on_device(gaps=[{**_MALLOC, "step": 10}]),
         "the asynchronous allocator": on_device(gaps=[gap("cudaMallocAsync", 3)])},
    ),
    "fp32": Case(
        wide("ampere_sgemm_128x64_nn", H100),
        {
            "no description of the device": wide("ampere_sgemm_128x64_nn", None),
            "no such units": wide("maxwell_sgemm_128x64_nn", TraceDevice("P100", (6, 0), 0, False)),
            "an AMD device without them": wide("Cijk_Ailk_Bljk_SB_MT128x64", MI100),
            "16 bits": wide("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", H100),
            "16 bits that add in fp32": wide("gemv2T_kernel_val<int, int, __half, float>", H100),
        },
    ),
    "slow-attention": Case(
        on_device(WORK, kernels=[_SOFTMAX, _BMM]),
        {
            "AMD's fused": attention("attn_fwd.kd"),
            "flash": attention("flash_fwd_kernel<128>"),
            "serving": attention("kernel_unified_attention_2d"),
            "a loss's softmax": on_device(WORK, kernels=[_LOSS, _BMM]),
            "a network without attention": on_device(WORK, kernels=[_SOFTMAX]),
            "a CPU": of(account([WORK], kernels=[_SOFTMAX, _BMM])),
        },
    ),
    "unfused-elementwise": Case(
        on_device(WORK, kernels=[_PLAIN]),
        {"compiled": on_device(WORK, kernels=[_INDUCTOR]),
         "vLLM's": on_device(WORK, kernels=[
             kernel("vllm::fused_add_rms_norm_kernel", "other_kernels", 20)])},
    ),
    "small-kernels": Case(
        on_device(kernels=_SHORT),
        {"graphs are replayed": on_device(kernels=_SHORT, gaps=_REPLAY),
         "a busy device": on_device({**WORK, "host_gap": 2.0}, kernels=_SHORT)},
    ),
    "recompute-not-needed": Case(
        of(_AGAIN, _TIGHT),
        {"memory is short": of(_AGAIN, _TIGHT.replace(cluster=_SMALL_CLUSTER))},
    ),
    "sharding-not-needed": Case(
        of(_GATHERED, job(2, dp=1, fsdp=2, zero=3)),
        {"memory is short": of(_GATHERED, job(2, dp=1, fsdp=2, zero=3,
                                              cluster=_SMALL_CLUSTER))},
    ),
    "model-too-small": Case(
        of(account([{"matmul": 20.0, "exposed_comm.dp": 80.0}] * 2, collectives=MEETING)),
        {
            "two ranks of many": of(account(
                [{"matmul": 20.0, "exposed_comm.dp": 80.0}] * 2,
                collectives=[{**MEETING[0], "group_size": 128}])),
            "ranks that share a network": of(account(
                [{"matmul": 20.0, "exposed_comm.tp": 80.0}] * 2,
                collectives=[{**MEETING[0], "axis": "tp"}])),
        },
    ),
    "peak-missing": Case(
        of(None, job(2), step_ms=100),
        {"known": of(None, job(2), step_ms=100, facts={"peak_flops": 1e12})},
    ),
    "checkpoint-stall": Case(
        of(None, job(2), lines=lines(terms={"checkpoint_stall": 0.02})),
        {"none": of(None, job(2), lines=lines())},
    ),
    "evaluation-stall": Case(
        _evaluating(10, 0.05),
        {"seldom enough": _evaluating(10, 0.0005),
         "one in the run": _evaluating(160, 0.05)},
    ),
    "logging-stall": Case(
        of(None, job(2), lines=lines(between_s=0.02)),
        {"nothing between": of(None, job(2), lines=lines(between_s=0.0))},
    ),
    "interruptions": Case(
        interrupted_run(simulated()),
        {"nothing was lost": interrupted_run(_undisturbed()),
         "not elastic": of(None, job(2), lines=lines())},
    ),
    "garbage-collection": Case(
        of(None, job(2), lines=lines(gc_s=0.01)),
        {"others hide it": of(account([{**WORK, "matmul": 100.0}, {**WORK, "host_gap": 17.0}],
                                      gaps=[gap("paceline.gc", 12, rank=1)]))},
    ),
    "warm-up-recorded": Case(
        on_device(gaps=[_LOADS]), {"in every step": on_device(gaps=[gap("cuModuleLoadData", 10)])}
    ),
    "recompilation": Case(
        on_device(gaps=[_COMPILES]),
        {"the first step compiles": on_device(gaps=[{**_COMPILES, "step": 10}]),
         "nothing marks steps": on_device(gaps=[_COMPILES], caveats=[caveats.NO_STEPS])},
    ),
    "pageable-copies": Case(
        on_device(kernels=[_PAGEABLE]),
        {"pinned": on_device(kernels=[_PINNED]),
         "the device is busy": on_device({"matmul": 100.0}, kernels=[_PAGEABLE])},
    ),
    "thread-oversubscription": Case(
        of(None, job(2), step_ms=100, facts={**_FEW_CORES, "threads_per_rank": 4}),
        {"enough cores": of(None, job(2), step_ms=100, facts={**_FEW_CORES, "num_cores": 8,
                                                              "threads_per_rank": 4})},
    ),
    "crowded-cores": Case(
        of(account([WORK] * 2), job(2), facts={**_FEW_CORES, "num_cores": 1,
                                               "num_cores_of_host": 16}),
        {"a small host": of(account([WORK] * 2), job(2), facts={**_FEW_CORES, "num_cores": 1,
                                                                "num_cores_of_host": 1})},
    ),
    "cores-taken": Case(
        of(None, job(2), facts=_FEW_CORES, lines=lines(ranks={"core_wait_s": [0.04, 0.05]})),
        {"one rank waits": of(None, job(2), facts=_FEW_CORES,
                              lines=lines(ranks={"core_wait_s": [0.001, 0.05]}))},
    ),
    "checking-left-on": Case(
        of(None, job(2), step_ms=1e5, facts={"checking": ["CUDA_LAUNCH_BLOCKING=1"]}),
        {"nothing set": of(None, job(2), step_ms=1e5, facts={"checking": []})},
    ),
    "clock-throttling": Case(
        with_files(account([WORK]), doctor_json={"facts": {"gpus": [
            {"clocks": {"reasons": ["sw_power_cap"], "sm_mhz": 1000, "max_sm_mhz": 1980}}]}}),
        {"idle clocks": with_files(account([WORK]), doctor_json={"facts": {"gpus": [
            {"clocks": {"reasons": ["gpu_idle"], "sm_mhz": 1000, "max_sm_mhz": 1980}}]}})},
    ),
    "compression-missing": Case(
        of(_SENT, job(2, cluster=_slow_cluster(), batch=64)),
        {"bytes are not known": of(
            account(_WAITS, collectives=[{**each, "bytes": -1} for each in _OVER_SLOW],
                    is_device=True),
            job(2, cluster=_slow_cluster(), batch=64))},
    ),
    "tp-across-nodes": Case(
        of(_BY_TP, job(2, cluster=_two_nodes(), batch=64, dp=1, tp=2)),
        {"inside a node": of(_BY_TP, job(2, cluster=_two_nodes().replace(
            devices_per_node=2, num_nodes=1), batch=64, dp=1, tp=2))},
    ),
}  # fmt: skip

__all__ = ["CASES", "TURING", "V100", "Case", "wide"]
