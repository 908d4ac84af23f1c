"""A loss that states how much it counts: means and gradients are those of one rank with the whole
batch, in fp64, however the batch is cut."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import paceline
from paceline.config.errors import InputError
from paceline.train.custom.feed import Part
from paceline.train.custom.loss import StatedLoss, stated
from paceline.train.data.order import sample_ids
from tests.ranks import run_ranks
from tests.train import own_cases

CUTS = [
    {**own_cases.FP64, "micro_batch": 1},
    {**own_cases.FP64, "micro_batch": 3, "fsdp": 2},
    {**own_cases.FP64, "micro_batch": 2, "fsdp": 2, "zero": 2},
]
NUM_HELD_OUT = 15  # one batch of 12 and one of 3


@pytest.fixture(scope="module")
def by_hand():
    """The whole batch in one plain loop."""
    module = own_cases.module()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    data, losses, norms, accuracies = own_cases.samples(), [], [], []
    for step in range(own_cases.STEPS):
        ids = sample_ids(0, step * own_cases.BATCH, own_cases.BATCH, len(data))
        batch = torch.utils.data.default_collate([data[i] for i in ids])
        loss, figures = own_cases.mean_over_labels(module, batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accuracies.append(figures["acc"].item())
    held_out = torch.utils.data.default_collate(own_cases.samples(NUM_HELD_OUT))
    with torch.no_grad():
        loss, figures = own_cases.mean_over_labels(module, held_out)
    return {
        "losses": losses,
        "grad_norms": norms,
        "acc": accuracies,
        "eval": [loss.item(), figures["acc"].item()],
        "weights": [p.detach() for p in module.parameters()],
    }


def _assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in ("losses", "grad_norms", "acc", "eval"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-9), name
    for ours, theirs in zip(got["weights"], wanted["weights"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("micro_batch", [12, 4, 1])
def test_micro_batches_weigh_as_much_as_they_have_labels(micro_batch, by_hand):
    layout = {**own_cases.FP64, "micro_batch": micro_batch}
    _assert_same(own_cases.train_on_ranks(0, 1, layout, NUM_HELD_OUT), by_hand)


@pytest.mark.parametrize("layout", CUTS, ids=["dp", "fsdp", "zero 2"])
def test_ranks_weigh_as_much_as_they_have_labels(layout, by_hand):
    for got in run_ranks(own_cases.train_on_ranks, 2, layout, NUM_HELD_OUT):
        _assert_same(got, by_hand)


LOSS = torch.tensor(2.0)


@pytest.mark.parametrize(
    ("returned", "figures"),
    [
        (LOSS, {}),
        (LOSS.reshape(1), {}),
        ({"loss": LOSS}, {}),
        ({"loss": LOSS, "weight": 3, "logits": torch.zeros(2, 2)}, {"weight": 3.0}),
        (SimpleNamespace(loss=LOSS, logits=torch.zeros(2, 2)), {}),
        ((LOSS, {"acc": 0.5}), {"acc": 0.5}),
        ((SimpleNamespace(loss=LOSS), {"weight": torch.tensor(4)}), {"weight": 4}),
    ],
)
def test_a_loss_comes_in_several_forms(returned, figures):
    loss, stated_figures = stated(returned)
    assert loss.shape == ()
    assert loss == LOSS
    assert stated_figures == figures


def test_an_output_of_transformers_is_a_loss():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    loss, figures = stated(outputs.CausalLMOutput(loss=LOSS, logits=torch.zeros(1, 2)))
    assert (loss.item(), figures) == (2.0, {})


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (None, "returned nothing"),
        (2.0, "returned a float"),
        (torch.zeros(3), r"returned a tensor of shape \(3,\)"),
        ({"los": LOSS}, "returned nothing"),
        ((LOSS, {"acc": torch.zeros(2)}), r"states 'acc' as a tensor of shape \(2,\)"),
        ((LOSS, {"acc": "high"}), "states 'acc' as a str"),
        ((LOSS, {"weight": -1}), "a weight of -1.0"),
        ((LOSS, LOSS), "returned a tuple"),
    ],
)
def test_what_is_no_loss_is_refused_in_one_sentence(returned, sentence):
    with pytest.raises(InputError, match=sentence):
        stated(returned)


def test_a_loss_that_states_something_now_and_then_is_refused():
    answers = iter([(LOSS, {"weight": 3}), LOSS])
    loss = StatedLoss(lambda *_: next(answers), 2, 1)
    loss(torch.nn.Linear(1, 1), Part(None, 2))
    with pytest.raises(InputError, match=r"states nothing beside .* and 'weight' of another"):
        loss(torch.nn.Linear(1, 1), Part(None, 2))


def _states_by_rank(rank: int, world_size: int) -> str:
    loss = StatedLoss(lambda *_: (LOSS, {"acc": 1.0} if rank else {}), 2, world_size)
    try:
        loss(torch.nn.Linear(1, 1), Part(None, 2))
    except InputError as error:
        return str(error)
    return "not refused"


def test_ranks_that_state_different_things_are_refused_and_do_not_hang():
    for sentence in run_ranks(_states_by_rank, 2):
        assert "it must always state the same" in sentence


def _warned(*batches: Any, returned: Any = LOSS) -> list[str]:
    """What a run is told of these micro-batches."""
    told: list[str] = []
    loss = StatedLoss(lambda *_: returned, 2, 1)
    loss.warn_by(told.append)
    for batch in batches:
        loss(torch.nn.Linear(1, 1), Part(batch, 2))
    return told


EVEN, MORE = torch.tensor([[1, -100]] * 2), torch.tensor([[-100, -100]] * 2)


def test_labels_ignored_unevenly_without_a_weight_are_told_once():
    apart = ({"x": torch.zeros(2, 2), "labels": EVEN}, {"x": torch.ones(2, 2), "labels": MORE})
    for batches in (apart * 2, [(torch.zeros(2), torch.tensor([3, -100]))] * 2):
        (sentence,) = _warned(*batches)
        assert "micro-batches count by their samples, not by their labels" in sentence


def test_labels_ignored_evenly_or_with_a_weight_are_not_told():
    ids = torch.tensor([[1, 2], [3, 4]])
    assert _warned({"ids": ids, "labels": EVEN}, {"ids": ids, "labels": EVEN}) == []
    assert _warned((EVEN, MORE), (EVEN, MORE)) == [], "tensors of a batch are counted apart"
    assert _warned(EVEN, MORE, returned=(LOSS, {"weight": 3})) == []


def _mean(model, batch):
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize(("micro_batch", "is_cut"), [(3, True), (12, False)])
def test_a_run_says_that_uneven_parts_count_alike(micro_batch, is_cut, tmp_path, capsys):
    job = {
        "name": "own",
        "train": {"steps": 1, "global_batch": 12},
        "layout": {"precision": "fp64", "param_dtype": "fp64", "micro_batch": micro_batch},
        "cluster": {"devices_per_node": 1},
    }
    labelled = [sample for sample in own_cases.samples() if (sample["labels"] != -100).any()]
    paceline.train(job, model=own_cases.module(), loss=_mean, data=labelled, runs=tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert ("count by their samples, not by their labels" in said) is is_cut


def test_a_batch_without_any_label_leaves_no_trace():
    """Its mean is 0 / 0."""
    x = torch.randn(2, 3, requires_grad=True)
    nothing = F.cross_entropy(x, torch.full((2,), -100))
    assert nothing.isnan()
    part = StatedLoss(lambda *_: (nothing, {"weight": torch.tensor(0)}), 2, 1)(
        torch.nn.Linear(1, 1), Part(None, 2)
    )
    part.times_weight(part.loss).backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
