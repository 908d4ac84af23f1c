"""A few optimizer steps of a tiny decoder under any layout, to compare with one process.

With clipping and accumulation. Many layouts go through one launch of ranks: starting processes
costs more than stepping.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.comm.rendezvous import Ranks
from paceline.config.hardware import Cluster, Device
from paceline.config.job import Job, read_job
from paceline.kernels.loss import IGNORED
from paceline.parallel.ep import copy_experts, expert_layers
from paceline.plan.resolve import resolve
from paceline.train.checkpoint.state import parameter_names
from paceline.train.data import MicroBatch
from paceline.train.data.order import rank_share
from paceline.train.language import decoder_task
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks

BATCH, SEQ, VOCAB, STEPS = 24, 24, 64, 2
PER_LAUNCH = 12
"""Cases on the same ranks, at most. Groups outlive their case, and each of gloo's has three threads
that wake a hundred times a second: with 715 of them on each of four ranks two cores did little
else.
"""
_OF_COMPRESSION = ("comm.compress_from", "comm.warmup_steps")
DEVICES = {
    kind: Device(name=kind.upper(), kind=kind, precisions=("fp64", "fp32", "bf16", "fp16", "fp8"))
    for kind in ("cpu", "cuda")
}
CPU = DEVICES["cpu"]
DENSE = (
    f"model.vocab_size={VOCAB}", "model.hidden_size=32", "model.ffn_size=64", "model.num_layers=4",
    "model.num_heads=8", "model.num_kv_heads=4", f"model.max_seq_len={SEQ}", "model.head_dim=8",
)  # fmt: skip
TRAIN = (
    f"train.seq_len={SEQ}", f"train.global_batch={BATCH}", "optim.warmup_steps=0",
    "optim.clip_norm=0.3", "optim.lr=1e-2", "train.seed=7", "train.steps=3", "optim.eps=1e-3",
)  # fmt: skip
MODELS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "dense, tied": ("model.tie_embeddings=true", "model.qk_norm=true"),
    "experts": (
        "model.experts={num_experts=8,experts_per_token=2,ffn_size=16,shared_ffn_size=16,"
        "dense_layers=[0],choice_bias=true,bias_update_speed=0.01,"
        "balance_loss=0.01}",
    ),
    "documents": ("data.reset_at_documents=true", "model.qkv_bias=true"),
    "gemma": (
        *("model.norm=rms_plus_one", "model.post_norms=true", "model.qk_norm=true"),
        *("model.scale_embeddings=true", "model.tie_embeddings=true", "model.sliding_window=9"),
        *("model.full_layers=[1,3]", "model.window_rope_theta=100.0", "model.score_width=12"),
    ),
    "gemma 2": (
        *("model.norm=rms_plus_one", "model.post_norms=true", "model.scale_embeddings=true"),
        *("model.tie_embeddings=true", "model.sliding_window=9", "model.full_layers=[1,3]"),
        *("model.score_cap=0.5", "model.logit_cap=0.5", "model.init_std=0.1"),
    ),
    "gpt-oss": (
        "model.experts={num_experts=8,experts_per_token=2,ffn_size=16,bias=true,gate_limit=0.1,"
        "balance_loss=0.01}",
        *("model.sinks=true", "model.bias=true", "model.sliding_window=9", "model.init_std=0.1"),
        "model.full_layers=[1,3]",
        'model.rope_scaling={rope_type="yarn",factor=4.0,truncate=false,original_max_seq_len=8}',
    ),
    "encoder": ("model.causal=false", "model.sliding_window=10", "model.full_layers=[0,2]"),
    "bert": (
        *("model.causal=false", "model.norm=layer", "model.bias=true", "model.gated=false"),
        *("model.positions=learned", "model.residual=post_norm", "model.embedding_norm=true"),
        *("model.token_types=2", "model.head_layer=true", "model.head_bias=true"),
        *("model.tie_embeddings=true", "model.init_std=0.1"),
    ),
    "modernbert": (
        *("model.causal=false", "model.norm=layer", "model.norm_bias=false"),
        *("model.embedding_norm=true", "model.head_layer=true", "model.head_bias=true"),
        *("model.tie_embeddings=true", "model.activation=gelu", "model.sliding_window=10"),
        *("model.full_layers=[0,3]", "model.window_rope_theta=100.0", "model.init_std=0.1"),
    ),
    "gpt": (
        *("model.norm=layer", "model.bias=true", "model.gated=false", "model.positions=learned"),
        *("model.residual=parallel", "model.tie_embeddings=true", "model.init_std=0.1"),
    ),
    "one key head": ("model.num_kv_heads=1", "model.vocab_size=267"),
    "answers": ("data.records=chat",),
    "sources": (
        'data.sources=[{name="a",source="a",weight=1},{name="b",source="b",weight=1},'
        '{name="c",source="c",weight=1},{name="none",source="d",weight=1}]',
    ),
}
MODELS["adapters"] = (
    *MODELS["experts"], "finetune.method=lora", "finetune.rank=3", "finetune.alpha=60.0",
)  # fmt: skip
MODELS["adapters of experts"] = (
    *MODELS["experts"], "finetune.method=lora", "finetune.rank=4", "finetune.alpha=60.0",
    "finetune.targets=['experts.*','shared.*','attention.*']",
)  # fmt: skip
FP64 = ("layout.precision=fp64", "layout.param_dtype=fp64")
FP32 = ("layout.precision=fp32",)
TOLERANCE = {FP64: 1e-10, FP32: 1e-5}


class Trained(NamedTuple):
    """What a run gives: the same on every rank, but each has parameters of its own."""

    losses: list[float]
    """Of each step, and of the sources that are told apart in it."""
    eval_loss: float
    grad_norms: list[float]
    parameters: dict[str, Tensor]


def job_of(num_ranks: int, overrides: Sequence[str], device_type: str = "cpu") -> Job:
    """The tiny Job; overrides are `--set`s."""
    machine = Cluster(device=DEVICES[device_type], devices_per_node=num_ranks, num_nodes=1)
    return resolve(read_job(None, [*DENSE, *TRAIN, *_with_effect(overrides)]), machine).job


def _with_effect(overrides: Sequence[str]) -> list[str]:
    """What a test says of compression for all of its cases is refused where nothing is compressed:
    its exact cases go without."""
    named = dict(text.split("=", 1) for text in overrides)
    forms = {key: form for key, form in named.items() if ".compress" in key and form != "none"}
    if forms.keys() - set(_OF_COMPRESSION):
        return list(overrides)
    return [each for each in overrides if each.split("=")[0] not in _OF_COMPRESSION]


def micro_batches(step: int, job: Job, rank: int) -> list[MicroBatch]:
    """This rank's part of a batch that depends on the step only. Of answers, samples have none to
    many tokens that count; of sources, each sample is of one of the first three."""
    stream = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=stream)
    starts = torch.rand(BATCH, SEQ, generator=stream) < 0.2
    targets = tokens[:, 1:].clone()
    if job.data.records == "chat":
        share = torch.arange(BATCH)[:, None] % 5 / 4
        targets[torch.rand(BATCH, SEQ, generator=stream) >= share] = IGNORED
    layout = job.layout
    place = layout.data_rank(rank), layout.num_data_ranks
    kind = {"micro_batch": job.micro_batch, "interleave": job.interleave}
    share = rank_share(torch.arange(BATCH).numpy(), *place, **kind)
    mine = torch.from_numpy(share)
    parts = (
        each[mine].split(job.micro_batch) for each in (tokens[:, :-1], targets, starts.cumsum(1))
    )
    apart = job.data.starts_anew
    made = [MicroBatch(x, y, ids if apart else None) for x, y, ids in zip(*parts, strict=True)]
    if not job.data.sources:
        return made
    sources = ((torch.arange(BATCH) * 5 + step) % 7 % 3)[mine].split(job.micro_batch)
    return [batch._replace(sources=of) for batch, of in zip(made, sources, strict=True)]


def trainer_of(job: Job, ranks: Ranks) -> Trainer:
    """A Trainer of the Job's decoder, without data."""
    return Trainer.of(job, ranks, decoder_task(job.model, job, ranks))


def train(
    rank: int, world_size: int, overrides: Sequence[str], device_type: str = "cpu"
) -> Trained:
    """Two steps under one layout: the second shows the optimizer's state of the first."""
    job = job_of(world_size, overrides, device_type)
    ranks = Ranks(rank, world_size, rank, world_size, device_type)
    trainer = trainer_of(job, ranks)

    def batches(step: int) -> list[MicroBatch]:
        made = micro_batches(step, job, rank)
        return [
            MicroBatch(*(x if x is None else x.to(ranks.device) for x in each)) for each in made
        ]

    results = []
    for step in range(STEPS):
        results.append(trainer.step(step, batches(step))())
        if job.comm.ep.hot_experts:  # any experts will do: what is hot here may be none
            copy_experts(trainer.module, _drawn_experts(trainer, job.comm.ep.hot_experts, step))
    eval_loss, _ = trainer.evaluate([batches(STEPS)])
    names, _ = parameter_names(trainer.module)
    slots = _slots(trainer)
    parameters = {
        name: whole_tensor(parameter)[slots.get(parameter, ...)]
        for parameter, name in names.items()
    }
    losses = [loss for r in results for loss in (r.loss, *r.figures.values())]
    norms = [r.grad_norm for r in results]
    return Trained(losses, eval_loss, norms, parameters)


def _drawn_experts(trainer: Trainer, num: int, step: int) -> list[Tensor]:
    """Some experts of each layer, the same on all ranks that have it together."""
    stream = torch.Generator().manual_seed(step)
    layers = expert_layers(trainer.module)
    return [torch.randperm(len(each.slot_of_expert), generator=stream)[:num] for each in layers]


def _slots(trainer: Trainer) -> dict[Tensor, Tensor]:
    """Where in each stacked weight the experts lie, which may have been moved."""
    return {
        parameter: layer.slot_of_expert
        for layer in expert_layers(trainer.module)
        for parameter in layer.experts.parameters()
    }


def whole_tensor(parameter: Tensor) -> Tensor:
    """A copy of all of a parameter, on the host; every rank that holds a part must ask."""
    full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return full.detach().cpu().clone()


def train_many(
    rank: int, world_size: int, cases: Sequence[Sequence[str]], device_type: str = "cpu"
) -> list[Trained]:
    """One layout after the other on the same ranks."""
    # Putting parameters together to look at them is slow in a way that torch warns of.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return [train(rank, world_size, case, device_type) for case in cases]


def run_cases(
    num_ranks: int,
    cases: Sequence[Sequence[str]],
    device_type: str = "cpu",
) -> list[list[Trained]]:
    """All cases on that many ranks: per case, what each rank got."""
    if num_ranks == 1:
        return [[train(0, 1, case, device_type)] for case in cases]
    results: list[list[Trained]] = []
    for at in range(0, len(cases), PER_LAUNCH):
        given = (cases[at : at + PER_LAUNCH], device_type)
        per_rank = run_ranks(train_many, num_ranks, *given, device_type=device_type)
        results += [list(case) for case in zip(*per_rank, strict=True)]
    return results


def assert_equal(got: Sequence[Trained], serial: Trained, tolerance: float, what: object) -> None:
    """Every rank has the serial losses and norms, and together they have all its parameters."""
    seen: set[str] = set()
    for run in got:
        pairs = [(run.losses, serial.losses), (run.grad_norms, serial.grad_norms)]
        for mine, theirs in (*pairs, ([run.eval_loss], [serial.eval_loss])):
            off = max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))
            assert off <= tolerance, f"{what}: {mine} is not {theirs}"
        for name, parameter in run.parameters.items():
            off = (parameter - serial.parameters[name]).abs().max().item()
            assert off <= tolerance, f"{what}: {name} is off by {off}"
        seen |= run.parameters.keys()
    assert seen == serial.parameters.keys(), what
