"""What the planner says is sent, against what ranks send: collectives of one micro-batch, counted.

Four gloo ranks run a small decoder under tensor parallelism and in rings, with every kind of
recompute; the profiler says which collectives they called. The planner's lists name as many. Pure
first: nothing is started for what no layout repeats.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from paceline.config.model import Model
from paceline.kernels import loss as losses
from paceline.models.attention import Sdpa
from paceline.models.decoder import Decoder
from paceline.parallel import tp, vocabulary
from paceline.parallel.cp import context_groups, make_attend, positions_of
from paceline.parallel.recompute import recompute
from paceline.plan.points import Points
from paceline.plan.price.parts import Sent as Priced
from paceline.plan.price.parts import num_waits, recomputed_collectives
from tests.plan.planned import layout, setting
from tests.plan.test_work import works
from tests.ranks import run_ranks

RANKS, SEQ, VOCAB = 4, 16, 72
MODEL = Model(
    vocab_size=VOCAB,
    hidden_size=32,
    ffn_size=48,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    max_seq_len=SEQ,
)
AXES = {
    "columns": {"tp": 4},
    "sequence": {"tp": 4, "sequence_parallel": True},
    "ring of four": {"cp": 4},
    "rings of two": {"cp": 4, "ulysses": 2},
    "heads": {"cp": 4, "ulysses": 4},
}
# Every axis without and with recompute; every kind of recompute under every kind of collective.
RECOMPUTE = {
    "columns": ("none", "selective", "full"),
    "sequence": ("none", "selective"),
    "ring of four": ("none", "selective"),
    "rings of two": ("full",),
    "heads": ("none", "full"),
}
CASES = [(name, kind) for name, kinds in RECOMPUTE.items() for kind in kinds]
OPERATORS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "gloo:all_gather": "all_gather",
    "gloo:all_to_all": "all_to_all",
    "gloo:send": "send_recv",
}
"""The innermost names that say which: gloo adds up to scatter, and selective recompute's contexts
pass on what is called, so that outer names occur twice."""


class Sent(NamedTuple):
    """Collectives by kind; "batch": what a ring sends at once."""

    forward: Counter[str]
    backward: Counter[str]


def _network(axes: dict[str, int], kind: str) -> tuple[Decoder, Tensor]:
    """The network of this rank, and which tokens it sees."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp" if "tp" in axes else "cp",))
    if "tp" in axes:
        network, mine = Decoder(MODEL), torch.arange(SEQ)
        tp.tensor_parallel(
            network, network.placements(), mesh, axes.get("sequence_parallel", False)
        )
    else:
        ulysses = axes.get("ulysses", 1)
        attend = make_attend(Sdpa(), context_groups(mesh, ulysses))
        network = Decoder(MODEL, attend)
        mine = positions_of(SEQ, axes["cp"] // ulysses, ulysses, mesh.get_local_rank())
    recompute(network, kind)
    network.init_weights(torch.Generator().manual_seed(7))
    return network, mine


def _counted(act):
    batch, batches = dist.batch_isend_irecv, Counter()

    def counted_batch(operations):
        batches["batch"] += 1
        return batch(operations)

    dist.batch_isend_irecv = counted_batch
    with torch.profiler.profile() as recorded:
        result = act()
    dist.batch_isend_irecv = batch
    names = [event.name for event in recorded.events()]
    return result, Counter(OPERATORS[name] for name in names if name in OPERATORS) + batches


def _sent(_rank: int, _world_size: int) -> dict[tuple[str, str], Sent]:
    found = {}
    for name, axes in AXES.items():
        for kind in RECOMPUTE[name]:
            network, mine = _network(axes, kind)
            tokens = torch.randint(VOCAB, (1, SEQ), generator=torch.Generator().manual_seed(1))
            tokens = tokens[:, mine]
            entropy = vocabulary.cross_entropy if "tp" in axes else losses.cross_entropy

            def forward(network=network, tokens=tokens, mine=mine, entropy=entropy):
                return entropy(network(tokens, None, mine), tokens)

            loss, ahead = _counted(forward)
            _, back = _counted(loss.backward)
            found[name, kind] = Sent(ahead, back)
    return found


def _listed(axes: dict[str, int], kind: str) -> list[tuple[int, Priced, Priced]]:
    """What the planner's lists say of the same: of each part how often it occurs, and what it sends
    forward and backward; every message takes a second.
    """
    given, laid = setting(MODEL, seq_len=SEQ), layout(**axes, recompute=kind)
    points, found = Points.of([laid], given), []
    for count, work in works(given, **axes, recompute=kind):
        own = [(exchange, np.ones(1)) for exchange in work.exchanges]
        ahead = [(exchange, s) for exchange, s in own if not exchange.backward]
        back = [(exchange, s) for exchange, s in own if exchange.backward]
        found.append((count, ahead, [*back, *recomputed_collectives(points, own)]))
    return found


def _num_calls(count: int, sent: Priced) -> Counter[str]:
    calls: Counter[str] = Counter()
    for exchange, _ in sent:
        if np.max(exchange.num_ranks) > 1:
            calls[exchange.op] += count * int(np.max(exchange.times))
    return calls


def _passes(name: str, kind: str) -> tuple[list[tuple[int, Priced]], list[tuple[int, Priced]]]:
    """Forward and backward: how often each part occurs, and what it sends."""
    parts = _listed(AXES[name], kind)
    return [(n, ahead) for n, ahead, _ in parts], [(n, back) for n, _, back in parts]


@pytest.fixture(scope="module")
def sent() -> dict[tuple[str, str], Sent]:
    return run_ranks(_sent, RANKS)[0]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_lists_name_as_many_collectives_as_ranks_call(name, kind, sent):
    for listed, called in zip(_passes(name, kind), sent[name, kind], strict=True):
        calls = sum((_num_calls(count, part) for count, part in listed), Counter())
        assert +calls == Counter({op: n for op, n in called.items() if op != "batch"})


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if "cp" in AXES[case[0]]])
def test_the_host_waits_once_for_what_a_ring_sends_together(name, kind, sent):
    for listed, called in zip(_passes(name, kind), sent[name, kind], strict=True):
        waits = sum(count * float(np.max(num_waits(part))) for count, part in listed)
        assert waits == called["batch"] + called["all_to_all"]
