"""The elastic benchmarks: stamps, histories, what strikes when. No run is started here."""

import math
from dataclasses import replace

import pytest

from benchmarks.elastic.faults import KINDS as KINDS_OF_FAULTS
from benchmarks.elastic.faults import PHASES, Asked, _Place
from benchmarks.elastic.history import Did, Evidence, Rules, evidence_of, faults_of
from benchmarks.elastic.outages import (
    Outage,
    Stamp,
    done_by_all,
    new_steps,
    outage_of,
    read_stamps,
    step_times,
)
from benchmarks.elastic_faults import cells
from benchmarks.elastic_soak import KINDS, strikes_of
from benchmarks.peers.stamps import FOLDER, NODE, Stamps

FAULT_S = 3.05


def _step(step: int, end_s: float, pids: tuple[int, ...], samples: int = 12) -> list[Stamp]:
    """A step that ranks finish one after another, a millisecond apart."""
    return [
        Stamp(end_s + rank / 1000, step, samples, rank, rank, pid) for rank, pid in enumerate(pids)
    ]


def _before() -> list[Stamp]:
    return [stamp for step in (1, 2, 3) for stamp in _step(step, float(step), (10, 11, 12))]


def test_an_outage_ends_with_the_step_that_needed_an_answer():
    stamps = _before()
    stamps += [Stamp(3.1, 4, 12, 0, 0, 10)]  # was under way
    stamps += _step(5, 5.05, (10, 21, 12)) + _step(6, 6.0, (10, 21, 12))
    outage = outage_of(stamps, FAULT_S)
    assert outage == Outage(
        next_new_step_s=pytest.approx(2.0),
        next_step_s=pytest.approx(2.0),
        whole_again_s=pytest.approx(2.002),
        recomputed=0,
        left_out=0,
    )


def test_steps_done_again_are_no_new_ones():
    stamps = _before() + _step(2, 6.0, (20, 21, 22)) + _step(3, 6.5, (20, 21, 22))
    stamps += _step(4, 7.0, (20, 21, 22)) + _step(5, 7.5, (20, 21, 22))
    outage = outage_of(stamps, FAULT_S)
    assert outage.next_step_s == pytest.approx(6.0 - FAULT_S)
    assert outage.next_new_step_s == pytest.approx(7.0 - FAULT_S)
    assert outage.recomputed == 2


def test_samples_of_a_missing_replica_are_left_out_and_the_run_is_not_whole():
    stamps = _before() + _step(4, 5.0, (10, 12), samples=8) + _step(5, 5.5, (10, 12), samples=8)
    outage = outage_of(stamps, FAULT_S)
    assert outage.left_out == 8
    assert outage.whole_again_s is None


def test_a_run_that_stands_still_has_no_next_step():
    outage = outage_of(_before(), FAULT_S)
    assert (outage.next_new_step_s, outage.next_step_s, outage.whole_again_s) == (None, None, None)
    with pytest.raises(ValueError, match="before the fault"):
        outage_of([], FAULT_S)


def test_times_are_between_new_steps():
    stamps = _before() + _step(2, 6.0, (20, 21, 22)) + _step(4, 7.0, (20, 21, 22))
    assert [stamp.step for stamp in new_steps(stamps)] == [1, 2, 3, 4]
    assert step_times(stamps, 2) == pytest.approx([1.0, 4.0])
    assert done_by_all(stamps, 3, 2) == 2
    assert done_by_all(stamps, 4, 2) is None


def test_stamps_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(NODE, "2")
    stamps = Stamps()
    stamps.step_done(1, 12, 3)
    stamps.step_done(2, 12, 1)
    with next(tmp_path.glob("*.stamps")).open("a") as file:
        file.write("17.5 3 12")  # is being written
    first, second = read_stamps(tmp_path)
    assert first[1:5] == (1, 12, 3, 2)
    assert second[1:5] == (2, 12, 1, 2)
    assert first.time_s <= second.time_s


# ---- histories ----------------------------------------------------------------------------------

NUM_STEPS = 6
RULES = Rules(NUM_STEPS, copy_every=2)
SAMPLES = {step: frozenset({10 * step, 10 * step + 1}) for step in range(1, NUM_STEPS + 1)}


def _lines(generation_of_step: dict[int, int]) -> list[dict]:
    return [
        {"step": step, "loss": 5.0 - step, "tokens": 64 * step, "generation": generation}
        for step, generation in generation_of_step.items()
    ]


def _generation(number: int, leader: str, start: int, source: str) -> list[dict]:
    return [
        {"event": "generation", "generation": number, "leader": leader},
        {"event": "recovered", "generation": number, "step": start, "source": source},
    ]


def _did(generation: int, steps: range, *, finished: bool = True) -> list[Did]:
    return [
        Did(generation, step, rank, (10 * step + rank,), finished)
        for step in steps
        for rank in (0, 1)
    ]


def _good() -> Evidence:
    """Two ranks; one is lost while it does step 5, and its copy is of step 3."""
    return Evidence(
        metrics=_lines({1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2}),
        events=[
            *_generation(1, "n0", 0, "start"),
            {"event": "lost", "generation": 1},
            *_generation(2, "n1", 3, "buddy"),
            {"event": "end", "generation": 2, "state": "finished"},
        ],
        generations={1: {"leader": "n0"}, 2: {"leader": "n1"}},
        did=[*_did(1, range(1, 5)), *_did(1, range(5, 6), finished=False), *_did(2, range(4, 7))],
        undisturbed={line["step"]: line for line in _lines(dict.fromkeys(range(1, 7), 0))},
        samples=SAMPLES,
    )


def test_a_history_that_kept_every_rule_has_no_fault():
    assert faults_of(_good(), RULES) == []


def test_a_history_that_went_back_to_a_checkpoint_is_judged_from_there_on():
    """All is lost after step 5, and the checkpoint is of step 2; the next loss leaves one rank."""
    good = _good()
    went_back = replace(
        good,
        metrics=_lines({1: 1, 2: 1, 3: 3, 4: 3, 5: 4, 6: 4}),
        events=[
            *_generation(1, "n0", 0, "start"),
            *_generation(2, "n1", 4, "live"),
            *_generation(3, "n1", 2, "disk"),
            *_generation(4, "n0", 4, "live"),
            {"event": "end", "generation": 4, "state": "finished"},
        ],
        generations={
            number: {"leader": "n1" if number in (2, 3) else "n0"} for number in range(1, 5)
        },
        did=[
            *_did(1, range(1, 5)),
            *_did(2, range(5, 6)),
            *_did(3, range(3, 5)),
            *_did(4, range(5, 7)),
        ],
    )
    rules = replace(RULES, copy_every=1, checkpoint_every=3)
    assert faults_of(went_back, rules) == []
    (fault,) = faults_of(went_back, replace(rules, checkpoint_every=2))
    assert "generation 3 starts from step 2 (of disk) though step 5 was finished: 3 are" in fault


def _events_with(index: int, **changes: object) -> list[dict]:
    events = [dict(event) for event in _good().events]
    events[index] |= changes
    return events


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"metrics": _lines({1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2})[:5]}, "steps 6 were lost"),
        (
            {"metrics": _lines({1: 1, 2: 1, 3: 1}) + _lines({3: 2, 4: 2, 5: 2, 6: 2})},
            "step 3 was committed 2 times",
        ),
        (
            {"metrics": _lines({1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2})},
            "starts from step 3, and steps 4 of generations before it are committed",
        ),
        (
            {"metrics": _lines({1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 2})},
            "starts from step 3 and committed 3 anew",
        ),
        ({"events": _events_with(4, step=5)}, "step 5, which no generation had finished"),
        ({"events": _events_with(4, step=2)}, "2 are done again, at most 1 may be"),
        ({"events": _events_with(5, state="saved")}, "did not finish"),
        ({"events": _events_with(3, leader="n0")}, "generation 2 was claimed by n1 and led by n0"),
        (
            {"events": [*_good().events, _generation(2, "n0", 3, "live")[0]]},
            "generation 2 has 2 leaders: n0, n1",
        ),
        ({"generations": {1: {"leader": "n0"}, 3: {"leader": "n1"}}}, "are numbered [1, 3]"),
        ({"did": [did for did in _good().did if did[:3] != (2, 6, 1)]}, "step 6 lacks 1 of its 2"),
        ({"did": [*_good().did, Did(2, 6, 2, (77,), True)]}, "1 samples that are not its own"),
        (
            {"did": [*_good().did, Did(2, 6, 2, (60, 61), True)]},
            "2 samples were used by ranks that don't share",
        ),
        ({"rubbish": ["a process outlived the run."]}, "a process outlived the run"),
    ],
)
def test_a_history_that_broke_a_rule_has_a_fault(changes, fault):
    found = faults_of(replace(_good(), **changes), RULES)
    assert any(fault in sentence for sentence in found), found


def test_a_loss_must_have_the_same_bits_or_be_close():
    lines = [dict(line) for line in _good().metrics]
    lines[3]["loss"] = math.nextafter(lines[3]["loss"], 2)
    (fault,) = faults_of(replace(_good(), metrics=lines), RULES)
    assert "the first of step 4" in fault
    assert faults_of(replace(_good(), metrics=lines), replace(RULES, tolerance=1e-5)) == []
    lines[3]["loss"] = None
    assert faults_of(replace(_good(), metrics=lines), replace(RULES, tolerance=1e-5))


def test_consumed_numbers_are_compared():
    lines = [dict(line) for line in _good().metrics]
    lines[5]["tokens"] += 64
    assert faults_of(replace(_good(), metrics=lines), RULES) == [
        "step 6 says 448 tokens instead of 384."
    ]


def test_the_disk_is_as_far_behind_as_its_checkpoints():
    events = _events_with(4, step=2, source="disk")
    lines = _lines({1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 2})
    did = [*_good().did, *_did(2, range(3, 4))]
    evidence = replace(_good(), events=events, metrics=lines, did=did)
    assert faults_of(evidence, RULES)
    assert faults_of(evidence, replace(RULES, checkpoint_every=3)) == []


@pytest.mark.parametrize(("stays", "is_fault"), [("n0", True), ("n1", False)])
def test_what_one_node_did_alone_is_lost_with_that_node(stays, is_fault):
    """Generation 1 is of n0 alone; the next one starts before its last steps."""
    nodes = {name: {"name": name, "incarnation": f"{name}'s"} for name in ("n0", "n1")}
    generations = {
        1: {"leader": "n0", "nodes": [nodes["n0"], nodes["n1"]], "num_active": 1},
        2: {"leader": "n1", "nodes": [nodes[stays]], "num_active": 1},
    }
    events = _events_with(4, step=2)
    lines = _lines({1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 2})
    did = [*_good().did, *_did(2, range(3, 4))]
    evidence = replace(_good(), generations=generations, events=events, metrics=lines, did=did)
    assert bool(faults_of(evidence, RULES)) is is_fault


def test_what_a_run_leaves_is_read_and_rubbish_is_told(tmp_path):
    run, notes = tmp_path / "run", tmp_path / "notes"
    (run / "generations").mkdir(parents=True)
    notes.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 4.0}\n{"step": 2, "lo')
    (run / "events.jsonl").write_text('{"event": "end", "state": "finished"}\n')
    (run / "generations" / "1.json").write_text('{"leader": "n0"}')
    (run / "generations" / ".2-n1-77").write_text("")
    (run / "facts.json.tmp77").write_text("")
    (run / "plan.json").write_text('{"reas')
    (notes / "7.notes").write_text("began 1 1 0 33 44\nfinished 1 1 0\nbegan 1 2 0 55\nbegan 1 3")
    evidence = evidence_of(run, notes, run, notes)
    assert evidence.did == [Did(1, 1, 0, (33, 44), True), Did(1, 2, 0, (55,), False)]
    assert evidence.generations == {1: {"leader": "n0"}}
    assert [sentence.split()[-1] for sentence in evidence.rubbish[1:]] == [
        "left.",
        "left.",
        "JSON.",
    ]
    assert evidence.rubbish[0].startswith("line 2 of metrics.jsonl is damaged")


# ---- strikes and faults -------------------------------------------------------------------------


def test_strikes_are_a_function_of_the_seed():
    strikes = strikes_of(50, 200, seed=3)
    assert strikes == strikes_of(50, 200, seed=3) != strikes_of(50, 200, seed=4)
    steps = [strike.step for strike in strikes]
    assert steps == sorted(steps)
    assert steps[-1] < 200
    assert len(set(steps)) < 50  # some strike while the run deals with the one before
    assert {strike.kind for strike in strikes} == set(KINDS)


def test_a_fault_happens_once_and_where_it_was_asked_for(tmp_path):
    asked = Asked("exception", 1, "step", 4, str(tmp_path))
    place = _Place(asked, rank=1, generation=1, step=3)
    place.break_now()
    assert not asked.happened.exists()
    place.step, place.rank = 4, 0
    place.break_now()
    assert not asked.happened.exists()
    place.rank = 1
    with pytest.raises(ValueError, match="tokeniser"):
        place.break_now()
    assert float(asked.happened.read_text()) > 0
    place.break_now()


def test_there_are_cells_for_every_kind_place_and_phase():
    found = cells()
    assert len(found) == len(set(found)) >= 60
    # Faults within a pass, and in the data, are those of the test of verdicts.
    assert {cell.phase for cell in found} == set(PHASES) - {"forward", "backward"}
    assert {cell.where for cell in found} == {
        *("rank 0", "middle rank", "agent", "leader's agent", "disk"),
    }
    for kind in ("kill -9", "SIGSTOP", "endless loop", "exception", "exit 137"):
        of = {(cell.where, cell.phase) for cell in found if cell.kind == kind}
        assert len(of) == 2 * 7
    assert {cell.kind for cell in found} <= set(KINDS_OF_FAULTS)
