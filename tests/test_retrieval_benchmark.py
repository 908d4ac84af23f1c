"""The benchmark of answers from documents, with small networks: all ways give the same answers."""

from argparse import Namespace
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("faiss")

from benchmarks.serve import retrieval, retrieval_ways
from paceline.config.serving import EndpointSettings, Retrieval, Serving
from paceline.serve.network import open_network

SMALL = {
    "vocab_size": 512,
    "hidden_size": 32,
    "ffn_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "max_seq_len": 512,
}
OPTIONS = Namespace(
    contestants=list(retrieval.CONTESTANTS[:2]),
    rates=[20.0, 60.0], seconds=[0.3, 0.3], turns=1, chunks=300, chunk=48, overlap=8, k=3,
    tokens=8, kv_gb=0.01, memory_gb=0.0,
)  # fmt: skip
FACTS = {
    "device": "a device", "cores": 2, "load_average_before": [0.0], "date": "today",
    "commit": "abc", "versions": {"torch": "2"}, "command": "python",
}  # fmt: skip


def test_all_ways_give_the_same_answers_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval, "NETWORK", SMALL)
    monkeypatch.setattr(retrieval, "ENCODER", SMALL | {"hidden_size": 16})
    made = retrieval._prepare(tmp_path, OPTIONS, Console(file=StringIO()))
    assert 150 < made["num_chunks"] < 1000
    queries, after_s = retrieval._requests(tmp_path / "index", OPTIONS, 0)
    assert len(queries) == len(after_s) > 5
    assert after_s == sorted(after_s)
    assert after_s[-1] < 0.6
    task = retrieval.Task(str(tmp_path), "", 3, 8, 0.01, 0.0, queries, after_s)
    network = open_network(Path(task.folder) / "network")
    network = replace(network, decoder=network.decoder.double())  # no rounding decides a text
    settings = EndpointSettings(
        serve=Serving(kv_gb=0.01, host_gb=0.0),
        retrieval=Retrieval(index=f"{tmp_path}/index", k=3),
    )
    turns = {
        way: [do(task, network, settings) | {"resident_bytes": 1}]
        for way, do in (
            ("paceline", retrieval_ways._overlapped),
            ("one at a time", retrieval_ways._serial),
        )
    }
    ours, serial = (turns[way][0] for way in turns)
    assert ours["texts"] == serial["texts"]
    assert ours["chunks"] == serial["chunks"]
    assert ours["prompts"] == serial["prompts"]
    assert len(set(ours["texts"])) > 3
    assert all(seconds > 0 for turn in (ours, serial) for seconds in turn["latencies"])
    recall = retrieval._recall(tmp_path, [queries], turns, 3)
    assert recall == {"paceline": 1.0, "one at a time": 1.0}  # few chunks: one list
    page = retrieval._page(turns, OPTIONS, FACTS, made, recall)
    assert f"{len(queries)} of {len(queries)}" in page
    assert "One at a time takes" in page
