"""Goals, budgets and the work of one device: pure, but for a fake measurer."""

import pytest

from paceline.config.errors import InputError
from paceline.tune.goal import Figures, Goal, one_device, reference_of
from paceline.tune.trial import Reference
from tests.tune.fake import FakeMeasurer
from tests.tune.jobs import CLUSTER, figure, job


@pytest.mark.parametrize("text", ["efficiency", "efficiency=1.2", "mfu=0", "speed=3", "mfu=x"])
def test_what_is_no_goal_is_refused(text):
    with pytest.raises(InputError, match="--until"):
        Goal.read(text)


def test_mfu_of_an_unknown_peak_is_refused():
    blind = CLUSTER.replace(device=CLUSTER.device.replace(peak_flops={}))
    with pytest.raises(InputError, match="is not known"):
        Goal.read("mfu=0.5").check(job(blind))
    Goal.read("mfu=0.5").check(job())


def test_efficiency_is_the_throughput_over_that_of_so_many_single_devices():
    """Two devices do 8 samples in 0.5 s; one does its 4 in 0.4 s: 16 of 20 samples a second."""
    figures = Figures.at(job(), 0.5, Reference(0.4, 4, "measured"))
    assert figures.efficiency == pytest.approx(0.8)
    assert figures.rate == pytest.approx(8 * 32 / 0.5)
    assert figures.reaches(Goal.read("efficiency=0.8"))
    assert not figures.reaches(Goal.read("efficiency=0.81"))


def test_the_work_of_one_device_is_measured_where_it_fits_else_predicted():
    single = one_device(job())
    assert (single.layout.num_ranks, single.train.global_batch) == (1, 4)
    assert single.layout.recompute == "none"
    measured = reference_of(job(), FakeMeasurer(lambda _job: 0.25))
    assert (measured.step_s, measured.samples) == (0.25, 4)
    small = CLUSTER.replace(device=CLUSTER.device.replace(memory_bytes=figure(1e5)))
    predicted = reference_of(job(small), FakeMeasurer(lambda _job: 0.25))
    assert predicted.origin.startswith("predicted: it would take")
    failed = reference_of(job(), FakeMeasurer(lambda _job: "died"))
    assert failed.origin.startswith("predicted, for it didn't run")
