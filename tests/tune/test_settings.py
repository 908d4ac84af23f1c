"""What tune may change: pure."""

import pytest

from paceline.config.errors import InputError
from paceline.tune.settings import (
    Freedom,
    change_texts,
    differences,
    distance,
    grouped,
    with_changes,
)
from tests.tune.jobs import job


def test_changes_lead_from_one_job_to_the_other_and_can_be_given_to_set():
    bad, good = job(), job(dp=1, pp=2, recompute="none", micro_batch=2)
    changes = differences(bad, good)
    assert with_changes(bad, changes) == good
    assert set(grouped(changes)) == {"mesh", "pipeline", "micro-batch", "recomputing"}
    assert "layout.recompute=none" in change_texts(changes)
    assert not any("split" in text for text in change_texts(changes))  # follows from pp


def test_what_changes_numerics_is_free_only_where_it_is_asked_for():
    freedom = Freedom.of()
    assert freedom.allows(["layout.tp", "layout.offload", "comm.dp.compress"])
    assert not freedom.allows(["layout.precision"])
    assert Freedom.of(free=["precision"]).allows(["layout.precision"])
    assert not Freedom.of(keep=["comm.dp.compress"]).allows(["comm.warmup_steps"])
    assert not freedom.allows(["train.global_batch"])


def test_freed_leaves_everything_to_the_planner_but_what_is_kept():
    freed = Freedom.of(keep=["micro_batch"]).freed(job())
    assert (freed.layout.dp, freed.layout.recompute) == ("auto", "auto")
    assert (freed.comm.dp.compress, freed.comm.fsdp.algorithm) == ("auto", "auto")
    assert freed.layout.micro_batch == 1
    assert freed.layout.precision == job().layout.precision
    assert freed.train == job().train


@pytest.mark.parametrize(
    ("free", "keep", "sentence"),
    [
        (["lr"], [], r"--free lr is no setting that tune changes"),
        ([], ["train.steps"], "--keep train.steps is no setting that tune changes"),
        (["tp"], ["layout.tp"], "leave one of them out"),
    ],
)
def test_what_is_not_tuned_is_refused(free, keep, sentence):
    with pytest.raises(InputError, match=sentence):
        Freedom.of(free, keep)


def test_jobs_are_further_apart_the_more_differs():
    bad = job()
    assert distance(bad, bad) == 0
    near = distance(bad, job(bucket_mib=0.2))
    assert 0 < near < distance(bad, job(bucket_mib=1.0)) < distance(bad, job(dp=1, tp=2))
