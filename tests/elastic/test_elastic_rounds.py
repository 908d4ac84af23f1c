"""A worker that is lost in a round: what the others then agree on, in real processes; handovers."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.config.comm import LocalUpdates
from paceline.elastic.elastic_rounds import ElasticRounds
from paceline.elastic.membership import Membership
from paceline.elastic.state_transfer import receive_state, send_state
from paceline.models.decoder import Decoder
from tests.parallel.training import FP64, job_of
from tests.ranks import WARM, run_ranks

LR, BETA, NUM_STEPS = 0.7, 0.9, 3
TIMEOUT_S = 2.0


def _module() -> nn.Module:
    decoder = Decoder(job_of(1, FP64).model)
    decoder.init_weights(torch.Generator().manual_seed(0))
    return decoder.double()


def _values(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def _change(rank: int, step: int, num_values: int) -> torch.Tensor:
    """What a worker's step changes."""
    stream = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(num_values, generator=stream, dtype=torch.float64)


def _work(folder: str, rank: int, compress: str) -> None:
    """Three steps with a round each, before the second of which worker 2 is gone."""
    torch.set_num_threads(1)
    here, kept = Path(folder), {}
    store = dist.FileStore(str(here / "store"), -1)
    membership = Membership(store, rank, TIMEOUT_S, 2, print)
    module = _module()
    names = {parameter: name for name, parameter in module.named_parameters()}
    local = LocalUpdates(method="diloco", every=1, outer_lr=LR, outer_momentum=BETA)
    local = local.replace(compress=compress, min_workers=2)
    rounds = ElasticRounds(module, names, local, 512, membership, 3, NUM_STEPS)
    if rank == 0:
        membership.open(3, wait_s=20)
        rounds.welcome(dict)
    else:
        rounds.join(torch.device("cpu"))
    for step in range(NUM_STEPS):
        if (rank, step) == (2, 1):
            os._exit(1)
        change = _change(rank, step, _values(module).numel())
        sizes = [parameter.numel() for parameter in module.parameters()]
        for parameter, part in zip(module.parameters(), change.split(sizes), strict=True):
            parameter.data.add_(part.view_as(parameter))
        rounds.after_step(step + 1)
        kept[step] = {"values": _values(module), **copy.deepcopy(rounds.state())}
        summed, num_workers = rounds.sum_up(torch.tensor([1.0 + rank]), ends_round=True)
        kept[step] |= {"summed": summed.item(), "num_workers": num_workers}
        rounds.welcome(dict)
    membership.close()
    torch.save(kept, here / f"kept-{rank}.pt")


def _two_that_are_left(folder: Path, compress: str) -> list[dict[int, dict[str, Any]]]:
    workers = [
        WARM.Process(target=_work, args=(str(folder), rank, compress), daemon=True)
        for rank in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 1]
    return [torch.load(folder / f"kept-{rank}.pt") for rank in range(2)]


def test_a_round_is_repeated_with_the_whole_changes_of_those_who_are_left(tmp_path):
    left = _two_that_are_left(tmp_path, "none")
    start = _values(_module())
    momentum = torch.zeros_like(start)
    for step, ranks in enumerate([(0, 1, 2), (0, 1), (0, 1)]):
        mean = -sum(_change(rank, step, start.numel()) for rank in ranks) / len(ranks)
        momentum = BETA * momentum + mean
        start = start - LR * (mean + BETA * momentum)
        for worker in left:
            torch.testing.assert_close(worker[step]["values"], start, rtol=0, atol=1e-10)
            assert worker[step]["summed"] == sum(1.0 + rank for rank in ranks)
            assert worker[step]["num_workers"] == len(ranks)


def _owed(worker: dict[str, Any], names: list[str]) -> torch.Tensor:
    """By name, as one: what was not compressed owes nothing."""
    (errors,) = worker["error"].values()
    zeros = {name: torch.zeros_like(worker["start"][name]).reshape(-1) for name in names}
    return torch.cat([errors.get(name, zeros[name]) for name in names])


def test_what_compression_owes_is_that_of_the_repeated_round(tmp_path):
    left = _two_that_are_left(tmp_path, "int8")
    module = _module()
    names = [name for name, _ in module.named_parameters()]
    momenta = [
        torch.cat([left[0][step]["momentum"][name].reshape(-1) for name in names])
        for step in range(NUM_STEPS)
    ]
    for step in (1, 2):
        sent = momenta[step] - BETA * momenta[step - 1]
        meant = -sum(_change(rank, step, sent.numel()) for rank in range(2)) / 2
        before, after = (sum(_owed(worker[s], names) for worker in left) for s in (step - 1, step))
        torch.testing.assert_close(sent + after, meant + before, rtol=0, atol=1e-10)
        assert after.norm() > 0
        assert torch.equal(left[0][step]["values"], left[1][step]["values"])


def _hand_over(rank: int, _world_size: int, state: dict[str, Any]) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    if rank == 0:
        send_state(state, group)
        return {}
    return receive_state(group, torch.device("cpu"), keep=rank == 2)


def test_a_state_is_handed_over_whole():
    state = {
        "step": 7,
        "is_over": False,
        "model": {
            "a.b": torch.randn(3, 5).t(),
            "half": torch.randn(4).bfloat16(),
            "count": torch.tensor(9),
            "none": torch.empty(0, 2),
        },
        "settings": {"inner": {"betas": [0.9, 0.95], "name": "adam"}},
    }
    _, bystander, taken = run_ranks(_hand_over, 3, state)
    assert bystander == {}
    assert taken.pop("model").keys() == state["model"].keys()
    for name, tensor in run_ranks(_hand_over, 3, state)[2]["model"].items():
        torch.testing.assert_close(tensor, state["model"][name], rtol=0, atol=0)
    assert taken == {key: value for key, value in state.items() if key != "model"}


@pytest.mark.parametrize("compress", ["none", "int8"])
def test_a_worker_says_without_how_many_they_go_on(compress):
    module = _module()
    names = {parameter: name for name, parameter in module.named_parameters()}
    local = LocalUpdates(method="local_sgd", every=9, compress=compress, min_workers=2)
    membership = Membership(dist.HashStore(), 0, TIMEOUT_S, 2, print)
    rounds = ElasticRounds(module, names, local, 512, membership, 3, 10)
    form = "exactly" if compress == "none" else "as int8"
    assert rounds.describe() == (
        f"3 workers step each for itself (local_sgd); what they changed travels {form} every 9 "
        "steps. They go on while at least 2 are left."
    )
