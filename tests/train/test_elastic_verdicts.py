"""A rank that holds up the others, in a real run: the line of its loss says who, where and how, and
the run goes on. One run has one fault after the other, each once."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.elastic import faults
from paceline.comm.rendezvous import Ranks
from paceline.train import generations
from tests.command_line import Started, write_tiny_job

STEPS_APART = 12


@dataclass(frozen=True)
class Case:
    kind: str
    phase: str
    cause: str
    """The class that it is to get."""
    says: str


CASES = (
    Case("endless loop", "forward", "stuck", "in forward and backward"),
    Case("dead disk", "data", "waiting_for_data", "while it read its data"),
    Case("other collective", "collective", "wrong_collective", "where others are in all_reduce"),
    Case("SIGSTOP", "forward", "stopped", "is stopped since"),
    Case("endless loop", "backward", "stuck", "in forward and backward"),
)
PROGRAM = """
import json, os, sys
from pathlib import Path

from benchmarks.elastic import faults

for text in json.loads(os.environ["FAULTS"]):
    faults.put_in(text)
if __name__ == "__main__":
    from paceline.cli import main

    main()
"""


def test_each_fault_gets_its_class_and_its_rank_and_the_run_goes_on(tmp_path: Path):
    job = write_tiny_job(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    asked = []
    for at, case in enumerate(CASES):
        folder = tmp_path / f"fault-{at}"
        folder.mkdir()
        step = STEPS_APART * (at + 1)
        asked.append(faults.Asked(case.kind, 1, case.phase, step, str(folder)))
    steps = STEPS_APART * (len(CASES) + 1)
    sets = {
        "cluster.devices_per_node": 3,
        "layout.dp": 3,
        "train.global_batch": 3,
        "train.steps": steps,
        "elastic.min_nodes": 1,
        "elastic.heartbeat_s": 1.0,
    }
    told = {
        "FAULTS": json.dumps([one.text() for one in asked]),
        "PYTHONPATH": ":".join(sys.path),
        "PACELINE_MEASURE": "off",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(program), "train", str(job), *(f"--set={k}={v}" for k, v in sets.items())]
    run = Started(command, tmp_path, 1, told)
    try:
        printed = run.communicate(240)[0]
    finally:
        run.kill()
    assert run.returncode == 0, printed[-3000:]
    folder = next((tmp_path / "runs").iterdir())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    # A loaded machine may slow one rank for 50 steps, which is told and nothing more.
    lost = [one for one in events if one["event"] == "lost" and one["class"] != "slow"]
    said = "\n".join(event["sentence"] for event in lost)
    assert [event["class"] for event in lost] == [case.cause for case in CASES], said
    for event, case in zip(lost, CASES, strict=True):
        assert event["rank"] == 1, event
        assert case.says in event["sentence"], event
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines if "loss" in line} == set(range(1, steps + 1))


@pytest.mark.parametrize(
    ("error", "waits"), [(ValueError("its own"), False), (RuntimeError("perhaps a loss"), True)]
)
def test_only_what_a_lost_rank_may_cause_waits_for_the_agents_word(error, waits, monkeypatch):
    looks: list[float] = []
    monkeypatch.setattr(generations, "_WORD_S", 0.1)
    monkeypatch.setattr(generations.time, "sleep", looks.append)
    rank = generations.ElasticRank.__new__(generations.ElasticRank)
    rank._link = SimpleNamespace(must_leave=False)
    assert not rank._is_loss(error, Ranks(1, 2, 1, 2))
    assert bool(looks) is waits
