"""An engine over ranks of this machine, in a test."""

import tempfile
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.generate.ranks import Others, follow, part_of
from tests.generate.networks import MODELS, built
from tests.ranks import run_ranks

PATIENCE_S = 400.0
"""Four ranks on two cores that others use as well."""


def on_ranks(
    do: Callable[..., Any],
    name: str,
    tp: int,
    ep: int,
    *args: Any,
    dtype: torch.dtype = torch.float64,
) -> Any:
    """What `do(new_engine, *args)` returns on the first of tp x ep ranks.

    Args:
        do: of a module; new_engine(serving) is an engine of the network over all ranks.
        name: of the network.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder) / "socket")
        return run_ranks(
            _rank, tp * ep, place, do, name, tp, ep, dtype, args, timeout_s=PATIENCE_S
        )[0]


def _rank(
    rank: int,
    num_ranks: int,
    place: str,
    do: Callable[..., Any],
    name: str,
    tp: int,
    ep: int,
    dtype: torch.dtype,
    args: tuple[Any, ...],
) -> Any:
    part = part_of(MODELS[name], dtype, tp, ep, torch.device("cpu"))
    if rank:
        dist.barrier()
        return follow(Client(place), part)
    with Listener(place, "AF_UNIX", backlog=num_ranks) as listener:
        dist.barrier()
        others = Others([listener.accept() for _ in range(1, num_ranks)])
    others.take_weights(part, [built(MODELS[name], dtype).state_dict()])

    def new_engine(serving: Serving) -> Engine:
        return Engine(part, serving.replace(tp=tp, ep=ep), others=others)

    try:
        return do(new_engine, *args)
    finally:
        others.close()
