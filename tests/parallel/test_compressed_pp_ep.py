"""Activations between stages and tokens on their way to experts in compressed form, on gloo ranks.

What arrives is what one process would round at the same places, and the gradient of what was
rounded passes as if nothing had been.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.compress.messages import messages_of, send_coded
from paceline.comm.rendezvous import Ranks
from paceline.parallel.ep import copy_experts, expert_layers
from tests.parallel.test_compressed_replicas import _learnable
from tests.parallel.training import FP32, MODELS, job_of, trainer_of
from tests.ranks import run_ranks

STEPS = 12
SETTINGS = (
    *(*FP32, "layout.micro_batch=6", f"train.steps={STEPS}"),
    *("optim.lr=5e-3", "optim.warmup_steps=5", "optim.clip_norm=1"),
)
CODECS = ("fp16", "bf16", "int8", "fp8", "int4", "onebit")


@given(
    st.sampled_from(CODECS),
    st.integers(0, 600),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_small_messages_are_exact_and_others_as_the_codec_says(name, num_values, dtype):
    messages = messages_of(name, 300)
    values = torch.randn(num_values, generator=torch.Generator().manual_seed(0)).to(dtype)
    payload = messages.coded(values)
    got = messages.decoded(payload, values.shape, dtype)
    assert torch.equal(got, _rounded(messages, values))
    assert torch.equal(got, values) or num_values >= 300
    assert messages.take_sent() == len(payload) == messages.num_bytes(num_values, dtype)
    assert messages.take_sent() == 0


def _rounded(messages, values):
    """What the codec makes of values, on this rank."""
    if values.numel() < messages.compress_from:
        return values
    payload = torch.zeros(messages.codec.num_bytes(values.numel()), dtype=torch.uint8)
    messages.codec.encode(values, payload)
    rounded = torch.empty_like(values)
    messages.codec.decode(payload, rounded)
    return rounded


WIDTH = 40
# Rows from each rank (first) to each rank; one sends nothing at all to the others.
COUNTS = torch.tensor([[2, 9, 0], [0, 3, 0], [11, 1, 8]])


def _given(rank):
    stream = torch.Generator().manual_seed(rank)
    return torch.randn(int(COUNTS[rank].sum()), WIDTH, generator=stream)


def _sent(rank, world_size, name):
    """Rows that arrived, gradient of the rows sent, and bytes."""
    messages = messages_of(name, 100)
    rows = _given(rank).requires_grad_()
    to, come = COUNTS[rank].tolist(), COUNTS[:, rank].tolist()
    arrived = send_coded(rows, to, come, dist.group.WORLD, messages)
    arrived.square().sum().backward()
    return arrived.detach(), rows.grad, messages.take_sent()


@pytest.mark.parametrize("name", ["int8", "bf16"])
def test_rows_and_their_gradients_are_rounded_where_they_travel(name):
    messages = messages_of(name, 100)
    sent = run_ranks(_sent, 3, name)
    parts = [_given(rank).split(COUNTS[rank].tolist()) for rank in range(3)]

    def carried(values, sender, receiver):
        flat = values.reshape(-1)
        rounded = flat if sender == receiver else _rounded(messages, flat)
        return rounded.view(values.shape)

    for rank, (arrived, gradient, num_bytes) in enumerate(sent):
        expected = [carried(parts[other][rank], other, rank) for other in range(3)]
        assert torch.equal(arrived, torch.cat(expected))
        back = [
            carried(2 * carried(parts[rank][other], rank, other), other, rank) for other in range(3)
        ]
        assert torch.equal(gradient, torch.cat(back))
        there = [
            messages.num_bytes(int(counts) * WIDTH, torch.float32)
            for whole in (COUNTS[rank], COUNTS[:, rank])
            for other, counts in enumerate(whole)
            if other != rank
        ]
        assert num_bytes == sum(there)


def _learn(rank, world_size, cases):
    return [_learned(rank, world_size, case) for case in cases]


def _learned(rank, world_size, case):
    job = job_of(world_size, [*SETTINGS, *case])
    trainer = trainer_of(job, Ranks(rank, world_size, rank, world_size))
    share = job.layout.data_rank(rank)
    hot, layers = job.comm.ep.hot_experts, len(expert_layers(trainer.module))
    results = []
    for step in range(job.train.steps):
        results.append(trainer.step(step, _learnable(step, job, share))())
        if hot:  # the first ones, hot or not
            copy_experts(trainer.module, [torch.arange(hot)] * layers)
    return [r.loss for r in results], results[-1].comm


PP = ("layout.pp=2", "layout.schedule=1f1b")
EP = (
    *(*MODELS["experts"], "model.num_layers=2", "layout.dp=2", "layout.ep=2"),
    "comm.compress_from=512",
)
CASES = {
    "pp": PP,
    "pp int8": (*PP, "comm.pp.compress=int8"),
    "pp bf16": (*PP, "comm.pp.compress=bf16"),
    "pp split": ("layout.pp=2", "layout.schedule=zbv", "comm.pp.compress=int8"),
    "ep": EP,
    "ep int8": (*EP, "comm.ep.compress=int8"),
    "ep bf16": (*EP, "comm.ep.compress=bf16"),
    "ep copied": (*EP, "comm.ep.compress=int8", "comm.ep.hot_experts=2"),
    "ep recomputed": (*EP, "comm.ep.compress=int8", "layout.recompute=full"),
}


@pytest.fixture(scope="module")
def learned():
    per_rank = run_ranks(_learn, 2, list(CASES.values()), timeout_s=300)
    return {name: runs for name, *runs in zip(CASES, *per_rank, strict=True)}


@pytest.mark.parametrize("name", [name for name in CASES if " " in name])
def test_it_learns_about_as_much_as_the_exact_run(name, learned):
    exact, compressed = learned[name.split()[0]][0][0], learned[name][0][0]
    assert compressed != exact
    assert compressed[0] == pytest.approx(exact[0], rel=2e-3)
    progress = (compressed[0] - compressed[-1]) / (exact[0] - exact[-1])
    assert 0.97 < progress < 1.03


def test_a_step_tells_what_it_sent(learned):
    for axis in ("pp", "ep"):
        told = {name: learned[name][0][1] for name in CASES}
        assert told[axis] == {}
        short, long = (told[f"{axis} {name}"][f"{axis}.bytes"] for name in ("int8", "bf16"))
        assert 0.4 * long < short < 0.6 * long
    assert told["ep copied"]["ep.bytes"] < told["ep int8"]["ep.bytes"]


def test_what_is_recomputed_is_rounded_again_to_the_same(learned):
    assert learned["ep recomputed"][0][0] == learned["ep int8"][0][0]
