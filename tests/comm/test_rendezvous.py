"""Whose place a process takes, and what machine it is on (pure, one process)."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore

from paceline.comm import rendezvous as meeting
from paceline.comm.rendezvous import (
    LOOPBACK,
    Ranks,
    connect,
    first_host,
    hold_store,
    ranks_from_env,
    rendezvous_address,
    store_of_generation,
    store_of_run,
    word_from_first_rank,
)
from paceline.config.errors import InputError, RunError
from paceline.config.job import read_job
from paceline.elastic import peer_failure
from paceline.machine.discovery import num_cores, num_cpu_ranks, this_machine
from paceline.observe.run import Run
from paceline.train import session
from paceline.train.failure import LostPeerError
from paceline.train.stopping import StopRequest
from tests.ranks import WARM

HIGH_PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def _set(monkeypatch, **values):
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_a_process_started_by_hand_has_no_place():
    assert ranks_from_env("cpu") is None


def test_torchruns_place(monkeypatch):
    _set(monkeypatch, RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    assert ranks_from_env("cuda") == Ranks(5, 8, 1, 4, "cuda")


def test_sruns_place(monkeypatch):
    _set(
        monkeypatch,
        SLURM_STEP_NUM_TASKS="16",
        SLURM_PROCID="9",
        SLURM_NODEID="1",
        SLURM_LOCALID="1",
        SLURM_STEP_TASKS_PER_NODE="8(x2)",
    )
    assert ranks_from_env("cpu") == Ranks(9, 16, 1, 8, "cpu")


def test_a_batch_script_of_slurm_is_no_rank(monkeypatch):
    """sbatch sets SLURM_PROCID and SLURM_NTASKS too, for its one script."""
    _set(monkeypatch, SLURM_PROCID="0", SLURM_NTASKS="16")
    assert ranks_from_env("cpu") is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-006,9],login1", "gpu003"),
        ("a,b", "a"),
        ("host", "host"),
        ("n[7,9]", "n7"),
        ("one,gpu[1-2]", "one"),
        ("node[01-03,7],gpu5", "node01"),
        ("rack[1-2]node[03-04],x", "rack1node03"),
        ("n[7-9]-ib", "n7-ib"),
    ],
)
def test_first_host_of_a_slurm_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(("cores", "ranks"), [(1, 1), (2, 2), (3, 2), (6, 4), (8, 8), (96, 8)])
def test_cpu_ranks_are_a_power_of_two(cores, ranks):
    assert num_cpu_ranks(cores) == ranks


def test_this_machine_is_concrete():
    machine = this_machine()
    assert "auto" not in vars(machine).values()
    assert machine.num_nodes == 1
    assert num_cores() >= 1
    assert machine.device.memory_bytes.origin in {"measured", "cited"}
    if machine.device.kind == "cpu":
        assert machine.device.peak("fp32") is None, "a CPU's peak is unknown, never guessed"


@pytest.mark.parametrize(("priority", "told"), [("normal", None), ("high", "1")])
def test_messages_come_first_where_the_job_says_so(monkeypatch, priority, told):
    """NCCL's streams are made later, by torch, which reads this variable."""
    monkeypatch.setattr(meeting, "store_of_run", lambda *_: HashStore())
    monkeypatch.delenv(HIGH_PRIORITY, raising=False)
    seen = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get(HIGH_PRIORITY))
    )
    connect(Ranks(1, 2, 1, 2, "cpu"), priority=priority)
    assert seen == [told]


ON_TWO_HOSTS, ON_ONE = Ranks(1, 4, 1, 2), Ranks(1, 2, 1, 2)
SLURM = {"SLURM_STEP_NODELIST": "node[01-03,7],gpu5", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("ranks", "env", "address", "port"),
    [
        (ON_TWO_HOSTS, SLURM, "node01", "24711"),
        (ON_TWO_HOSTS, {**SLURM, "MASTER_ADDR": "10.0.0.1"}, "10.0.0.1", "24711"),
        (ON_TWO_HOSTS, {**SLURM, "MASTER_PORT": "29500"}, "node01", "29500"),
        (ON_TWO_HOSTS, {**SLURM, "SLURM_STEP_ID": "1"}, "node01", "25720"),
        (ON_TWO_HOSTS, {"SLURM_NODELIST": "a,b", "SLURM_JOB_ID": "12000"}, "a", "20000"),
        (ON_ONE, SLURM, LOOPBACK, "24711"),
        (ON_TWO_HOSTS, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "a", "1"),
    ],
)
def test_where_ranks_meet_follows_from_slurms_variables(ranks, env, address, port):
    assert rendezvous_address(ranks, env) == {"MASTER_ADDR": address, "MASTER_PORT": port}


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"MASTER_PORT": "1"}, "4 ranks were started but MASTER_ADDR does not say where they meet"),
        ({"MASTER_ADDR": "a"}, "4 ranks were started but MASTER_PORT does not say where they meet"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT = 'x' is no port"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "65536"}, "MASTER_PORT = '65536' is no port"),
    ],
)
def test_ranks_that_nothing_tells_where_to_meet_are_refused(env, sentence):
    with pytest.raises(InputError, match=sentence):
        rendezvous_address(ON_TWO_HOSTS, env)


def test_a_first_host_without_a_name_ends_the_wait_in_one_sentence(monkeypatch):
    def unknown(*_address, **_limit):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    monkeypatch.setattr(meeting, "_RESOLVE_S", 0.5)
    _set(monkeypatch, MASTER_ADDR="nowhere", MASTER_PORT="1")
    began = time.monotonic()
    with pytest.raises(
        RunError, match=r"store of the run at nowhere:1 \(Name or service not known"
    ):
        store_of_run(ON_TWO_HOSTS)
    assert time.monotonic() - began < 30


def test_a_taken_port_is_said_in_one_sentence(monkeypatch):
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        _set(monkeypatch, MASTER_ADDR=LOOPBACK, MASTER_PORT=str(taken.getsockname()[1]))
        with pytest.raises(RunError, match=r"can't be opened at 127.0.0.1.*Address already in use"):
            store_of_run(Ranks(0, 4, 0, 2))


def _keep_store(end) -> None:
    store = hold_store(LOOPBACK, 0)
    end.send(store.port)
    end.recv()


@pytest.fixture
def vanished() -> Iterator[TCPStore]:
    """A store whose keeper is gone, as a client has it."""
    ours, theirs = WARM.Pipe()
    keeper = WARM.Process(target=_keep_store, args=(theirs,))
    keeper.start()
    theirs.close()
    how = {"is_master": False, "timeout": timedelta(seconds=60), "wait_for_workers": False}
    store = TCPStore(LOOPBACK, ours.recv(), **how)
    keeper.kill()
    keeper.join()
    yield store
    ours.close()


LOST = "rank 1 on .* lost another rank before the run began"


def test_ranks_whose_store_vanishes_before_the_run_begins_say_so(vanished, monkeypatch):
    monkeypatch.setattr(meeting, "_get_default_store", lambda: vanished)
    with pytest.raises(RunError, match=LOST):
        word_from_first_rank("ready", Ranks(1, 2, 0, 1))
    monkeypatch.setattr(meeting, "store_of_run", lambda *_: vanished)
    for hosts in ([], ["a", "b"]):
        with pytest.raises(RunError, match=LOST):
            connect(Ranks(1, 2, 0, 1), hosts=hosts)
    assert not dist.is_initialized()


def test_a_store_that_vanishes_as_the_run_begins_is_one_sentence(vanished, monkeypatch, tmp_path):
    monkeypatch.setattr(peer_failure, "_get_default_store", lambda: vanished)
    job, run = read_job(None), Run(tmp_path)
    stop = StopRequest(run, job.elastic)
    together = session._together(job, run, Ranks(1, 2, 0, 1), stop)
    with pytest.raises(LostPeerError, match=LOST), together:
        pass
    stop.close()


@pytest.mark.parametrize("planted", [b"\x80\x04pickle", "[" * 100_000, '"begin"', "{}"])
def test_what_no_rank_said_is_one_sentence(planted, monkeypatch):
    store = HashStore()
    monkeypatch.setattr(meeting, "_get_default_store", lambda: store)
    monkeypatch.setattr(meeting, "_RUNS", iter([0]))
    store.set("paceline/run-0/found", planted)
    with pytest.raises(RunError, match="holds at 'found' what no rank wrote"):
        word_from_first_rank("ready", Ranks(1, 2, 0, 1))


def test_a_first_rank_that_leaves_waits_until_the_others_have_heard(monkeypatch):
    store, order = HashStore(), []
    monkeypatch.setattr(meeting, "_get_default_store", lambda: store)
    monkeypatch.setattr(meeting, "_RUNS", iter([0, 0]))

    def other() -> None:
        time.sleep(0.3)
        order.append("the other")
        assert word_from_first_rank("ready", Ranks(1, 2, 0, 1)) == "refused"

    thread = threading.Thread(target=other)
    thread.start()
    assert word_from_first_rank("refused", Ranks(0, 2, 0, 1)) == "refused"
    order.append("the first")
    thread.join()
    assert order == ["the other", "the first"]


def test_a_store_listens_at_its_address_alone():
    store = hold_store("localhost", 0)
    sockets = psutil.Process().net_connections("tcp")
    listening = {one.laddr.ip for one in sockets if one.laddr.port == store.port}
    assert listening <= {LOOPBACK, "::1"}


def _join_late(folder: str, rank: int, answers) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = Ranks(rank, 2, rank, 2)
    if rank == 0:  # it has missed the other one once before
        store = HashStore()
        store.set_timeout(timedelta(seconds=0.2))
        with pytest.raises(RuntimeError):
            meeting.join_generation(ranks, store, 0.2)
        meeting.disconnect()
    meeting.join_generation(ranks, FileStore(f"{folder}/store", 2), 20.0)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    answers.put(total.item())


def test_a_rank_does_not_wait_for_the_store_of_a_generation_that_is_over():
    with socket.create_server((LOOPBACK, 0)) as closed:
        port = closed.getsockname()[1]
    asked: list[None] = []

    def is_over() -> bool:
        asked.append(None)
        return len(asked) == 3

    with pytest.raises(RunError, match="refused"):
        store_of_generation(Ranks(0, 2, 0, 2), (LOOPBACK, port), 2, 600, is_over)


def test_a_rank_that_met_nobody_meets_others_in_the_next_generation(tmp_path):
    answers = WARM.SimpleQueue()
    ranks = [WARM.Process(target=_join_late, args=(str(tmp_path), r, answers)) for r in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert [answers.get(), answers.get()] == [3.0, 3.0]
