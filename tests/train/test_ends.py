"""How a run ends that a script started in the background, and what helps it: the processes that
ranks are forked from, the workers of data loaders, and those of the compiler."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest
import torch
from torch._inductor.compile_worker.subproc_pool import SubprocPool
from torch.utils.data import DataLoader

from paceline import cli
from paceline.comm import forkserver_start
from paceline.comm.forkserver_start import TRAINING, warm_up_ranks
from paceline.config.elastic import Elastic
from paceline.config.errors import InputError
from paceline.observe.run import Run
from paceline.train.stopping import StopRequest, shield_compile_workers
from tests.command_line import Started, metrics, ranks, write_tiny_job

# The time that a busy machine may take for what should take a moment.
PATIENCE_S = 60.0


def test_a_run_that_ignores_sigint_by_birth_can_be_interrupted(tmp_path):
    """As a shell without job control starts what is put into the background."""
    write_tiny_job(tmp_path)
    command = ("train", "job.toml", "--set=train.steps=1000000", *ranks(2))
    process = Started(["-m", "tests.train.ignoring", *command], tmp_path, num_outputs=1)
    while len(metrics(tmp_path)) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "checkpoint kept" in output


_LEAVING = """
import os, signal, sys
from paceline.config.elastic import Elastic
from paceline.config.errors import StoppedInTimeError
from paceline.elastic.signals import leaving_until_begun

class Last:  # goes when Python has given signals their first meaning back
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

last = Last()
if sys.argv[1] == "command":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
settings = {} if sys.argv[1] == "stop file" else {"min_nodes": 1}
with leaving_until_begun(Elastic(**settings), print) as begin:
    begin()
    raise StoppedInTimeError
"""


@pytest.mark.parametrize("who", ["command", "script", "stop file"])
def test_a_second_notice_while_python_leaves_does_not_change_the_exit_code(who):
    assert subprocess.run([sys.executable, "-c", _LEAVING, who], timeout=60).returncode == 75


_HELPED = """
import subprocess, sys
helper = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
helper.stdout.readline()
print(helper.pid, flush=True)
helper.wait()
"""
_HELPER = (
    "import paceline.comm.forkserver_process, time; print('ready', flush=True); time.sleep(600)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_helper_ignores_signals_and_ends_with_who_started_it():
    program = [sys.executable, "-c", _HELPED, _HELPER]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as helped:
        assert helped.stdout is not None
        helper = psutil.Process(int(helped.stdout.readline()))
        helper.send_signal(signal.SIGTERM)
        helper.send_signal(signal.SIGINT)
        with pytest.raises(psutil.TimeoutExpired):
            helper.wait(0.5)
        helped.kill()
        helper.wait(PATIENCE_S)


def test_the_process_that_ranks_are_forked_from_is_made_a_helper_first(monkeypatch):
    server = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "ensure_running", lambda: None)
    monkeypatch.setattr("multiprocessing.set_forkserver_preload", server.set_forkserver_preload)
    warm_up_ranks(TRAINING)
    assert server._preload_modules == ["paceline.comm.forkserver_process", TRAINING]


_WARM = """
import signal
from paceline.comm.forkserver_start import warm_up_ranks

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
warm_up_ranks("json")
print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def test_a_notice_is_kept_while_the_process_that_ranks_are_forked_from_starts():
    program = [sys.executable, "-c", _WARM]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == ["True"]


@pytest.mark.parametrize(("world_size", "starts_ranks"), [(None, True), ("1", True), ("2", False)])
@pytest.mark.parametrize("command", ["train", "tune"])
def test_only_a_process_that_starts_ranks_makes_them_ready(
    command, world_size, starts_ranks, monkeypatch
):
    modules = []
    monkeypatch.setattr(forkserver_start, "warm_up_ranks", modules.append)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_given: set())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    if world_size is not None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(InputError):
        getattr(cli, command)(Path("no such job.toml"))
    assert len(modules) == starts_ranks


def test_data_workers_live_on_when_a_signal_asks_for_a_stop(tmp_path):
    stop = StopRequest(Run(tmp_path), Elastic())
    try:
        data = torch.arange(64)
        loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
        batches = iter(loader)
        got = [next(batches)]
        for worker in batches._workers:
            os.kill(worker.pid, signal.SIGTERM)
            os.kill(worker.pid, signal.SIGINT)
        got += list(batches)
    finally:
        stop.close()
    assert torch.equal(torch.cat(got), data)
    assert not stop


def test_compile_workers_live_on_when_a_signal_asks_for_a_stop(monkeypatch):
    monkeypatch.setattr(SubprocPool, "__init__", SubprocPool.__init__)  # given back afterwards
    shield_compile_workers()
    pool = SubprocPool(1)
    try:
        worker = pool.submit(os.getpid).result(timeout=120)
        for pid in (pool.process.pid, worker):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert pool.submit(os.getpid).result(timeout=120) == worker
    finally:
        pool.shutdown()
    assert pool.process.wait(timeout=300) == 0
    assert not {signal.SIGTERM, signal.SIGINT} & signal.pthread_sigmask(signal.SIG_BLOCK, ())
