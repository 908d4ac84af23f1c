"""A run that goes on under another layout goes on exactly: parameters, moments, samples, schedule.

First the samples, in one process without ranks. Then pairs of layouts drawn at random over all axes
and 1 to 8 gloo ranks: two steps under the first and its checkpoint, two more under the second,
through the real loop and the real data; against four steps of one process. Then what else may
change on the way, and the command line. All layouts of one number of ranks share a launch.
"""

import functools
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.train.checkpoint.leaves import leaves
from paceline.train.data import prepare
from paceline.train.families import task_of
from tests.command_line import losses, metrics, paceline, ranks, write_tiny_job
from tests.parallel.drawn import AXES, accepted
from tests.parallel.training import FP32, FP64, MODELS, TOLERANCE
from tests.parallel.training import job_of as check
from tests.train.checkpoint_cases import assert_same
from tests.train.reshard_cases import (
    FIRST,
    SECOND,
    SMALL,
    Leg,
    go_on,
    job_of,
    run_legs,
    whole_state,
)

SEED = int(os.environ.get("PACELINE_LAYOUT_SEED", "2026"))
"""Another one draws other pairs."""
KINDS = tuple(kind for kind in MODELS if kind not in ("documents", "sources", "one key head"))
NUM_RANKS = (
    (2, 4, 1, 8, 3, 2, 4, 2, 1, 2, 4, 6),
    (4, 2, 2, 1, 2, 3, 2, 8, 4, 1, 4, 2),
)
"""Ranks of the first layout of each pair, and of the second."""


class Pair(NamedTuple):
    """Two layouts with their numbers of ranks."""

    kind: str
    precision: tuple[str, ...]
    num_ranks: tuple[int, int]
    layouts: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def model(self) -> tuple[str, ...]:
        """Settings of network and arithmetic."""
        return (*MODELS[self.kind], *self.precision)

    def __str__(self) -> str:
        shown = (" ".join(s.removeprefix("layout.") for s in layout) for layout in self.layouts)
        return f"{self.kind}, {self.precision[0][-4:]}: " + " -> ".join(shown)

    def leg(self, folder: Path, which: int) -> Leg:
        """Its first or second part."""
        settings = (*self.model, *self.layouts[which])
        return Leg(folder, self.num_ranks[which], settings, None if which else FIRST)


def layouts_of(kind: str, seed: int, num_ranks: int) -> Iterator[tuple[str, ...]]:
    """Random layouts for one small network, also where the draw would take a deeper one."""
    model = (*MODELS[kind], *SMALL)
    for settings in accepted(seed, num_ranks, model, kind):
        layout = tuple(setting for setting in settings if setting.startswith("layout."))
        with suppress(InputError):
            check(num_ranks, (*model, *layout))
            yield layout


def drawn_pairs() -> list[Pair]:
    """Each kind of network has its own streams of layouts, one for each number of ranks."""
    stream = functools.cache(layouts_of)
    pairs = []
    for at, num_ranks in enumerate(zip(*NUM_RANKS, strict=True)):
        kind = KINDS[at % len(KINDS)]
        layouts = [next(stream(kind, SEED + which, n)) for which, n in enumerate(num_ranks)]
        pairs.append(Pair(kind, FP64 if at % 4 else FP32, num_ranks, tuple(layouts)))
    return pairs


PAIRS = drawn_pairs()


class Given(NamedTuple):
    """A pair that has to be among them, and how near it has to come to the one process."""

    pair: Pair
    loss: float
    state: float | None = None
    """None: only names, shapes and types have to be the same."""


def given(kind, precision, num_ranks, first, second, *tolerances) -> Given:
    """One of two layouts written out."""
    layouts = [tuple(f"layout.{s}" for s in each.split()) for each in (first, second)]
    return Given(Pair(kind, precision, num_ranks, tuple(layouts)), *tolerances)


FP16 = ("layout.precision=fp16", "layout.micro_batch=2")
CODED = "optimizer_state=8bit"
GIVEN = {
    "copies on a rank": given(
        "dense, tied", FP64, (2, 2), "pp=2 schedule=dualpipe", "pp=2 schedule=zbv", 1e-10, 1e-10
    ),
    "uneven shards of columns": given(
        "dense", FP64, (6, 2), "fsdp=3 tp=2", "pp=2 schedule=dualpipe", 1e-10, 1e-10
    ),
    "shared key heads, odd vocabulary": given(
        "one key head", FP64, (4, 4), "fsdp=2 tp=2 zero=3", "tp=4", 1e-10, 1e-10
    ),
    "freed stages": given(
        "dense, tied",
        FP64,
        (4, 4),
        "pp=2 fsdp=2 zero=3 micro_batch=2",
        "pp=2 fsdp=2 zero=2 schedule=zbv micro_batch=2",
        1e-10,
        1e-10,
    ),
    "out of stages of shards": given(
        "dense",
        FP64,
        (4, 2),
        "pp=2 fsdp=2 zero=2 schedule=zb_h1 micro_batch=2",
        "tp=2",
        1e-10,
        1e-10,
    ),
    "8-bit moments": given("dense", FP32, (2, 2), f"fsdp=2 {CODED}", "tp=2", 1e-4),
    "to 8-bit moments": given("dense", FP32, (2, 2), "tp=2", f"fsdp=2 {CODED}", 1e-4),
    "scaled loss": given("dense", FP16, (2, 2), "fsdp=2", "tp=2", 1e-4),
    "moved experts": given("experts", FP64, (2, 2), "dp=2 ep=2 rebalance_every=1", "tp=2", 1e-10),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a text, and with conversations."""
    folder = tmp_path_factory.mktemp("reshard")
    write_tiny_job(folder)
    rows = ({"prompt": f"{n} + 1 = ", "completion": f"{n + 1}"} for n in range(200))
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def ran(root):
    """Pair -> its folder, and what each rank noted of the steps under its second layout."""
    prepare(job_of(root / "any", 1, ()).data)
    pairs = [*PAIRS, *(each.pair for each in GIVEN.values())]
    folders = {pair: root / f"pair{at}" for at, pair in enumerate(pairs)}
    run_legs([pair.leg(folder, 0) for pair, folder in folders.items()])
    lines = run_legs([pair.leg(folder, 1) for pair, folder in folders.items()])
    return {pair: (folder, lines[folder]) for pair, folder in folders.items()}


@pytest.fixture(scope="module")
def uninterrupted(root):
    """Settings of network and arithmetic -> four steps of one process: its folder and lines."""

    @functools.cache
    def train(model):
        folder = root / f"whole{hash(model)}"
        return folder, go_on(0, 1, Leg(folder, 1, (*model, "layout.micro_batch=2")))

    return train


def forms(state):
    """Name -> shape and type."""
    values = {name: leaf.value for name, leaf in leaves(state).items()}
    return {name: (v.shape, v.dtype) for name, v in values.items() if isinstance(v, torch.Tensor)}


# One process.


@pytest.mark.parametrize("pair", PAIRS[:6], ids=str)
def test_samples_come_in_the_same_order_under_any_layout(pair, root):
    job = job_of(root / "any", 1, pair.model)
    batch = job.train.global_batch
    serial = task_of(job, Ranks())
    expected = list(itertools.islice(serial.steps_from(0), FIRST + SECOND))
    seen: list[dict[int, torch.Tensor]] = []
    for which, num_ranks in enumerate(pair.num_ranks):
        job = job_of(root / "any", num_ranks, (*pair.model, *pair.layouts[which]))
        steps: list[dict[int, torch.Tensor]] = [{} for _ in range((FIRST, SECOND)[which])]
        for rank in range(num_ranks):
            task = task_of(job, Ranks(rank, num_ranks))
            for held, step in zip(steps, task.steps_from(which * FIRST * batch), strict=False):
                mine = torch.cat([micro_batch.tokens for micro_batch in step])
                other = held.setdefault(job.layout.data_rank(rank), mine)
                assert torch.equal(mine, other), "ranks that share a sample see the same one"
        seen += steps
    for held, step in zip(seen, expected, strict=True):
        together = torch.cat([held[data_rank] for data_rank in sorted(held)])
        assert torch.equal(together, torch.cat([micro_batch.tokens for micro_batch in step]))


# Ranks.


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_run_goes_on_under_another_layout(pair, ran, uninterrupted):
    folder, of_ranks = ran[pair]
    whole_folder, whole_lines = uninterrupted(pair.model)
    tolerance = TOLERANCE[pair.precision]
    for lines in of_ranks:
        assert [line["step"] for line in lines] == [FIRST + 1, FIRST + 2]
        for line, whole in zip(lines, whole_lines[FIRST:], strict=True):
            assert line["loss"] == pytest.approx(whole["loss"], rel=tolerance)
            assert line["lr"] == whole["lr"]
    after, expected = (whole_state(each, pair.model) for each in (folder, whole_folder))
    assert_same(after, expected, tolerance)


@pytest.mark.parametrize("what", GIVEN)
def test_what_a_draw_may_leave_out(what, ran, uninterrupted):
    pair, loss, state = GIVEN[what]
    folder, of_ranks = ran[pair]
    whole_folder, whole_lines = uninterrupted(pair.model)
    for line, whole in zip(of_ranks[0], whole_lines[FIRST:], strict=True):
        assert line["loss"] == pytest.approx(whole["loss"], rel=loss)
    after, expected = (whole_state(each, pair.model) for each in (folder, whole_folder))
    assert_same(after["facts"], expected["facts"], loss or 0.0)  # steps, samples, loss scale
    assert forms(after) == forms(expected)
    if state is not None:
        assert_same(after, expected, state)
    slots = [slot for name, slot in after["model"].items() if name.endswith(".slot_of_expert")]
    assert any(slot.tolist() != list(range(len(slot))) for slot in slots) == (
        what == "moved experts"
    )


def test_the_command_line_goes_on_under_another_layout(tmp_path):
    write_tiny_job(tmp_path)
    constant = ("model.vocab_size=264", "optim.schedule=constant", "optim.warmup_steps=2")

    def train(name, steps, num_ranks, *layout):
        settings = [*constant, f"name={name}", f"train.steps={steps}", *layout]
        sets = [word for setting in settings for word in ("--set", setting)]
        done = paceline("train", "job.toml", *sets, *ranks(num_ranks), folder=tmp_path)
        assert done.returncode == 0, done.stderr
        return losses(tmp_path, name), metrics(tmp_path, name)[-1]["eval_loss"]

    train("split", 3, 2, "layout.dp=2")
    resumed, evaluated = train("split", 6, 4, "layout.tp=2", "layout.pp=2", "layout.micro_batch=2")
    whole, evaluated_whole = train("whole", 6, 1)
    assert resumed == pytest.approx(whole, rel=1e-5)
    assert evaluated == pytest.approx(evaluated_whole, rel=1e-5)


def test_every_axis_was_drawn():
    assert len(set(PAIRS)) >= 12
    drawn = {setting for pair in PAIRS for layout in pair.layouts for setting in layout}
    for axis in AXES:
        assert {setting for setting in drawn if axis in setting} > {f"layout.{axis}=1"}, axis
