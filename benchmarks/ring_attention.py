"""What context parallelism costs and saves: attention over ranks against full attention on one.

How it works: forward and backward of one layer's attention core, from q, k and v to their
gradients, on the ranks of this machine (CPUs over gloo; GPUs over NCCL where every rank has one).
All ways to split the sequence take turns within a round, so that whatever else the machine does
hits all alike; ratios are taken within a round, then the median over rounds. Before anything is
timed, sums over the result and the gradients must be those of full attention.

Two clocks: *wall* is what a person waits. *Processor* is the time that the busiest rank was at
work: what the wall would show if every rank had a core of its own and messages took no time. On
fewer cores than ranks only the second can fall with the ranks.

Memory of a rank: *kept* is what waits from forward to backward, which a network holds once for
every layer. *Peak* is the most that a step held at once, its inputs included: every allocation, as
the profiler records it (on CUDA, as the allocator counts it). gloo's own thread sometimes frees a
buffer unseen, which can only raise the count, so the least of a few steps is taken.

It is no measure of a network of machines: here messages are copies within one.

    python -m benchmarks.ring_attention [--rounds 5] [--quick]
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown, terminal_table
from paceline.models.attention import Sdpa
from paceline.parallel.cp import AttentionCore, context_groups, make_attend, positions_of

NUM_RANKS = 4
TOLERANCE = 1e-4
_MEMORY_STEPS = 4


class Way(NamedTuple):
    """How a sequence is shared: over ring x ulysses ranks."""

    ring: int
    ulysses: int

    @property
    def cp(self) -> int:
        """Ranks that take part."""
        return self.ring * self.ulysses

    def __str__(self) -> str:
        if self.cp == 1:
            return "full, one rank"
        names = (("ring", self.ring), ("Ulysses", self.ulysses))
        return " x ".join(f"{name} {size}" for name, size in names if size > 1)


FULL = Way(1, 1)
WAYS = (FULL, Way(2, 1), Way(1, 2), Way(4, 1), Way(1, 4), Way(2, 2))


class Shape(NamedTuple):
    """One layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    shape: Shape
    seq_lens: tuple[int, ...]
    rounds: int
    device_type: str


@dataclass(frozen=True)
class Sample:
    """One step of one way."""

    seq_len: int
    ring: int
    ulysses: int
    round: int
    wall_s: float
    processor_s: float
    """Of the rank with the most; 0 on CUDA."""


@dataclass(frozen=True)
class Peak:
    """The most bytes of any rank."""

    seq_len: int
    ring: int
    ulysses: int
    peak: int
    """Held at once during a step."""
    kept: int
    """Saved in forward for backward."""


class Step:
    """Forward and backward of attention on this rank's share of one sequence."""

    def __init__(
        self, plan: Plan, seq_len: int, way: Way, rank: int, attend: AttentionCore
    ) -> None:
        self.plan, self.seq_len, self.attend = plan, seq_len, attend
        self.positions = positions_of(seq_len, *way, rank)

    def inputs(self) -> list[Tensor]:
        """q, k, v and the gradient of the result: (1, heads, local seq, head_dim) each."""
        heads, kv_heads, dim = self.plan.shape
        device = self.plan.device_type
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        sequence = torch.Generator().manual_seed(self.seq_len)
        found = []
        for num in (heads, kv_heads, kv_heads, heads):
            whole = torch.randn(1, num, self.seq_len, dim, generator=sequence)
            found.append(whole[:, :, self.positions].to(device, dtype))
        return found

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the result and the gradients of q, k and v."""
        q, k, v, grad = inputs
        leaves = [x.requires_grad_() for x in (q, k, v)]
        mask = self.attend.mask(len(self.positions), None, None, q.device)
        out = self.attend(*leaves, mask)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def sums(self) -> Tensor:
        """Four numbers that tell whether something else was computed; add them up over ranks."""
        inputs = self.inputs()
        results = self.run(inputs)
        pairs = zip(results, (inputs[3], *inputs[:3]), strict=True)
        # Absolute values: sums over many tokens of either sign would agree on nearly nothing.
        return torch.stack([(a.detach().double() * b.detach()).abs().sum() for a, b in pairs])


def peak_bytes(fn: Callable[[], Any], device_type: str = "cpu") -> int:
    """Return the most bytes that `fn` held at once, of what it allocated itself."""
    if device_type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fn()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        fn()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    changes = sorted(
        (event["args"]["Ev Idx"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    )
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def _measure_step(step: Step, device_type: str) -> tuple[float, float]:
    """Wall and processor seconds of a step."""
    inputs = step.inputs()
    if device_type == "cuda":
        torch.cuda.synchronize()
    wall, busy = time.perf_counter(), time.process_time()
    step.run(inputs)
    if device_type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter() - wall, 0.0
    return time.perf_counter() - wall, time.process_time() - busy


def kept_bytes(fn: Callable[[], Any]) -> int:
    """Return the bytes that the forward passes in `fn` save for their backward passes."""
    sizes: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        fn()
    return sum(sizes.values())


def _memory_of(step: Step, device_type: str) -> tuple[int, int]:
    """Peak and kept bytes of this rank; these steps warm up as well."""
    whole = step.inputs()

    def with_inputs() -> None:
        step.run([x.detach().clone() for x in whole])

    peak = min(peak_bytes(with_inputs, device_type) for _ in range(_MEMORY_STEPS))
    return peak, kept_bytes(with_inputs)


def _largest(values: Sequence[float], device_type: str) -> list[float]:
    """The largest of each value over all ranks; also waits for all."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device_type)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def _turns(plan: Plan) -> Iterator[tuple[int, int, Way]]:
    """Every (round, seq_len, way); each round begins with another way."""
    for number in range(plan.rounds):
        turn = number % len(WAYS)
        for seq_len in plan.seq_lens:
            for way in WAYS[turn:] + WAYS[:turn]:
                yield number, seq_len, way


def _cores(device_type: str) -> dict[Way, AttentionCore]:
    """The attention of this rank for each way; only the first `way.cp` ranks use theirs."""
    found: dict[Way, AttentionCore] = {}
    for way in WAYS:
        sizes = (NUM_RANKS // way.cp, way.cp)
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "cp"))
        found[way] = make_attend(Sdpa(), context_groups(mesh, way.ulysses))
    return found


def _check_sums(plan: Plan, rank: int, cores: dict[Way, AttentionCore]) -> None:
    """Refuse to time ways that don't compute the same."""
    expected = None
    for way in WAYS:
        sums = torch.zeros(4, dtype=torch.float64, device=plan.device_type)
        if rank < way.cp:
            sums += Step(plan, plan.seq_lens[0], way, rank, cores[way]).sums()
        dist.all_reduce(sums)
        expected = sums if expected is None else expected
        apart = ((sums - expected).abs() / expected).max().item()
        limit = TOLERANCE if plan.device_type == "cpu" else 1e-2
        assert apart <= limit, f"{way} computes something else than full attention: {apart:.2g}"


def _rank_main(rank: int, plan: Plan, folder: str) -> None:
    torch.set_num_threads(1)
    if plan.device_type == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(folder) / "store"), NUM_RANKS)
    backend = "nccl" if plan.device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=NUM_RANKS)
    cores = _cores(plan.device_type)
    _check_sums(plan, rank, cores)
    peaks, samples = [], []
    for seq_len in plan.seq_lens:
        for way in WAYS:
            mine = (0, 0)
            if rank < way.cp:
                step = Step(plan, seq_len, way, rank, cores[way])
                mine = _memory_of(step, plan.device_type)
            peaks.append(Peak(seq_len, *way, *map(int, _largest(mine, plan.device_type))))
    for number, seq_len, way in _turns(plan):
        dist.barrier()
        times = (0.0, 0.0)
        if rank < way.cp:
            times = _measure_step(Step(plan, seq_len, way, rank, cores[way]), plan.device_type)
        samples.append(Sample(seq_len, *way, number, *_largest(times, plan.device_type)))
    if rank == 0:
        found = {"peaks": list(map(asdict, peaks)), "samples": list(map(asdict, samples))}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(plan: Plan) -> tuple[list[Peak], list[Sample]]:
    """Run the ranks and return what they found."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload(["torch.distributed.device_mesh"])
        mp.start_processes(_rank_main, (plan, folder), NUM_RANKS, start_method="forkserver")
        found = json.loads((Path(folder) / "found.json").read_text())
    return [Peak(**each) for each in found["peaks"]], [Sample(**each) for each in found["samples"]]


class Row(NamedTuple):
    """The figures of one way at one length; ratios to full attention on one rank."""

    seq_len: int
    way: Way
    peak_bytes: int
    peak_ratio: float
    kept_ratio: float
    wall_s: tuple[float, float, float]
    """Median, least, most."""
    wall_ratio: float
    processor_ratio: float


def rows(peaks: Sequence[Peak], samples: Sequence[Sample]) -> list[Row]:
    """Take medians over rounds, of ratios within rounds."""
    held = {(p.seq_len, Way(p.ring, p.ulysses)): p for p in peaks}
    rounds = sorted({s.round for s in samples})
    of = {(s.seq_len, Way(s.ring, s.ulysses), s.round): s for s in samples}
    found = []
    for (seq_len, way), most in held.items():
        mine = [of[seq_len, way, number] for number in rounds]
        full = [of[seq_len, FULL, number] for number in rounds]
        wall = [s.wall_s for s in mine]
        ratios = [
            (a.wall_s / b.wall_s, a.processor_s / b.processor_s if b.processor_s else float("nan"))
            for a, b in zip(mine, full, strict=True)
        ]
        found.append(
            Row(
                seq_len,
                way,
                most.peak,
                most.peak / held[seq_len, FULL].peak,
                most.kept / held[seq_len, FULL].kept,
                (median(wall), min(wall), max(wall)),
                median(ratio[0] for ratio in ratios),
                median(ratio[1] for ratio in ratios),
            )
        )
    return found


_TITLES = (
    "tokens", "way", "peak, MiB", "of full", "kept, of full",
    "wall, ms (least – most)", "of full",
    "processor, of full",
)  # fmt: skip


def text(row: Row) -> tuple[str, ...]:
    """A row as it is shown."""
    middle, least, most = (1e3 * s for s in row.wall_s)
    return (
        f"{row.seq_len:,}",
        str(row.way),
        f"{row.peak_bytes / 2**20:.1f}",
        f"{row.peak_ratio:.2f}",
        f"{row.kept_ratio:.2f}",
        f"{middle:,.0f} ({least:,.0f} – {most:,.0f})",
        f"{row.wall_ratio:.2f}",
        f"{row.processor_ratio:.2f}",
    )


def write_results(folder: Path, result: dict[str, Any], table: Sequence[Row]) -> Path:
    """Write ring_attention.json with every step, and ring_attention.md with the table."""
    about, plan = result["facts"], result["facts"]["plan"]
    heads, kv_heads, dim = plan["shape"]
    page = (
        f"{markdown(_TITLES, [*map(text, table)], ['way'])}\nOne layer's attention ({heads} heads, "
        f"{kv_heads} key heads of {dim}, one sequence), {plan['rounds']} rounds on "
        f"{plan['device_type']}, {signature(about)}\n"
    )
    return keep(folder, "ring_attention", result, page)


def main() -> None:
    """Run the benchmark, show the table and write the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="short sequences, one round")
    options = parser.parse_args()
    device_type = "cuda" if torch.cuda.device_count() >= NUM_RANKS else "cpu"
    seq_lens = (1024, 2048, 4096, 8192) if device_type == "cpu" else (8192, 32768, 131072)
    shape = Shape(8, 2, 64) if device_type == "cpu" else Shape(32, 8, 128)
    plan = Plan(shape, seq_lens, options.rounds, device_type)
    if options.quick:
        plan = Plan(Shape(4, 2, 16), (128, 256), 1, device_type)
    about = {**taken_with("benchmarks.ring_attention"), "plan": asdict(plan)}
    peaks, samples = measure(plan)
    table = rows(peaks, samples)
    console = Console(highlight=False)
    title = "Attention, forward and backward: medians"
    console.print(terminal_table(title, _TITLES, [*map(text, table)], ["way"]))
    result = {
        "facts": about,
        "peaks": list(map(asdict, peaks)),
        "samples": list(map(asdict, samples)),
    }
    console.print(f"results: {write_results(folder_of(options.results, about), result, table)}")


if __name__ == "__main__":
    main()
