"""Workers that step each for itself: ranks against k workers simulated in one process, and workers
of several ranks against those of one, fp64."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from paceline.comm.rendezvous import Ranks
from paceline.config.comm import LocalUpdates
from paceline.config.errors import InputError
from paceline.elastic.local_rounds import RoundSchedule, fragments_of, outer_step
from paceline.models.decoder import Decoder
from paceline.train.checkpoint.state import parameter_names
from tests.parallel.training import (
    FP32,
    FP64,
    job_of,
    micro_batches,
    trainer_of,
    whole_tensor,
)
from tests.ranks import run_ranks

NUM_WORKERS, NUM_STEPS = 3, 7
DP = (f"layout.dp={NUM_WORKERS}", f"train.steps={NUM_STEPS}", "optim.schedule=constant")


def _local(method: str, every: int, **more: object) -> tuple[str, ...]:
    settings = {"method": method, "every": every, **more}
    return tuple(f"comm.local.{name}={value}" for name, value in settings.items())


CASES = {
    "local SGD": (*FP64, *_local("local_sgd", 2)),
    "local SGD at every step": (*FP64, *_local("local_sgd", 1)),
    "DiLoCo": (*FP64, *_local("diloco", 2, outer_lr=0.5, outer_momentum=0.8)),
    "one fragment": (*FP64, *_local("streaming", 2, outer_lr=0.5, outer_momentum=0.8)),
    "fragments": (*FP64, *_local("streaming", 4, fragments=2)),
    "fragments, late": (*FP64, *_local("streaming", 4, fragments=2, overlap_steps=3)),
    "int8": (*FP32, *_local("diloco", 4, compress="int8"), "comm.compress_from=512"),
    "exact": (*FP32, *_local("diloco", 4)),
    "int4, late": (
        *FP32,
        *_local("streaming", 3, fragments=2, overlap_steps=2, compress="int4"),
        "comm.compress_from=512",
    ),
}


SITES = {
    "shards": (4, ("layout.fsdp=2", "layout.zero=3")),
    "columns": (4, ("layout.tp=2",)),
    "sequences": (4, ("layout.cp=2",)),
    "shards of columns": (8, ("layout.fsdp=2", "layout.zero=2", "layout.tp=2")),
}
"""Two workers of several ranks: how many ranks there are, and how each worker is cut."""
SITE_CASES = {
    "DiLoCo": CASES["DiLoCo"],
    "fragments, late": CASES["fragments, late"],
    # Norms would be coded as well.
    "int8": (*FP32, *_local("diloco", 4, compress="int8"), "comm.compress_from=1"),
}

SGD = (*FP64, "optim.name=sgd", "optim.eps=1e-8", "optim.clip_norm=0", "layout.dp=2")
PLAIN = _local("diloco", 1, outer_lr=1.0, outer_momentum=0.0)
"""What this optimizer does is linear in the gradient: so the mean of what workers of plain means
have after each step is what replicas have that average gradients."""


class Trained(NamedTuple):
    """What a worker has at the end."""

    losses: list[float]
    grad_norms: list[float]
    sent_bytes: list[float]
    parameters: dict[str, Tensor]
    before_last: dict[str, Tensor]
    """Its parameters one step before the end."""


def _parameters(trainer) -> dict[str, Tensor]:
    names, _ = parameter_names(trainer.module)
    return {name: whole_tensor(parameter) for parameter, name in names.items()}


def _train(rank: int, world_size: int, case: Sequence[str]) -> Trained:
    job = job_of(world_size, [*DP, *case])
    trainer = trainer_of(job, Ranks(rank, world_size, rank, world_size))
    readers, before = [], {}
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - 1:
            before = _parameters(trainer)
        readers.append(trainer.step(step, micro_batches(step, job, rank)))
        trainer.agreement.meet(step + 1)
    results = [read() for read in readers]
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    sent = [result.comm.get("dp.bytes", 0.0) for result in results]
    return Trained(losses, norms, sent, _parameters(trainer), before)


def _train_all(rank: int, world_size: int, cases: Sequence[Sequence[str]]) -> list[Trained]:
    return [_train(rank, world_size, case) for case in cases]


@pytest.fixture(scope="module")
def trained() -> dict[str, list[Trained]]:
    """Per case, what each worker has."""
    per_rank = run_ranks(_train_all, NUM_WORKERS, list(CASES.values()))
    return dict(zip(CASES, zip(*per_rank, strict=True), strict=True))


@pytest.fixture(scope="module")
def sites() -> dict[str, list[list[Trained]]]:
    """How workers are cut -> per case of SITE_CASES what each rank has."""
    every = {"one rank": (2, ()), **SITES}
    found: dict[str, list[list[Trained]]] = {name: [] for name in every}
    for num_ranks in (2, 4, 8):
        names = [name for name, (count, _) in every.items() if count == num_ranks]
        cases = [
            (*case, "layout.dp=2", *every[name][1])
            for name in names
            for case in SITE_CASES.values()
        ]
        per_rank = run_ranks(_train_all, num_ranks, cases)
        for at, of_case in enumerate(zip(*per_rank, strict=True)):
            found[names[at // len(SITE_CASES)]].append(list(of_case))
    return found


@pytest.fixture(scope="module")
def linear() -> dict[str, list[list[Trained]]]:
    """How workers are cut -> what each rank has that meets in every step, and as a replica."""
    every = {"one rank": (2, ()), **SITES}
    found = {}
    for name, (num_ranks, cut) in every.items():
        cases = [(*SGD, *PLAIN, *cut), (*SGD, *cut)]
        per_rank = run_ranks(_train_all, num_ranks, cases)
        found[name] = [list(of_case) for of_case in zip(*per_rank, strict=True)]
    return found


def _simulate(case: Sequence[str]) -> tuple[list[float], dict[str, Tensor]]:
    """The same in one process: losses, and the parameters of all workers at the end."""
    job = job_of(NUM_WORKERS, [*DP, *case])
    local = job.comm.local
    alone = [o for o in (*DP[1:], *case) if not o.startswith("comm.")]
    serial = job_of(1, [*alone, "train.global_batch=8"])
    workers = [trainer_of(serial, Ranks()) for _ in range(NUM_WORKERS)]
    names = list(_parameters(workers[0]))
    number_of = {name: _fragment_of(name) % local.fragments for name in names}
    is_local_sgd = local.method == "local_sgd"
    shared = {name: value.requires_grad_() for name, value in _parameters(workers[0]).items()}
    beta = 0.0 if is_local_sgd else local.outer_momentum
    lr = 1.0 if is_local_sgd else local.outer_lr
    outer = {n: torch.optim.SGD([shared[n]], lr, beta, nesterov=beta > 0) for n in names}
    on_the_way: dict[str, Tensor] = {}
    losses = []

    def send(name: str) -> None:
        now = torch.stack([_parameters(worker)[name] for worker in workers])
        on_the_way[name] = shared[name].detach() - now.mean(0)

    def take(name: str, keep: float) -> None:
        shared[name].grad = on_the_way.pop(name)
        outer[name].step()
        for worker in workers:
            own = dict(worker.module.named_parameters())[name].data
            own.copy_(keep * own + (1 - keep) * shared[name].detach())

    for step in range(NUM_STEPS):
        results = [
            worker.step(step, micro_batches(step, job, rank))()
            for rank, worker in enumerate(workers)
        ]
        losses.append(sum(result.loss for result in results) / NUM_WORKERS)
        done = step + 1
        for name in names:
            left = done - local.overlap_steps - number_of[name] * local.every // local.fragments
            if name in on_the_way and left % local.every == 0:
                take(name, 0.5)
            if (done - number_of[name] * local.every // local.fragments) % local.every == 0:
                send(name)
                if not local.overlap_steps:
                    take(name, 0.0)
    for name in names:
        if name in on_the_way:
            take(name, 0.5)
        send(name)
        take(name, 0.0)
    return losses, {name: shared[name].detach() for name in names}


def _fragment_of(name: str) -> int:
    """Layer of a parameter; embeddings go with the first, head and last norm with the last."""
    if name.startswith("blocks."):
        return int(name.split(".")[1])
    return 0 if "embed" in name else 3


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] == FP64[0]])
def test_workers_equal_a_simulation_of_them_in_one_process(name, trained):
    losses, parameters = _simulate(CASES[name])
    for worker in trained[name]:
        assert worker.losses == pytest.approx(losses, rel=0, abs=1e-10)
        for key, value in parameters.items():
            torch.testing.assert_close(worker.parameters[key], value, rtol=0, atol=1e-10)


def test_streaming_in_one_fragment_without_overlap_is_diloco(trained):
    for diloco, streaming in zip(trained["DiLoCo"], trained["one fragment"], strict=True):
        assert diloco.losses == streaming.losses
        for key, value in diloco.parameters.items():
            assert torch.equal(streaming.parameters[key], value), key


@pytest.mark.parametrize("case", SITE_CASES)
@pytest.mark.parametrize("name", SITES)
def test_workers_of_several_ranks_equal_those_of_one(name, case, sites):
    at, is_exact = list(SITE_CASES).index(case), case != "int8"
    whole, *_ = sites["one rank"][at]
    # The blocks of a codec are a rank's own.
    loss, norm, parameter = (1e-12, 1e-12, 1e-12) if is_exact else (1e-3, 1e-2, 1e-2)
    for rank in sites[name][at]:
        assert rank.losses == pytest.approx(whole.losses, rel=loss)
        assert rank.grad_norms == pytest.approx(whole.grad_norms, rel=norm)
        for key, value in whole.parameters.items():
            torch.testing.assert_close(rank.parameters[key], value, rtol=0, atol=parameter)


@pytest.mark.parametrize("name", ["one rank", *SITES])
def test_plain_means_in_every_step_are_replicas(name, linear):
    met, replicas = linear[name]
    for worker, replica in zip(met, replicas, strict=True):
        assert worker.losses == pytest.approx(replica.losses, rel=1e-12)
        for key, value in replica.parameters.items():
            torch.testing.assert_close(worker.parameters[key], value, rtol=0, atol=1e-12)
            assert not torch.equal(worker.before_last[key], value), key


@pytest.mark.parametrize("name", SITES)
def test_what_several_ranks_send_compressed_leaves_the_same_bits_in_all_workers(name, sites):
    first, *others = sites[name][list(SITE_CASES).index("int8")]
    for other in others:
        for key, value in first.parameters.items():
            assert torch.equal(other.parameters[key], value), key


def test_a_rank_sends_the_shards_that_it_holds(sites):
    whole, of_shards = (sites[name][0][0].sent_bytes for name in ("one rank", "shards"))
    assert of_shards == pytest.approx([num_bytes / 2 for num_bytes in whole], rel=1e-3)


@pytest.mark.parametrize("name", ["int8", "int4, late"])
def test_what_travels_compressed_leaves_the_same_bits_everywhere(name, trained):
    first, *others = trained[name]
    for other in others:
        for key, value in first.parameters.items():
            assert torch.equal(other.parameters[key], value), key
            assert not torch.equal(other.before_last[key], first.before_last[key]), key


def test_int8_is_near_the_exact_mean_and_a_quarter_of_its_bytes(trained):
    coded, exact = trained["int8"][0], trained["exact"][0]
    assert coded.losses == pytest.approx(exact.losses, rel=1e-3)
    assert coded.losses != exact.losses
    assert sum(coded.sent_bytes) < 0.3 * sum(exact.sent_bytes)


def test_bytes_are_those_of_an_all_reduce_once_a_round(trained):
    worker = trained["exact"][0]
    num_bytes = 4 * sum(value.numel() for value in worker.parameters.values())
    once = pytest.approx(2 * (NUM_WORKERS - 1) / NUM_WORKERS * num_bytes, abs=1)
    assert worker.sent_bytes == [0, 0, 0, once, 0, 0, once]


def test_fragments_take_turns():
    table = RoundSchedule.of(
        LocalUpdates(method="streaming", every=8, fragments=4, overlap_steps=3)
    )
    sent = {n: [d for d in range(1, 20) if table.is_sent(n, d)] for n in range(4)}
    assert sent == {0: [8, 16], 1: [2, 10, 18], 2: [4, 12], 3: [6, 14]}
    assert [d for d in range(1, 20) if table.is_taken(0, d)] == [11, 19]
    assert [d for d in range(1, 20) if table.is_round(d)] == [8, 16]


def test_fragments_are_strided_layers_and_hold_every_parameter_once():
    decoder = Decoder(job_of(1, []).model)
    names = {parameter: name for name, parameter in decoder.named_parameters()}
    fragments = fragments_of(decoder, names, 2)
    assert sorted(name for each in fragments for name in each) == sorted(names.values())
    for number, fragment in enumerate(fragments):
        assert {_fragment_of(name) % 2 for name in fragment} == {number}
    with pytest.raises(InputError, match="fragments = 5 but the network has 4 layers"):
        fragments_of(decoder, names, 5)


def test_the_outer_step_is_torchs():
    start, ours, momentum = torch.randn(3, 5, dtype=torch.float64).unbind()
    theirs = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs], 0.7, 0.9, nesterov=True)
    ours, momentum = start.clone(), torch.zeros_like(momentum)
    for gradient in torch.randn(4, 5, dtype=torch.float64):
        theirs.grad = gradient
        optimizer.step()
        outer_step(ours, momentum, gradient, 0.7, 0.9)
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-14)
