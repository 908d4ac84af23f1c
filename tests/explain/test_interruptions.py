"""What interruptions cost, and what would have cost less: of runs whose seconds are known."""

from pathlib import Path
from typing import Any

import pytest

from paceline.explain.finding import Finding
from paceline.explain.rules import RULES
from paceline.explain.subject import Subject
from tests.explain.cases import interrupted_run
from tests.observe.interrupted import STEP_S, Simulated, simulated

FOUR = ["n0", "n1", "n2", "n3"]
LOSS: dict[str, Any] = {"node": "n1", "rank": None, "class": "vanished", "sentence": "n1 is gone."}


def _begun(nodes: list[str] = FOUR) -> Simulated:
    made = Simulated()
    made.claim(nodes, len(nodes), "start")
    made.recover("start", 0)
    made.train(100)
    return made


def _cut(made: Simulated, source: str, back: int, notice_s: float, nodes: list[str] = FOUR) -> None:
    lost_s = made.lose(0.2, notice_s, back, **LOSS)
    made.decide("replace")
    made.claim(nodes, len(nodes), "n1 is gone.")
    made.recover(source, back, lost_s, notice=notice_s)
    made.train(100)


def _found(made: Simulated, folder: Path, **job: Any) -> tuple[Finding, Subject]:
    given = interrupted_run(made, **job)(folder)
    found = RULES["interruptions"](given)
    assert found is not None
    return found, given


def _saved_s(found: Finding, given: Subject) -> float:
    return found.gain_s * len(given.lines)


def test_what_was_lost_is_told_by_class(tmp_path: Path) -> None:
    made = simulated()
    found, _ = _found(made, tmp_path)
    told = found.evidence[0].sentence
    for text in ("notice 2.0 s", "2 dead", "1 vanished", "waiting 30 s", "recomputed 1.8 s"):
        assert text in told
    assert "goodput" in found.title


def test_spares_save_waiting_and_slower_steps(tmp_path: Path) -> None:
    made = _begun()
    _cut(made, "live", 0, 0.1, FOUR[:3])
    for line in made.lines[-101:]:  # three nodes do the work of four
        line["step_time_s"] = STEP_S * 4 / 3
    found, given = _found(made, tmp_path)
    assert found.changes[0] == "elastic.spares=1"
    assert _saved_s(found, given) == pytest.approx(101 * STEP_S / 3, rel=1e-3)


def test_copies_in_every_step_save_those_done_again_from_memory(tmp_path: Path) -> None:
    made = _begun()
    _cut(made, "buddy", 7, 0.1)
    found, given = _found(made, tmp_path, copy_every=8)
    assert found.changes == ("elastic.copy_every=1",)
    assert _saved_s(found, given) == pytest.approx(7 * STEP_S)
    others, _ = _found(made, tmp_path, copy_every=1)
    assert others.changes == ()
    assert others.gain > 0
    assert others.advice


def test_more_checkpoints_save_steps_done_again_from_disk(tmp_path: Path) -> None:
    made = _begun()
    _cut(made, "disk", 40, 0.1)
    for line in made.lines:
        line["terms"] = {"checkpoint_stall": 0.0004}
    found, given = _found(made, tmp_path, copy_every=1, every=40)
    # A save blocks 16 ms, a loss comes once in this run of about 100 s.
    run_s = given.generations.run_s  # type: ignore[union-attr]
    suits = round((2 * 0.016 * run_s) ** 0.5 / STEP_S)
    assert found.changes == (f"checkpoint.every={suits}",)
    assert _saved_s(found, given) == pytest.approx(40 * STEP_S * (1 - suits / 40), rel=0.02)


def test_shorter_heartbeats_save_the_time_to_notice(tmp_path: Path) -> None:
    made = _begun()
    _cut(made, "live", 0, 8.0)
    found, given = _found(made, tmp_path, copy_every=1, heartbeat_s=8.0)
    assert found.changes == ("elastic.heartbeat_s=2.0",)
    assert _saved_s(found, given) == pytest.approx(6.0)


def test_the_machine_that_was_lost_most_often_is_named(tmp_path: Path) -> None:
    made = _begun()
    _cut(made, "live", 0, 0.1)
    _cut(made, "live", 0, 0.1)
    found, _ = _found(made, tmp_path)
    assert "n1 was lost 2 times, of 2 losses." in [each.sentence for each in found.evidence]
