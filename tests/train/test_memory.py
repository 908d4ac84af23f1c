"""A run goes on from the memory of its ranks as it would from the disk, to the bit."""

import pickle

import pytest

from paceline.train.data import prepare
from tests.command_line import write_tiny_job
from tests.ranks import run_ranks
from tests.train import memory_cases as cases
from tests.train.memory_cases import STEPS, After, Before
from tests.train.reshard_cases import job_of


def layout(text):
    return tuple(f"layout.{setting}" for setting in text.split())


FP32 = ("layout.precision=fp32",)
COPY_EACH = ("elastic.copy_every=1",)
CODED = "optimizer_state=8bit"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    write_tiny_job(folder)
    prepare(job_of(folder / "any", 1, ()).data)
    return folder


# Name -> ranks and layout before, ranks of a node, who is lost, ranks and layout after, source.
MOVES = {
    "dp4 -> fsdp3": (4, "dp=4", 1, {2}, 3, "fsdp=3", "live"),
    "dp4 -> dp4 with a new rank": (4, "dp=4", 1, {1}, 4, "dp=4", "live"),
    "fsdp4 -> fsdp2": (4, "fsdp=4", 2, {0, 1}, 2, "fsdp=2", "buddy"),
    "fsdp4 -> tp2": (4, "fsdp=4", 2, {2, 3}, 2, "tp=2", "buddy"),
    "pp2 x dp2 -> fsdp4": (4, "pp=2 dp=2", 1, {1}, 4, "fsdp=4", "live"),
    "pp2 x fsdp2 -> dp3": (4, "pp=2 fsdp=2", 2, {2, 3}, 3, "dp=3", "buddy"),
    "tp2 -> dp2": (2, "tp=2", 1, {0}, 2, "dp=2", "buddy"),
    "8-bit": (4, f"fsdp=4 {CODED}", 1, {0}, 3, f"fsdp=3 {CODED}", "buddy"),
    "8-bit to numbers": (2, f"fsdp=2 {CODED}", 1, {1}, 2, "tp=2", "buddy"),
    "dp2 x fsdp2 -> fsdp2": (4, "dp=2 fsdp=2", 2, {2, 3}, 2, "fsdp=2", "live"),
    "to one": (2, "fsdp=2", 1, {1}, 1, "", "buddy"),
}
WITH_MEANS = {"fsdp4 -> fsdp2", "dp4 -> fsdp3"}
"""Those that keep a running mean of the weights besides."""


def before_of(root, name):
    _, text, per_node, *_ = MOVES[name]
    folder = root / "".join(c if c.isalnum() else "-" for c in name)
    settings = (*FP32, *COPY_EACH, *layout(text))
    return Before(folder, settings, per_node, ema=0.5 if name in WITH_MEANS else None)


@pytest.fixture(scope="module")
def moved(root):
    """Name -> what each rank found."""
    held = {}
    for num_ranks in sorted({move[0] for move in MOVES.values()}):
        names = [name for name, move in MOVES.items() if move[0] == num_ranks]
        runs = [before_of(root, name) for name in names]
        of_ranks = run_ranks(cases.train_before, num_ranks, runs)
        held |= dict(zip(names, map(list, zip(*of_ranks, strict=True)), strict=True))
    found = {}
    for num_ranks in sorted({move[4] for move in MOVES.values()}):
        names = [name for name, move in MOVES.items() if move[4] == num_ranks]
        afters = []
        for name in names:
            _, _, _, lost, _, text, _ = MOVES[name]
            left = [each for rank, each in enumerate(held[name]) if rank not in lost]
            afters.append(After(before_of(root, name), (*FP32, *layout(text)), left))
        if num_ranks == 1:
            of_ranks = [cases.go_on(0, 1, afters)]
        else:
            of_ranks = run_ranks(cases.go_on, num_ranks, afters)
        found |= dict(zip(names, zip(*of_ranks, strict=True), strict=True))
    return found


@pytest.mark.parametrize("name", MOVES)
def test_another_layout_goes_on_as_from_the_disk(name, moved):
    source = MOVES[name][-1]
    for rank in moved[name]:
        assert rank[3] == [], "differs from what the disk gives"
        assert rank[:2] == (STEPS, source)


def test_a_later_checkpoint_goes_before_an_older_state_in_memory(root):
    settings = (*FP32, *COPY_EACH, *layout("fsdp=2"))
    before = Before(root / "later", settings, 1)
    held = run_ranks(cases.train_before, 2, [before])[0][0]
    older = [one for one in pickle.loads(held) if one.step < STEPS]
    assert {(one.step, one.kind) for one in older} == {(1, "own"), (1, "buddy")}
    after = After(before, (*FP32, *layout("fsdp=1")), [pickle.dumps(older)])
    ((step, *_, differing),) = cases.go_on(0, 1, [after])
    assert (step, differing) == (None, []), "from the disk"
    shard = next((before.folder / f"checkpoints/step-{STEPS}").glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    checkpoints, _ = cases.checkpoints_of(before, 0, 1, after.settings)
    assert checkpoints.begin(older, generation=2) == 1


def test_workers_of_several_ranks_go_on_at_a_round_that_all_of_their_ranks_ended(root):
    local = ("comm.local.method=diloco", "comm.local.every=1")
    before = Before(root / "rounds", (*FP32, *local, *layout("dp=2 fsdp=2 zero=3")), 1)
    of_ranks = run_ranks(cases.lose_in_a_round, 4, before)
    assert of_ranks == [([1, 2], 1)] * 4
