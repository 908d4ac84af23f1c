"""Pull and push of embedding rows: our servers, torch.distributed.rpc's pattern, all-to-all.

    python -m benchmarks.parameter_server [--rows 100000] [--batch 4096] [--rounds 15]

Two workers; two servers, or the tables on the workers themselves. A step is the pull of the rows of
a batch and the push of as many gradients, applied by row-wise Adagrad: no network is trained, so
that the exchange alone is timed. All three hold the same rows and read the same ids. The rpc
variant is the parameter server of PyTorch's tutorials as a table: `rpc_sync` to a method of an
object on the server, one call per server in parallel, ids deduplicated by the worker as ours are.
Variants alternate, round by round; medians and the range of rounds are printed and written to
benchmarks/results/<device>/parameter_server.json.
"""

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import rpc

from benchmarks.provenance import RESULTS, folder_of, keep, taken_with
from paceline.comm.rendezvous import Ranks
from paceline.config.recommender import Clicks, Dlrm, RowOptim
from paceline.recommender.click_log import samples
from paceline.recommender.parameter_server.all_to_all import AllToAllTables
from paceline.recommender.parameter_server.consistent_hash import Numbering, RowPlacement
from paceline.recommender.parameter_server.rows import RowStore
from paceline.recommender.parameter_server.serve import ServerSettings
from paceline.recommender.parameter_server.start import start_servers
from paceline.recommender.parameter_server.tables import ServedTables, ServerPlan

NUM_WORKERS = NUM_SERVERS = 2
NUM_TABLES, DIM, LR = 8, 16, 0.05
LAGS = {"synchronous": 0, "stale": 2, "stale, cached": 2, "asynchronous": None}
VARIANTS = (*LAGS, "rpc", "all_to_all")


class RpcShard:
    """A server's rows, behind torch.distributed.rpc."""

    shard: "RpcShard"

    def __init__(self, placement: RowPlacement, server: int) -> None:
        ids = placement.ids_of(server)
        self.store = RowStore(placement.numbering, ids, DIM, 0, RowOptim())

    @staticmethod
    def pull(ids: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(RpcShard.shard.store.read(ids.numpy()))

    @staticmethod
    def push(ids: torch.Tensor, gradients: torch.Tensor) -> None:
        RpcShard.shard.store.update(ids.numpy(), gradients.numpy(), LR)


class RpcTables:
    """The worker's side of the rpc variant, with the methods of `Tables` that are timed."""

    def __init__(self, placement: RowPlacement) -> None:
        self.placement, self.lent = placement, None

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        numbered = ids.numpy() + self.placement.numbering.offsets[:-1]
        distinct, inverse = np.unique(numbered, return_inverse=True)
        server = self.placement.server_of(distinct)
        self.places = [np.flatnonzero(server == k) for k in range(NUM_SERVERS)]
        asked = [
            rpc.rpc_async(f"server{k}", RpcShard.pull, (torch.from_numpy(distinct[place]),))
            for k, place in enumerate(self.places)
        ]
        values = torch.empty(len(distinct), DIM)
        for place, answer in zip(self.places, asked, strict=True):
            values[torch.from_numpy(place)] = answer.wait()
        self.distinct, self.leaf = distinct, values.requires_grad_()
        places = torch.from_numpy(inverse.reshape(ids.shape))
        return torch.nn.functional.embedding(places, self.leaf)

    def finish(self, lr: float, *, skip: bool) -> None:
        asked = [
            rpc.rpc_async(
                f"server{k}",
                RpcShard.push,
                (
                    torch.from_numpy(self.distinct[place]),
                    self.leaf.grad[torch.from_numpy(place)] / NUM_WORKERS,
                ),
            )
            for k, place in enumerate(self.places)
        ]
        for answer in asked:
            answer.wait()


def served(variant: str, rank: int, model: Dlrm, folder: Path) -> ServedTables:
    """Our servers in one of their modes, opened."""
    lag = LAGS[variant]
    cache_rows = model.num_rows // 20 if "cached" in variant else 0
    serving = ServerPlan(
        RowPlacement(model.tables, NUM_SERVERS), DIM, NUM_WORKERS, rank, lag, cache_rows, 2, 60.0
    )
    settings = ServerSettings(
        server=0,
        num_servers=NUM_SERVERS,
        num_workers=NUM_WORKERS,
        tables=model.tables,
        dim=DIM,
        seed=0,
        optim=RowOptim().model_dump(),
        lag=lag,
        checkpoint_every=10**9,
        folder="",
        run_checkpoints="",
        host="",
        timeout_s=60.0,
        key="",
    )
    ranks = Ranks(rank, NUM_WORKERS, rank, NUM_WORKERS)
    tables = ServedTables(
        serving,
        lambda folder, runs, say: start_servers(settings, ranks, folder, runs, say),
        torch.device("cpu"),
    )
    tables.open(folder, folder, print)
    tables.load(0)
    return tables


def work(rank: int, model: Dlrm, arguments: argparse.Namespace, folder: Path, port: int) -> None:
    """One worker: every variant in every round."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), NUM_WORKERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_WORKERS)
    join_rpc(f"worker{rank}", NUM_SERVERS + rank, port)
    all_to_all = AllToAllTables(
        Numbering(model.tables), DIM, 0, RowOptim(), rank, NUM_WORKERS, torch.device("cpu")
    )
    tables = {name: served(name, rank, model, folder) for name in LAGS}
    tables |= {"rpc": RpcTables(RowPlacement(model.tables, NUM_SERVERS)), "all_to_all": all_to_all}
    share = arguments.batch // NUM_WORKERS
    made = [
        samples(model, Clicks(), 0, np.arange(n, n + share) + rank * share).ids
        for n in range(0, arguments.steps * arguments.batch, arguments.batch)
    ]
    batches = [torch.from_numpy(ids) for ids in made]
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(arguments.rounds + 1):
        for name in VARIANTS:
            seconds = timed(tables[name], batches)
            if number:  # the first round is a warm-up
                times[name].append(seconds / len(batches))
    for name in LAGS:
        tables[name].close()
    if rank == 0:
        distinct = [len(np.unique(ids + Numbering(model.tables).offsets[:-1])) for ids in made]
        (folder / "times.json").write_text(json.dumps([times, statistics.mean(distinct)]))
    rpc.shutdown()
    dist.destroy_process_group()


def timed(tables: object, batches: list[torch.Tensor]) -> float:
    """Seconds that pulls and pushes of these batches take, on both workers."""
    dist.barrier()
    began = time.perf_counter()
    for ids in batches:
        tables.rows(ids).sum().backward()
        tables.finish(LR, skip=False)
    if isinstance(tables, ServedTables):
        tables._connected().settle()
    dist.barrier()
    return time.perf_counter() - began


def join_rpc(name: str, rank: int, port: int) -> None:
    """Join the group of servers and workers."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=60)
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    rpc.init_rpc(name, rank=rank, world_size=NUM_SERVERS + NUM_WORKERS, rpc_backend_options=options)


def process(
    number: int, model: Dlrm, arguments: argparse.Namespace, folder: str, port: int
) -> None:
    """A server of the rpc variant, or a worker."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # rpc warns about its own use of deprecated interfaces
    if number < NUM_SERVERS:
        RpcShard.shard = RpcShard(RowPlacement(model.tables, NUM_SERVERS), number)
        join_rpc(f"server{number}", number, port)
        rpc.shutdown()
    else:
        work(number - NUM_SERVERS, model, arguments, Path(folder), port)


def free_port() -> int:
    """A port nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main() -> None:
    """Measure, print a table and write it down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000, help="of all tables")
    parser.add_argument("--batch", type=int, default=4096, help="samples of both workers")
    parser.add_argument("--steps", type=int, default=10, help="of one variant in one round")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    about = taken_with("benchmarks.parameter_server")
    tables = (arguments.rows // NUM_TABLES,) * NUM_TABLES
    model = Dlrm(family="dlrm", tables=tables, dim=DIM, num_dense=1)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(
            process, (model, arguments, folder, free_port()), NUM_SERVERS + NUM_WORKERS, join=True
        )
        times, distinct = json.loads((Path(folder) / "times.json").read_text())
    report(arguments, about, times, distinct)


def report(
    arguments: argparse.Namespace,
    about: dict[str, Any],
    times: dict[str, list[float]],
    distinct: float,
) -> None:
    """Rows pulled and pushed a second by both workers, with the range of rounds."""
    touched = arguments.batch * NUM_TABLES
    print(f"{arguments.batch} samples x {NUM_TABLES} tables of {DIM} values, {arguments.rows} rows")
    print(f"of a worker's {touched // NUM_WORKERS} rows a step {distinct:.0f} are distinct\n")
    print(f"{'variant':16}{'ms a step':>10}{'range':>16}{'M rows/s':>10}{'to rpc':>8}")
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        span = f"{min(values) * 1e3:.1f}-{max(values) * 1e3:.1f}"
        rate, ratio = touched / medians[name] / 1e6, medians["rpc"] / medians[name]
        print(f"{name:16}{medians[name] * 1e3:10.2f}{span:>16}{rate:10.2f}{ratio:8.2f}")
    settings = {"rows": arguments.rows, "batch": arguments.batch, "steps": arguments.steps}
    result = about | {"settings": settings, "distinct": distinct, "seconds": times}
    keep(folder_of(RESULTS, about), "parameter_server", result)


if __name__ == "__main__":
    main()
