"""Shards whose gradients and parameters are compressed, on gloo ranks, with and without replicas.

They learn as much as exact ones, all ranks compute with the same bits, and a checkpoint goes on
with what was owed, on other numbers of shards and replicas too.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.compress.codecs import codec_of
from paceline.comm.compress.shards import CodedRow, CodedShards, PayloadBuffers, Payloads
from paceline.comm.rendezvous import Ranks
from paceline.config.comm import codec
from paceline.parallel.compressed_shards import UnitPart, _Errors
from paceline.parallel.shard_collectives import ShardAlgorithm
from paceline.train.checkpoint.checkpointer import Checkpointer
from paceline.train.checkpoint.state import parameter_names, restore_training_state, training_state
from paceline.train.run_checkpoints import state_to_load
from tests.parallel.test_compressed_replicas import _learnable
from tests.parallel.training import (
    FP32,
    FP64,
    TOLERANCE,
    assert_equal,
    job_of,
    run_cases,
    train,
    trainer_of,
    whole_tensor,
)
from tests.ranks import run_ranks

STEPS = 20
SETTINGS = (
    *(*FP32, "layout.micro_batch=6", "comm.compress_from=512", f"train.steps={STEPS}"),
    *("optim.lr=5e-3", "optim.warmup_steps=5", "optim.clip_norm=1", "model.num_layers=2"),
)


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 1),
    st.integers(1, 5),
)
def test_a_parameter_is_split_and_put_together_again(length, width, dim, num_ranks):
    sizes = [width, width]
    sizes[dim] = length
    chunk = list(sizes)
    chunk[dim] = -(-length // num_ranks)
    part = UnitPart("weight", torch.Size(sizes), dim, torch.Size(chunk), True)
    given_values = torch.arange(float(length * width))
    rows = part.rows(given_values, num_ranks)
    assert rows.shape == (num_ranks, part.chunk.numel())
    assert torch.equal(part.whole(rows), given_values)
    first = given_values.view(sizes).narrow(dim, 0, min(length, chunk[dim])).flatten()
    assert rows[0][rows[0] > 0].tolist() == first[first > 0].tolist()


@given(st.lists(st.tuples(st.integers(0, 700), st.booleans()), min_size=1, max_size=6))
def test_a_payload_has_the_small_ones_exactly(parts):
    row = CodedRow.of(parts)
    payloads = Payloads(codec_of(codec("int8")), row, torch.float32)
    values = torch.randn(row.num_values, generator=torch.Generator().manual_seed(0))
    payload = torch.zeros(payloads.num_bytes, dtype=torch.uint8)
    error = torch.zeros(row.num_coded)
    payloads.encode(values, payload, error)
    got = torch.ones(row.num_values)
    payloads.decode(payload, got, add=True)
    got -= 1
    begin, owed = 0, 0
    for num_values, is_coded in parts:
        part = slice(begin, begin + num_values)
        if is_coded:
            lost = error[owed : owed + num_values]
            torch.testing.assert_close(got[part] + lost, values[part], atol=1e-6, rtol=0)
            owed += num_values
        else:
            torch.testing.assert_close(got[part], values[part], atol=1e-6, rtol=0)
        begin += num_values


def _learn(rank, world_size, cases):
    return [_learned(rank, world_size, case) for case in cases]


def _learned(rank, world_size, case, ranks_per_node=None):
    """Losses, what the first step tells of communication, and all whole parameters."""
    job = job_of(world_size, [*SETTINGS, *case])
    local = ranks_per_node or world_size
    trainer = trainer_of(job, Ranks(rank, world_size, rank % local, local))
    results = [trainer.step(step, _learnable(step, job, rank))() for step in range(job.train.steps)]
    names, _ = parameter_names(trainer.module)
    whole = torch.cat([whole_tensor(parameter).flatten() for parameter in names])
    return [r.loss for r in results], results[10].comm, whole


SHARDS = ("layout.fsdp=2", "layout.zero=3")
CASES = {
    "exact": SHARDS,
    "bf16": (*SHARDS, "comm.fsdp.compress=bf16"),
    "int8": (*SHARDS, "comm.fsdp.compress=int8"),
    "onebit": (*SHARDS, "comm.fsdp.compress=onebit"),
    "zero 1": ("layout.fsdp=2", "layout.zero=1", "comm.fsdp.compress=int8"),
    "weights": (*SHARDS, "comm.fsdp.compress_weights=int8"),
    "both": (*SHARDS, "comm.fsdp.compress=int8", "comm.fsdp.compress_weights=int8"),
    "again": (*SHARDS, "comm.fsdp.compress=int8", "comm.fsdp.compress_weights=int8"),
    "replicas": ("layout.dp=2", "layout.bucket_mib=0.02", "comm.dp.compress=int8"),
}
LEAST_PROGRESS = {"onebit": 0.7}


@pytest.fixture(scope="module")
def learned():
    per_rank = run_ranks(_learn, 2, list(CASES.values()), timeout_s=300)
    return {name: runs for name, *runs in zip(CASES, *per_rank, strict=True)}


@pytest.mark.parametrize("name", [name for name in CASES if name != "exact"])
def test_it_learns_about_as_much_as_the_exact_run(name, learned):
    exact, compressed = learned["exact"][0][0], learned[name][0][0]
    assert exact[0] == pytest.approx(compressed[0], rel=2e-3)
    progress = (compressed[0] - compressed[-1]) / (exact[0] - exact[-1])
    assert LEAST_PROGRESS.get(name, 0.98) < progress < 1.02
    assert compressed[1:] != exact[1:]


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_see_the_same_losses(name, learned):
    assert learned[name][0][0] == learned[name][1][0]
    assert torch.equal(learned[name][0][2], learned[name][1][2])


def test_a_second_run_has_the_same_bits(learned):
    assert learned["both"][0][0] == learned["again"][0][0]
    assert torch.equal(learned["both"][0][2], learned["again"][0][2])


def test_shards_end_where_compressed_replicas_do(learned):
    """Both lose as little; neither what nor in which order is the same."""
    exact = learned["exact"][0][2]
    for name in ("int8", "replicas"):
        off = (learned[name][0][2] - exact).norm() / exact.norm()
        assert 0 < off < 0.02, name
    shards, replicas = learned["int8"][0][0][-1], learned["replicas"][0][0][-1]
    assert shards == pytest.approx(replicas, rel=0.005)


def test_a_step_tells_what_it_sent_and_what_it_owes(learned):
    assert learned["exact"][0][1] == {}
    told = {name: learned[name][0][1] for name in CASES}
    owed = {name: told[name].get("error_norm", 0) for name in ("bf16", "int8", "onebit")}
    assert 0 < owed["bf16"] < owed["int8"] < owed["onebit"]
    assert told["both"]["fsdp.bytes"] < 0.6 * told["weights"]["fsdp.bytes"]


# Replicas of shards: all exact, the replicas' sums compressed, and all that travels.
HYBRID = ("layout.dp=2", "layout.fsdp=2", "layout.zero=2", "layout.micro_batch=3")
HYBRID_CASES = {
    "exact": HYBRID,
    "replicas": (*HYBRID, "comm.dp.compress=int8"),
    "all": (
        *(*HYBRID, "comm.dp.compress=int8", "comm.fsdp.compress=int8"),
        "comm.fsdp.compress_weights=int8",
    ),
}


def test_replicas_of_shards_learn_about_as_much_as_exact_ones():
    cases = [
        (*case, "layout.micro_batch=6", "train.steps=12", "optim.warmup_steps=0")
        for case in HYBRID_CASES.values()
    ]
    per_rank = run_ranks(_learn, 4, cases, timeout_s=300)
    learned = dict(zip(HYBRID_CASES, zip(*per_rank, strict=True), strict=True))
    exact = learned["exact"][0][0]
    assert exact[-1] < 0.9 * exact[0]
    for name in ("replicas", "all"):
        losses, told, parameters = learned[name][0]
        assert 0.98 < (losses[0] - losses[-1]) / (exact[0] - exact[-1]) < 1.02
        assert all(torch.equal(parameters, whole) for _, _, whole in learned[name][1:])
        assert losses[1:] != exact[1:]
        assert told["dp.bytes"] > 0
        assert told["error_norm"] > 0
    assert "fsdp.bytes" not in learned["replicas"][0][1]


# The same among four ranks, two on each of two nodes: coded between nodes only.
NODES = ("layout.fsdp=4", "layout.zero=2", "layout.micro_batch=3", "train.steps=12")
NODES_CASES = {
    "exact": NODES,
    "flat": (*NODES, "comm.fsdp.compress=int8"),
    "nodes": (*NODES, "comm.fsdp.compress=int8", "comm.fsdp.algorithm=hierarchical"),
}


def _learn_on_nodes(rank, world_size, cases):
    return [_learned(rank, world_size, case, ranks_per_node=2) for case in cases]


def test_what_is_coded_between_nodes_only_learns_as_much_and_owes_less():
    cases = [(*case, "optim.warmup_steps=0") for case in NODES_CASES.values()]
    per_rank = run_ranks(_learn_on_nodes, 4, cases, timeout_s=300)
    learned = dict(zip(NODES_CASES, zip(*per_rank, strict=True), strict=True))
    exact, flat, nodes = (learned[name][0] for name in NODES_CASES)
    assert 0.98 < (nodes[0][0] - nodes[0][-1]) / (exact[0][0] - exact[0][-1]) < 1.02
    assert all(torch.equal(nodes[2], whole) for _, _, whole in learned["nodes"][1:])
    assert 0 < (nodes[2] - exact[2]).norm() < 0.02 * exact[2].norm()
    assert 0 < nodes[1]["error_norm"] < flat[1]["error_norm"]


def _scattered(rank, world_size):
    """What a rank gets, and then owes to each row, of what it gave and owed."""
    drawn = torch.Generator().manual_seed(rank)
    values = torch.randn(world_size, 1000, generator=drawn)
    owed = torch.zeros(world_size, 1000)
    by = ShardAlgorithm("hierarchical", 2).among(dist.group.WORLD)
    coded = CodedShards(by, PayloadBuffers())
    payloads = Payloads(codec_of(codec("int4")), CodedRow.of([(1000, True)]), torch.float32)
    errors = torch.randn(len(coded.others), 1000, generator=drawn)
    owed[coded.others] = errors
    given = values + owed
    received = torch.empty(1000)
    sent = coded.reduce_scatter(payloads, received, values.flatten(), errors)
    left = torch.zeros(world_size, 1000)
    left[coded.others] = errors
    return coded.others, given, received, left, sent - payloads.num_bytes


def test_sums_of_nodes_are_coded_and_what_is_lost_is_owed():
    others, given, received, left, sent_inside = zip(*run_ranks(_scattered, 4), strict=True)
    assert others == ([2], [3], [0], [1])
    assert sent_inside == (2 * 1000 * 4,) * 4
    whole = torch.stack(received) + sum(left)
    assert torch.allclose(whole, sum(given), atol=1e-5)
    assert not torch.allclose(torch.stack(received), sum(given), atol=1e-2)


@given(st.sets(st.integers(0, 3)), st.integers(1, 40))
def test_nothing_owed_is_lost_when_others_are_coded(others, num_values):
    """A rank that starts to send hierarchically, or keeps another shard, owes what it owed."""
    chunk = torch.Size([-(-num_values // 4)])
    part = UnitPart("weight", torch.Size([num_values]), 0, chunk, True)
    errors = _Errors([part], sorted(others), 4, torch.zeros(0))
    before = torch.randn(num_values, generator=torch.Generator().manual_seed(num_values))
    assert errors.take({}) is None
    rest = errors.take({"weight": before.clone()})
    assert torch.equal(errors.by_name()["weight"] + part.whole(rest), before)
    assert not rest[sorted(others)].any()


EQUAL = {
    "replicas of shards": (*FP64, *HYBRID, "comm.dp.algorithm=ring"),
    "zero 3": (*FP64, *HYBRID, "layout.zero=3", "comm.dp.algorithm=ring"),
    "replicas of columns": (*FP64, "layout.dp=2", "layout.tp=2", "comm.dp.algorithm=ring"),
    "replicas that share sequences": (
        *FP64,
        "layout.dp=2",
        "layout.cp=2",
        "comm.dp.algorithm=ring",
    ),
    "warm-up": (
        *(*FP32, *HYBRID, "comm.warmup_steps=3"),
        *("comm.dp.compress=int8", "comm.fsdp.compress=int8"),
    ),
}


def test_what_is_sent_exactly_equals_one_process():
    both = ("layout.micro_batch=6", "model.num_layers=2")
    cases = [(*both, *case) for case in EQUAL.values()]
    serial = {each: train(0, 1, (*each, *both)) for each in (FP32, FP64)}
    for name, got in zip(EQUAL, run_cases(4, cases), strict=True):
        precision = FP32 if name == "warm-up" else FP64
        assert_equal(got, serial[precision], TOLERANCE[precision], name)


ALL = ("comm.dp.compress=int8", "comm.fsdp.compress=int8", "comm.fsdp.compress_weights=int8")
WHOLE = (*SETTINGS, *HYBRID, "layout.micro_batch=6", *ALL)
MORE_SHARDS = (
    *SETTINGS,
    "layout.dp=2",
    "layout.fsdp=3",
    "layout.zero=2",
    "layout.micro_batch=4",
    *ALL,
)


def _trainer(rank, world_size, settings):
    job = job_of(world_size, settings)
    return job, trainer_of(job, Ranks(rank, world_size, rank, world_size))


def _stepped(trainer, job, rank, steps):
    """Loss of each step."""
    return [trainer.step(step, _learnable(step, job, rank))().loss for step in steps]


def _owed(trainer):
    """By replica or rank and parameter: what it still owes, whole."""
    return {
        (kind, index, name): whole_tensor(error)
        for kind, by_index in trainer.replicas.state().items()
        for index, errors in by_index.items()
        for name, error in errors.items()
    }


def _save(rank, world_size, folder):
    job, trainer = _trainer(rank, world_size, WHOLE)
    _stepped(trainer, job, rank, range(3))
    checkpointer = Checkpointer(folder, keep_last=1, say=lambda _: None)
    kept = {section: part.state() for section, part in trainer.stateful_parts().items()}
    checkpointer.save(3, {**training_state(trainer.module, trainer.update.optimizer), **kept}, {})
    checkpointer.finish()
    return _owed(trainer), _stepped(trainer, job, rank, range(3, 5))


def _load(rank, world_size, folder, settings):
    job, trainer = _trainer(rank, world_size, settings)
    checkpointer = Checkpointer(folder, keep_last=1, say=lambda _: None)
    found = checkpointer.latest_good()
    state = training_state(trainer.module, trainer.update.optimizer, found)
    owed = state_to_load(trainer, found)
    checkpointer.load(found, {**state, **owed})
    restore_training_state(trainer.module, trainer.update.optimizer, state)
    trainer.replicas.load(owed["comm"])
    return _owed(trainer), _stepped(trainer, job, rank, range(3, 5))


def _sums(per_rank):
    """By kind and parameter: the sum over all that owe."""
    merged = {place: error for owed, _ in per_rank for place, error in owed.items()}
    sums = {}
    for (kind, _, name), error in merged.items():
        sums[kind, name] = sums.get((kind, name), 0) + error
    return sums


def test_a_resumed_run_goes_on_bit_identically_and_other_ranks_owe_as_much(tmp_path):
    saved = run_ranks(_save, 4, tmp_path)
    loaded = run_ranks(_load, 4, tmp_path, WHOLE)
    assert [losses for _, losses in loaded] == [losses for _, losses in saved]
    for (before, _), (after, _) in zip(saved, loaded, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(error, after[place]) for place, error in before.items())
    more = run_ranks(_load, 6, tmp_path, MORE_SHARDS)
    sums, now = _sums(saved), _sums(more)
    assert {kind for kind, _ in sums} == {"replica_error", "shard_error"}
    for place, owed in sums.items():
        assert owed.norm() > 0
        assert (now[place] - owed).norm() < 1e-6 * owed.norm(), place
