"""The benchmark of diagnosis: its faults can run and its figures are right (pure), and its twins
take turns (two short runs of two ranks)."""

import json
from itertools import accumulate
from pathlib import Path

import pytest

from benchmarks.diagnosis import inject
from benchmarks.diagnosis.faults import FAULTS, Fault, Way, fault_of
from benchmarks.diagnosis.rank import BASE
from benchmarks.diagnosis.results import Cell, sentences
from benchmarks.diagnosis.twins import gain_of, measure, steady_turns
from paceline.config.hardware import Cluster, Device
from paceline.config.job import Job, read_job
from paceline.explain.rules import RULES
from paceline.observe.run import Run
from paceline.plan.resolve import resolve

CPU = Device(name="CPU", kind="cpu", precisions=("fp64", "fp32", "bf16"))


def _job(fault: Fault, way: Way) -> Job:
    job = read_job(BASE, [*fault.settings, *way.settings])
    each = fault.num_ranks // fault.num_hosts
    machine = Cluster(device=CPU, devices_per_node=each, num_nodes=fault.num_hosts)
    return resolve(job, machine).job


@pytest.mark.parametrize("name", FAULTS)
def test_both_ways_of_a_fault_can_run_and_differ(name):
    for seed in range(3):
        fault = fault_of(name, seed)
        wrong, right = (_job(fault, way) for way in (fault.wrong, fault.right))
        assert wrong.layout.num_ranks == right.layout.num_ranks == fault.num_ranks <= 4
        assert (fault.wrong != fault.right) == bool(fault.expected)
        for injection in fault.wrong.injections:
            assert injection in inject.INJECTIONS
        assert set(fault.expected) <= set(RULES)


def test_a_seed_draws_a_fault_of_its_own_and_always_the_same():
    drawn = [fault_of("slow loader", seed).wrong for seed in (0, 1, 0)]
    assert drawn[0] == drawn[2] != drawn[1]


def _lines(seconds: dict[int, float], profiled: set[int], between_s: float = 0.0) -> list[dict]:
    return [
        {"step": step, "step_time_s": s, "between_s": between_s, "profiled": step in profiled}
        for step, s in seconds.items()
    ]


def test_only_undisturbed_steps_are_compared():
    profiled = {4, 5, 10, 11}
    lines = _lines({step: float(step) for step in range(1, 15)}, profiled, between_s=0.5)
    assert steady_turns(lines) == [[7.5, 8.5], [13.5, 14.5]]


def _run(folder: Path, lines: list[dict]) -> Run:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(folder)


def _turns(folder: Path, turns: list[list[float]]) -> Run:
    """A run whose turns have these steps besides those that are left out."""
    seconds = [second for turn in turns for second in (9.0, *turn, 9.0, 9.0)]
    ends = accumulate(3 + len(turn) for turn in turns)
    lines = _lines(dict(enumerate([9.0, *seconds], start=5)), {5, *(5 + end for end in ends)})
    return _run(folder, lines)


def test_a_gain_is_of_turns_in_a_pair(tmp_path):
    wrong = _turns(tmp_path / "wrong", [[0.2, 0.2, 0.8], [0.6, 0.6, 0.6], [0.4, 0.4, 0.4]])
    right = _turns(tmp_path / "right", [[0.1, 0.1, 0.1], [0.3, 0.3, 0.3], [0.3, 0.3, 0.3]])
    gain = gain_of(Fault(("x",), Way(), Way()), wrong, right)
    assert gain.gain == pytest.approx(0.5), "by the ratio of each pair, not of all steps"
    assert (gain.faulty_s, gain.mended_s) == pytest.approx((0.4, 0.3))


def test_where_single_steps_stand_out_the_mean_counts(tmp_path):
    wrong = _turns(tmp_path / "wrong", [[0.1, 0.1, 0.4], [0.1, 0.1, 0.1]])
    right = _turns(tmp_path / "right", [[0.1, 0.1, 0.1], [0.1, 0.1, 0.1]])
    fault = Fault(("x",), Way(), Way(), is_in_every_step=False)
    assert gain_of(fault, wrong, right).gain == pytest.approx(1 - 0.1 / 0.15)


def _cell(name: str, expected: tuple[str, ...], found: list[tuple[str, float]], gain: float | None):
    findings = tuple({"name": first, "title": "", "gain": worth} for first, worth in found)
    measured = None if gain is None else {"gain": gain, "spread": 0.0}
    return Cell(name, 0, expected, findings, measured, {})


def test_a_diagnosis_is_right_when_name_and_gain_are():
    right = ("loader-bound", 0.25)
    cells = [
        _cell("slow loader", ("loader-bound",), [right], 0.2),
        _cell("slow loader", ("loader-bound",), [("straggler-rank", 0.3), right], 0.2),
        _cell("slow rank", ("straggler-rank",), [("straggler-rank", 0.1)], 0.2),
        _cell("healthy, dp 2", (), [("host-bound", 0.02)], None),
        _cell("healthy, pp 2", (), [("host-bound", 0.04)], None),
    ]
    assert [cell.verdict for cell in cells] == ["", "wrong name", "far off", "", "false alarm"]
    told = sentences(cells)
    assert "1 of 2 named" in told[0]
    assert "2 of 3 runs" in told[0]
    assert "for 0 (1 of 3" in told[0]
    assert told[0].endswith("seed by seed: 1")
    assert "1 of 2" in told[1]


_TINY = (
    "model.hidden_size=16", "model.ffn_size=16", "model.num_layers=2", "train.seq_len=16",
    "observe.profile_every=6", "observe.profile_steps=1", "train.steps=16",
    'data.source="text.txt"', 'layout.precision="fp32"',
)  # fmt: skip


# All but processes that burn cores: each has to fit today's loop, whatever it costs.
_EVERY_INJECTION = {
    "slow_blocks": {"times": 1}, "sleepy_blocks": {"seconds": 0.0}, "detect_anomaly": {},
    "metrics_of_every_micro_batch": {"num_metrics": 2}, "reduce_every_micro_batch": {},
    "collect_garbage": {"num_objects": 10}, "slow_disk": {"bytes_per_s": 1e9},
    "slow_log": {"seconds": 0.0}, "more_threads": {"num_threads": 1},
    "python_work": {"seconds": 1e-4}, "shared_out": {"share": 0.5},
    "uneven_lengths": {"shortest": 8, "longest": 16, "seed": 0},
}  # fmt: skip


def test_twins_take_turns_and_differ_by_the_fault(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("the quick brown fox " * 2000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    late = {"slow_loader": {"rank": 1, "seconds": 0.1}}
    assert set(inject.INJECTIONS) == {*late, *_EVERY_INJECTION, "busy_neighbour", "busy_machine"}
    way = Way(injections=_EVERY_INJECTION | late)
    fault = Fault(("loader-bound",), way, Way(), ("layout.dp=2",))
    measure(fault, tmp_path / "pair", _TINY, range(2, 3))
    faulty, mended = (Run(tmp_path / "pair" / way / "runs/run") for way in ("faulty", "mended"))
    a, b = ([line["time"] for line in run.metrics()] for run in (faulty, mended))
    assert len(a) == len(b) == 16
    # Turns end with the windows: steps 1-4, 5-10 and 11-16, of A and B, B and A, A and B.
    assert a[3] < b[0]
    assert b[9] < a[4]
    assert a[15] < b[10]
    gain = gain_of(fault, faulty, mended)
    assert gain.faulty_s > 0.1
    # On a busy machine the mended twin may be the slower one: how much is the benchmark's to say.
    assert gain.gain < 1


def test_every_injection_is_used():
    drawn = [fault_of(name, seed) for name in FAULTS for seed in range(2)]
    used = {
        name for fault in drawn for way in (fault.wrong, fault.right) for name in way.injections
    }
    assert used == set(inject.INJECTIONS)
