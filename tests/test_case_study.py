"""docs/case-study.md says what the planner and the results say (pure); its small real run's parts.

The run itself takes minutes, networks of namespaces and a quiet machine: benchmarks/case_study.py.
"""

import importlib.util
import re
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import case_study
from benchmarks.network_cell import Block
from paceline.config.hardware import Cluster
from paceline.config.job import Job, read_cluster
from paceline.plan.answer.find import answer

ROOT = Path(__file__).parent.parent
CLUSTERS = ROOT / "benchmarks/results/intel-r-xeon-r-processor-2-cores/network_clusters"
NUMBER = re.compile(r"\d[\d,]*\.?\d*")


@pytest.fixture
def any_machine(monkeypatch):
    """One that computes in bf16, whichever this one is."""
    cluster = read_cluster(CLUSTERS / "2x200mbit.toml")
    assert "bf16" in cluster.device.precisions
    monkeypatch.setattr(case_study, "this_machine", lambda: cluster.replace(tiers=()))


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("maker", ROOT / "docs" / "make_case_study.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def page(maker):
    return maker.reflow(maker.page())


def test_the_page_is_what_planner_table_and_results_say(maker, page):
    written = maker.PAGE.read_text()
    hint = "run: python docs/make_case_study.py"
    assert NUMBER.sub("#", page).split() == NUMBER.sub("#", written).split(), hint
    # The last digit may differ between numpy's releases.
    assert _numbers(page) == pytest.approx(_numbers(written), rel=0.02, abs=0.02), hint


def _numbers(page: str) -> list[float]:
    return [float(number.replace(",", "").rstrip(".")) for number in NUMBER.findall(page)]


def test_the_claims_are_judged_by_arithmetic(page):
    for fact in ("53.4 min", "6.7 min", "7,118 images/s", "64,058 images/s", "102 MB"):
        assert fact in page


def test_published_rates_lie_in_the_predicted_intervals_of_their_machine(maker):
    """Eight A100-40 of one node, 256 images each, as published; in TF32 and in 16 bits."""
    one_node = Cluster.parse({"device": "A100-40", "devices_per_node": 8, "num_nodes": 1})
    for step, row in ((maker.STEPS[0], "VIS-039"), (maker.STEPS[2], "VIS-040")):
        job = maker.concrete(step).replace(cluster=one_node)
        layout = job.layout.replace(micro_batch=256)
        train = job.train.replace(global_batch=8 * 256)
        found = answer(job.replace(layout=layout, train=train)).best
        low, high = (8 * 256 / second for second in reversed(found.interval_s))
        assert low < maker.rate_of(row) < high


def test_each_step_of_the_study_changes_what_it_names_and_nothing_else(maker):
    terms = [maker.planned(step).time_s for step in maker.STEPS]
    changed = [
        {name for name in before if after[name] != pytest.approx(before[name], rel=1e-6)}
        for before, after in pairwise(terms)
    ]
    exchange = {"exposed_comm.dp", "straggler_wait"}
    assert {"matmul", "other_kernels"} <= changed[0]
    assert "other_kernels" in changed[1]
    assert "matmul" not in changed[1]
    assert [each - {"straggler_wait"} for each in changed[2:]] == [{"exposed_comm.dp"}] * 3
    assert all(each <= exchange for each in changed[2:])


# ---- the small real run --------------------------------------------------------------------------


@pytest.mark.usefixtures("any_machine")
def test_every_way_is_a_job_that_can_run():
    jobs = {way.name: case_study.job_of(way) for way in case_study.WAYS}
    assert all(isinstance(job, Job) and job.layout.dp == 4 for job in jobs.values())
    assert jobs["hierarchical all-reduce"].comm.dp.algorithm == "hierarchical"
    assert jobs["8-bit gradients"].comm.dp.compress == "int8"
    assert jobs["compiled blocks"].layout.compile is True
    assert case_study.ON_TOP_OF.keys() == jobs.keys()


def test_rows_compare_within_a_round():
    """The machine is twice as slow in the second round; gains stay what they are."""
    names = [way.name for way in case_study.WAYS]
    blocks = [
        Block(name, number, [seconds * (1 + number)] * 3, 1e6 * at)
        for number in range(2)
        for at, (name, seconds) in enumerate(zip(names, (1, 4, 2, 4, 1, 0.5, 0.8), strict=True))
    ]
    table = case_study.rows(blocks, dict.fromkeys(names, 1.0))
    by_way = {row.way: row for row in table}
    assert [row.way for row in table] == names
    assert by_way["bf16"].over_baseline == 2
    assert by_way["buckets of 2 MiB"].over_before == 2
    assert by_way["8-bit gradients"].over_before == pytest.approx(1.25)
    assert by_way["baseline"].over_before is None
    assert by_way["bf16"].step_s == (3, 2, 4)
    assert by_way["bf16"].sent_bytes == 2e6
    assert "| bf16 | 3.000 (2.000 – 4.000) | 2.0 | 2.00 | 2.00 |" in case_study.markdown(
        case_study._TITLES, case_study.lines(table)
    )


@pytest.mark.usefixtures("any_machine")
def test_predictions_are_of_what_each_way_exchanges():
    """A slow wire between the hosts: fewer bytes on it are predicted to take less."""
    wires = [
        {
            "name": name,
            "num_devices": number,
            "latency_s": {"value": 1e-4, "origin": "assumed", "source": "test"},
            "bytes_per_s": {"value": rate, "origin": "assumed", "source": "test"},
        }
        for name, number, rate in (("loopback", 2, 1e9), ("network", 4, 3e7))
    ]
    device = read_cluster(CLUSTERS / "2x200mbit.toml").device
    cluster = Cluster.parse(
        {"device": device, "devices_per_node": 2, "num_nodes": 2, "tiers": wires}
    )
    seconds = {
        way.name: case_study.predicted_s(way, case_study.job_of(way), cluster)
        for way in case_study.WAYS
    }
    assert seconds["compute only"] < seconds["baseline"]
    assert seconds["bf16"] < seconds["baseline"]
    assert seconds["8-bit gradients"] < seconds["hierarchical all-reduce"]
    assert seconds["8-bit gradients"] < seconds["buckets of 2 MiB"]
