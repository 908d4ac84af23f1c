"""Checkpoints of several gloo ranks: other layouts and numbers of ranks, failures on one rank."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.train.checkpoint.loading import newest_good
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.checkpoint.state import training_state
from tests.ranks import run_ranks
from tests.train import checkpoint_cases as cases
from tests.train.checkpoint_cases import assert_same, optimizer_of, tiny, train, whole


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Any]:
    module = tiny()
    optimizer = optimizer_of(module)
    train(module, optimizer, range(cases.NUM_STEPS_BEFORE + cases.NUM_STEPS_AFTER))
    return whole(training_state(module, optimizer))


ON_TWO = [("plain-1", "fsdp"), ("plain-1", "ddp"), ("ddp-2", "fsdp"), ("fsdp-2", "ddp")]
ON_FOUR = [("fsdp-2", "fsdp"), ("hsdp-4", "tp"), ("tp-4", "hsdp"), ("tp-4", "tp")]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def resumed(root) -> dict[tuple[int, str, str], list[dict[str, Any]]]:
    """The end of each resumed run: (ranks, saved as, loaded as) -> the state on each rank.

    The cases share their ranks, since starting ranks takes longer than all they do.
    """
    launches: list[tuple[int, list[str], list[tuple[str, str]]]] = [
        (1, ["plain"], []),
        (2, ["ddp", "fsdp"], ON_TWO),
        (4, ["fsdp", "hsdp", "tp"], ON_FOUR),
        (2, [], [("fsdp-4", "fsdp"), ("tp-4", "ddp")]),
        (1, [], [("ddp-2", "plain"), ("fsdp-2", "plain"), ("fsdp-4", "plain")]),
    ]
    states: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for num_ranks, saves, loads in launches:
        if num_ranks == 1:
            replies = [cases.save_and_load_all(0, 1, root, saves, loads)]
        else:
            replies = run_ranks(cases.save_and_load_all, num_ranks, root, saves, loads)
        for saved_as, loaded_as in loads:
            key = (num_ranks, saved_as, loaded_as)
            states[key] = [pickle.loads(reply)[saved_as, loaded_as] for reply in replies]
    return states


@pytest.mark.parametrize(
    "case",
    [
        *[(2, *case) for case in ON_TWO],
        *[(4, *case) for case in ON_FOUR],
        (2, "fsdp-4", "fsdp"),
        (2, "tp-4", "ddp"),
        (1, "ddp-2", "plain"),
        (1, "fsdp-2", "plain"),
        (1, "fsdp-4", "plain"),
    ],
)
def test_a_run_resumes_in_another_layout(resumed, uninterrupted, case):
    for state in resumed[case]:
        assert_same(state, uninterrupted, tolerance=1e-10)


def test_a_rank_without_a_share_writes_nothing_of_a_tensor(resumed, root):
    found, _ = newest_good(root / "fsdp-4", LockstepRanks.alone(), print)
    chunks = found.manifest.tensors["model.temperature"].chunks  # one element, on four ranks
    assert [chunk.sizes for chunk in chunks] == [[1]]
    assert all(0 not in c.sizes for e in found.manifest.tensors.values() for c in e.chunks)


def test_each_rank_gets_its_generator_back_and_new_ranks_keep_theirs(tmp_path):
    saved = run_ranks(cases.save_rng, 2, tmp_path)
    loaded = run_ranks(cases.load_rng, 3, tmp_path)
    assert loaded[:2] == saved
    torch.manual_seed(502)
    assert loaded[2] == torch.rand(3).tolist()


def test_a_full_disk_on_one_rank_fails_the_save_on_all(tmp_path):
    (said, *seen), (said_by_1, *seen_by_1) = run_ranks(cases.fill_disk_of_rank_1, 2, tmp_path)
    assert seen == seen_by_1 == [1, ["latest", "step-1"]]
    assert said_by_1 == []
    assert said[1] == (
        "checkpoint step-2 was not saved (rank 1: [Errno 27] File too large); "
        "the last good one, step-1, is kept."
    )
    assert said[2].startswith("checkpoint step-3 is saved")


def test_ranks_share_the_writing_and_agree_about_damage(tmp_path):
    (step, said, files), (step_of_1, said_by_1, _) = run_ranks(cases.damage_and_look, 2, tmp_path)
    assert step == step_of_1 == 1
    assert said_by_1 == []
    assert said[2] == (
        "checkpoint step-2 is refused: rank1.safetensors doesn't match its checksum."
    )
    assert files == ["manifest.json", "rank0.safetensors", "rank1.safetensors"]


def test_ranks_that_disagree_about_a_shape_are_refused(tmp_path):
    first, second = run_ranks(cases.save_unequal_shapes, 2, tmp_path)
    assert first == second
    assert first.startswith("model.w is torch.float32 (2,) on one rank and")


def test_ranks_may_hold_different_names(tmp_path):
    results = run_ranks(cases.save_different_names, 2, tmp_path)
    for rank, (refused, loaded) in enumerate(results):
        assert "holds model.stage1, which" in refused
        assert loaded == [rank, rank, rank, rank + 0.5]


def test_plain_state_of_a_sharded_parameter_is_refused():
    for refused in run_ranks(cases.save_plain_state_of_sharded, 2):
        assert "'master' of the sharded parameter inner.0.weight" in refused
