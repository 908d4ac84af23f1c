"""Looking into ranks that hang or die: torch's debug page and flight recorder, on a run of two."""

import json
import socket
import time
import urllib.request

import psutil
import pytest
import torch
import torch.distributed as dist

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.train.debugging import debug_server, dump_flight_recorder
from tests.command_line import ranks, start_paceline, write_tiny_job
from tests.ranks import run_ranks


def _page(port: int, path: str, patience_s: float = 400) -> str:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=30) as answer:
                return answer.read().decode()
        except OSError:
            assert time.monotonic() < deadline, f"no answer after {patience_s} s"
            time.sleep(0.2)


def _listeners(port: int) -> list[int]:
    found = psutil.net_connections("tcp")
    return [each.pid for each in found if each.laddr.port == port and each.status == "LISTEN"]


def test_the_stacks_of_all_ranks_are_served_while_the_run_lasts(tmp_path):
    job, folder = write_tiny_job(tmp_path), tmp_path / "runs/tiny"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = ("train.steps=1000000", f"observe.debug_port={port}")
    process = start_paceline(
        "train", str(job), *ranks(2), *(f"--set={text}" for text in settings), folder=tmp_path
    )
    try:
        while not (folder / "metrics.jsonl").exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        text = _page(port, "stacks")
        assert text.count("train_loop") == 2
        assert "Rank 1" in text
    finally:
        process.kill()
    deadline = time.monotonic() + 30
    while _listeners(port):
        assert time.monotonic() < deadline, "the page outlives its run"
        time.sleep(0.2)


def _flight(rank, world_size, folder):
    dist.all_reduce(torch.ones(3))
    return dump_flight_recorder(folder, rank)


def test_a_rank_writes_down_its_last_collectives(tmp_path):
    files = run_ranks(_flight, 2, tmp_path)
    assert files == [tmp_path / "rank0.flight.json", tmp_path / "rank1.flight.json"]
    for file in files:
        (entry,) = json.loads(file.read_text())["entries"]
        assert entry["profiling_name"] == "gloo:all_reduce"
        assert entry["input_sizes"] == [[3]]
    assert run_ranks(_flight, 1, tmp_path / "missing") == [None]


def test_a_run_without_process_group_has_nothing_to_serve():
    with pytest.raises(InputError, match="this run has none"), debug_server(25999, Ranks()):
        pass
