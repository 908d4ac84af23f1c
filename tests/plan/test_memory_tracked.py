"""Predicted memory against torch's own trackers, on our decoder as `parallel.apply` leaves it.

One process with a fake process group: collectives return at once, and what they would bring is
whatever lies in memory, which has the right size. Two steps, forward, backward and optimizer, on a
small network; the tracker sees every allocation. So this is the layer between pure formulas and
ranks.
"""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.comm.rendezvous import Ranks
from paceline.config.job import Job
from paceline.config.layers import Experts
from paceline.config.model import Model
from paceline.config.stack import Stack
from paceline.models import moe
from paceline.models.decoder import Decoder
from paceline.models.weights import write_weights
from paceline.parallel.ep import copy_experts, expert_layers
from paceline.plan.memory import memory_bytes
from paceline.plan.memory.activations import block_activations
from paceline.plan.memory.holdings import holdings_of
from paceline.plan.points import Points, Setting
from paceline.train.data import MicroBatch
from paceline.train.weighted_loss import WeightedLoss
from tests.parallel.training import job_of, trainer_of

SEQ = 128
SHAPE = (
    "model.vocab_size=512", "model.hidden_size=128", "model.ffn_size=384", "model.num_layers=4",
    "model.num_heads=8", "model.num_kv_heads=4", f"model.max_seq_len={SEQ}", "model.head_dim=16",
    f"train.seq_len={SEQ}",
)  # fmt: skip
FP32 = ("layout.precision=fp32",)
AUTOCAST = ("layout.precision=bf16",)
BF16 = ("layout.precision=bf16", "layout.param_dtype=bf16")
TP = ("layout.tp=2", "layout.sequence_parallel=true")
LORA = ("finetune.method=lora",)
OF_EXPERTS = "finetune.targets=['experts.*','attention.*']"
FULL, SELECTIVE = ("layout.recompute=full",), ("layout.recompute=selective",)
GPT = ("model.norm=layer", "model.bias=true", "model.gated=false")
GPT2 = (*GPT, "model.positions=learned", "model.tie_embeddings=true")
PHI = (
    *GPT, "model.residual=parallel_shared", "model.rotary_share=0.5", "model.head_bias=true",
    "model.tie_embeddings=false",
)  # fmt: skip
GEMMA2 = (
    "model.norm=rms_plus_one", "model.post_norms=true", "model.scale_embeddings=true",
    "model.activation=gelu_tanh", "model.score_width=12", "model.score_cap=2.0",
    "model.logit_cap=3.0", "model.tie_embeddings=true", "model.sliding_window=32",
    "model.full_layers=[1]",
)  # fmt: skip
BERT = (
    "model.causal=false", "model.norm=layer", "model.bias=true", "model.gated=false",
    "model.positions=learned", "model.residual=post_norm", "model.embedding_norm=true",
    "model.token_types=2", "model.head_layer=true", "model.head_bias=true",
    "model.tie_embeddings=true",
)  # fmt: skip
MODERNBERT = (
    "model.causal=false", "model.norm=layer", "model.norm_bias=false", "model.embedding_norm=true",
    "model.head_layer=true", "model.head_bias=true", "model.tie_embeddings=true",
    "model.activation=gelu", "model.sliding_window=32", "model.full_layers=[0,3]",
)  # fmt: skip
GPT_OSS = (
    "model.experts={num_experts=8,experts_per_token=2,ffn_size=128,bias=true,gate_limit=7.0}",
    "model.sinks=true", "model.bias=true",
)  # fmt: skip
GEMMA3 = (
    "model.norm=rms_plus_one", "model.post_norms=true", "model.qk_norm=true",
    "model.scale_embeddings=true", "model.activation=gelu_tanh", "model.sliding_window=32",
    "model.full_layers=[1]", "model.window_rope_theta=100.0", "model.score_width=12",
)  # fmt: skip
EXPERTS = (
    "model.experts={num_experts=8,experts_per_token=2,ffn_size=128,shared_ffn_size=128,"
    "dense_layers=[0]}",
)
LARGE_EXPERTS = ("model.experts={num_experts=8,experts_per_token=2,ffn_size=256}",)
SMALL_EXPERTS = ("model.experts={num_experts=8,experts_per_token=2,ffn_size=32}",)
LATENT = (
    "model.num_kv_heads=8", "model.head_dim=24",
    "model.latent={q_rank=48,kv_rank=32,nope_dim=16,rope_dim=8,v_dim=16}",
)  # fmt: skip


def sharded(zero: int) -> tuple[str, ...]:
    return "layout.fsdp=2", f"layout.zero={zero}"


# Name: ranks, samples per rank in micro-batches of two, settings.
CASES: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "fp32": (1, 2, FP32),
    "fp32, accumulated": (1, 4, FP32),
    "autocast": (1, 2, AUTOCAST),
    "bf16": (1, 2, BF16),
    "selective": (1, 2, FP32 + SELECTIVE),
    "autocast, full": (1, 2, AUTOCAST + FULL),
    "two layers full": (1, 2, (*FP32, *FULL, "layout.recompute_layers=2")),
    "8-bit state": (1, 2, (*FP32, "layout.optimizer_state=8bit")),
    "window and norms of heads": (1, 2, (*FP32, "model.sliding_window=32", "model.qk_norm=true")),
    "untied, with biases": (1, 2, (*FP32, "model.tie_embeddings=false", "model.qkv_bias=true")),
    "GPT-2": (1, 2, FP32 + GPT2),
    "Phi": (1, 2, FP32 + PHI),
    "Gemma 2": (1, 2, FP32 + GEMMA2),
    "Gemma 2, autocast": (1, 2, AUTOCAST + GEMMA2),
    "gpt-oss": (1, 2, FP32 + GPT_OSS),
    "BERT": (1, 2, FP32 + BERT),
    "ModernBERT": (1, 2, FP32 + MODERNBERT),
    "Gemma 3": (1, 2, FP32 + GEMMA3),
    # The tracker of one rank can't see parameters that stay as they are.
    "adapters": (2, 2, FP32 + LORA + sharded(3)),
    "adapters, autocast": (2, 2, AUTOCAST + LORA + sharded(3)),
    "adapters, accumulated": (2, 4, FP32 + LORA + sharded(1)),
    "adapters with magnitudes": (2, 2, (*FP32, *LORA, *sharded(3), "finetune.decomposed=true")),
    "adapters, full": (2, 2, FP32 + LORA + sharded(3) + FULL),
    "zero 3": (2, 2, AUTOCAST + sharded(3)),
    "zero 3, fp32": (2, 2, FP32 + sharded(3)),
    "zero 3, full, accumulated": (2, 4, AUTOCAST + sharded(3) + FULL),
    "zero 2, accumulated": (2, 4, AUTOCAST + sharded(2)),
    "zero 1, full, accumulated": (2, 4, AUTOCAST + sharded(1) + FULL),
    "replicas of shards": (4, 2, (*AUTOCAST, *sharded(3), "layout.dp=2")),
    "tp": (2, 2, (*FP32, "layout.tp=2", "layout.sequence_parallel=false")),
    "tp, sequence parallel": (2, 2, FP32 + TP),
    "tp, sequence parallel, selective": (2, 2, FP32 + TP + SELECTIVE),
    "tp, replicas": (4, 2, (*AUTOCAST, *TP, "layout.dp=2")),
    "tp, zero 3": (4, 2, AUTOCAST + TP + sharded(3)),
    "experts": (1, 2, FP32 + EXPERTS),
    "experts, zero 3": (2, 2, AUTOCAST + sharded(3) + EXPERTS),
    "latent attention": (1, 2, FP32 + LATENT),
    "ep": (2, 2, (*FP32, *EXPERTS, "layout.dp=2", "layout.ep=2")),
    "ep 4, full": (4, 2, (*FP32, *EXPERTS, *FULL, "layout.dp=4", "layout.ep=4")),
    "ep, zero 3": (2, 2, (*FP32, *EXPERTS, *sharded(3), "layout.ep=2")),
    "ep, zero 3, accumulated": (2, 4, (*AUTOCAST, *EXPERTS, *sharded(3), "layout.ep=2")),
    "ep, zero 3, full": (2, 2, (*FP32, *EXPERTS, *sharded(3), *FULL, "layout.ep=2")),
    "ep, replicas of shards, full": (
        4, 2, (*FP32, *EXPERTS, *sharded(3), *FULL, "layout.dp=2", "layout.ep=4"),
    ),
    "ep of half the shards": (
        4, 2, (*FP32, *EXPERTS, "layout.fsdp=4", "layout.zero=3", "layout.ep=2"),
    ),
    "ep of all shards, full": (
        4, 2, (*AUTOCAST, *EXPERTS, *FULL, "layout.fsdp=4", "layout.zero=3", "layout.ep=4"),
    ),
    "ep, tp, zero 3": (4, 2, (*AUTOCAST, *EXPERTS, *TP, *sharded(3), "layout.ep=2")),
    "ep, large experts, full": (
        2, 2, (*AUTOCAST, *LARGE_EXPERTS, *sharded(3), *FULL, "layout.ep=2"),
    ),
    "ep of half the shards, large experts": (
        4, 2, (*AUTOCAST, *LARGE_EXPERTS, "layout.fsdp=4", "layout.zero=3", "layout.ep=2"),
    ),
    "ep, small experts": (2, 2, (*FP32, *SMALL_EXPERTS, *sharded(3), "layout.ep=2")),
}  # fmt: skip


class Tracked(NamedTuple):
    """A peak in bytes, split as far as the tracker knows."""

    states: float
    """Parameters and optimizer state, as they are between steps."""
    moving: float
    """All the rest: activations, gradients, buffers of gathering and reducing."""


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def job(ranks: int, samples: int, settings: tuple[str, ...]) -> Job:
    shards = [int(word[-1]) for word in settings if word.startswith(("layout.dp", "layout.fsdp"))]
    batch = samples * (shards[0] if len(shards) == 1 else 4 if shards else 1)
    fixed = ("layout.micro_batch=2", f"train.global_batch={batch}")
    return job_of(ranks, (*SHAPE, *fixed, *settings))


def track(job: Job, copied: Sequence[int] = ()) -> Tracked:
    """The peak of two steps of a trainer on one rank, which gets copies of some experts."""
    ranks = job.layout.num_ranks
    if ranks > 1:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    trainer = trainer_of(job, Ranks(0, ranks, 0, ranks))
    if copied:
        layers = len(expert_layers(trainer.module))
        copy_experts(trainer.module, [torch.tensor(copied)] * layers)
    tracker: Any
    if isinstance(trainer.module, FSDPModule):
        tracker = FSDPMemTracker(trainer.module, trainer.update.optimizer)
        tracker.track_inputs(())
    else:
        tracker = MemTracker()
        tracker.track_external(trainer.module, trainer.update.optimizer)
    forward = trainer.passes.forward

    def forward_anew(micro_batch: object) -> WeightedLoss:
        tracker.reset_mod_stats()  # it wants to hear of every new pass; the peak stays
        return forward(micro_batch)

    trainer.passes.forward = forward_anew  # type: ignore[method-assign]
    model = job.model
    assert isinstance(model, Model)
    number = job.train.global_batch // job.layout.num_data_ranks // job.layout.micro_batch
    tokens = torch.zeros(job.layout.micro_batch, SEQ, dtype=torch.int64)
    with tracker, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            trainer.passes.forward_backward(0, [MicroBatch(tokens, tokens, None)] * number)
            trainer.update.optimizer.step()
            trainer.update.optimizer.zero_grad()
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    parts = {getattr(key, "value", key): value for key, value in snapshot.items()}
    kept = ("Parameter", "Sharded Param", "Optstate", "OptState")
    states = sum(value for key, value in parts.items() if key in kept)
    return Tracked(states, parts["Total"] - states - parts["Buffer"])


def predict(job: Job) -> dict[str, float]:
    model = job.model
    assert isinstance(model, Model)
    sizes = job.train.seq_len, job.train.global_batch
    setting = Setting(model, job.cluster, *sizes, Stack(), comm=job.comm, finetune=job.finetune)
    points = Points.of([job.layout], setting)
    terms = memory_bytes(setting, points, holdings_of(setting, job.layout, None))
    return {name: float(term[0, 0]) for name, term in terms.items()}


@pytest.fixture
def _even_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank of ep sends as many rows as it gets, and experts have as many, whatever lies in
    what the fake group brings."""

    def in_turn(scores: torch.Tensor, bias: torch.Tensor | None, shape: Experts) -> torch.Tensor:
        chosen = torch.arange(len(scores) * shape.experts_per_token) % shape.num_experts
        return chosen.view(len(scores), -1)

    monkeypatch.setattr(dist, "all_to_all_single", lambda got, sent, group: got.copy_(sent))
    monkeypatch.setattr(moe, "choose", in_turn)


@pytest.mark.usefixtures("_even_loads")
@pytest.mark.parametrize("name", CASES)
def test_peak_is_what_the_tracker_sees(name: str) -> None:
    """States within 2 %, what comes and goes within 5 %, the peak within 2 %."""
    _compare(job(*CASES[name]))


@pytest.mark.parametrize("base", ["nf4", "nf4_double"])
@pytest.mark.parametrize("others", [FP32, AUTOCAST])
def test_matrices_in_4_bits_are_what_the_tracker_sees(
    tmp_path: Path, base: str, others: tuple[str, ...]
) -> None:
    settings = (*others, *LORA, *sharded(3), f"finetune.base={base}")
    model = job(2, 2, settings).model
    assert isinstance(model, Model)
    decoder = Decoder(model)
    decoder.init_weights(torch.Generator().manual_seed(0))
    write_weights(tmp_path / "base", model, decoder.state_dict())
    _compare(job(2, 2, (*settings, f"train.weights={tmp_path / 'base'}")))


@pytest.mark.parametrize("others", [FP32, AUTOCAST])
@pytest.mark.parametrize("samples", [2, 4])
def test_a_teacher_is_what_the_tracker_sees(
    tmp_path: Path, others: tuple[str, ...], samples: int
) -> None:
    """One of twice the layers. The tracker doesn't see what it keeps: its parameters were there
    before, and are not the module's."""
    settings = (*others, *sharded(3))
    student = job(2, samples, settings).model
    assert isinstance(student, Model)
    teacher = student.replace(num_layers=8)
    decoder = Decoder(teacher)
    decoder.init_weights(torch.Generator().manual_seed(0))
    write_weights(tmp_path / "teacher", teacher, decoder.state_dict())
    more = ("finetune.objective=distill", f"finetune.distill.teacher={tmp_path / 'teacher'}")
    case = job(2, samples, (*settings, *more))
    tracked, predicted = track(case), predict(case)
    kept = teacher.num_params / 2 * (4 if others == FP32 else 2)
    states = predicted["params"] - kept + predicted["optimizer"]
    assert states == pytest.approx(tracked.states, rel=0.02)
    assert sum(predicted.values()) - kept - states == pytest.approx(tracked.moving, rel=0.05)


@pytest.mark.usefixtures("_even_loads")
@pytest.mark.parametrize(
    "others", [FP32, AUTOCAST, AUTOCAST + FULL, (*AUTOCAST, *LORA, OF_EXPERTS)]
)
def test_copies_of_hot_experts_are_what_the_tracker_sees(others: tuple[str, ...]) -> None:
    """What they add, within a fifth."""
    settings = (*others, *sharded(3), *EXPERTS, "layout.ep=2")
    tracked, predicted = [], []
    for copied in ((), (0, 1, 4)):
        case = job(2, 2, (*settings, f"comm.ep.hot_experts={len(copied)}"))
        tracked.append(track(case, copied).moving)
        predicted.append(sum(predict(case).values()))
        dist.destroy_process_group()
    added = tracked[1] - tracked[0]
    assert predicted[1] - predicted[0] == pytest.approx(added, rel=0.2)


def _compare(case: Job) -> None:
    tracked, predicted = track(case), predict(case)
    states = predicted["params"] + predicted["optimizer"]
    moving = sum(predicted.values()) - states
    assert states == pytest.approx(tracked.states, rel=0.02)
    assert moving == pytest.approx(tracked.moving, rel=0.05)
    assert sum(predicted.values()) == pytest.approx(sum(tracked), rel=0.02)


def test_a_stage_keeps_its_blocks_for_each_micro_batch_in_flight() -> None:
    """An inner stage of two layers and three micro-batches, before any backward pass: what six
    blocks keep, and the three outputs, which wait for their gradient."""
    case = job(1, 2, FP32)
    model = case.model
    assert isinstance(model, Model)
    setting = Setting(model, case.cluster, SEQ, 2, Stack())
    points = Points.of([case.layout], setting)
    stage = Decoder(model)
    stage.cut(1, 3)
    tracker = MemTracker()
    tracker.track_external(stage)
    inputs = [torch.randn(2, SEQ, model.hidden_size, requires_grad=True) for _ in range(3)]
    outputs = []
    with tracker:
        for x in inputs:
            tracker.reset_mod_stats()
            outputs.append(stage(x))
    (snapshot,) = tracker.get_tracker_snapshot("current").values()
    parts = {getattr(key, "value", key): value for key, value in snapshot.items()}
    # The stage's input was not made here, but its output was, and is as large.
    made_here = 3 * 2 * float(block_activations(setting, points)[0, 0])
    assert parts["Activation"] == pytest.approx(made_here, rel=0.05)
