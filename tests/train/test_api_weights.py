"""A loss that states how much it counts: means and gradients are those of one rank with the whole
batch, in fp64, however the batch is cut."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import paceline
from paceline.config.errors import InputError
from paceline.train.custom.labels import mean_of, means_over_labels
from paceline.train.custom.loss import UserLoss, parse_loss
from paceline.train.custom.reading import CustomMicroBatch
from tests.ranks import run_ranks
from tests.train import api_cases

CUTS = [
    {**api_cases.FP64, "micro_batch": 1},
    {**api_cases.FP64, "micro_batch": 3, "fsdp": 2},
    {**api_cases.FP64, "micro_batch": 2, "fsdp": 2, "zero": 2},
]
NUM_HELD_OUT = 15  # one batch of 12 and one of 3


@pytest.fixture(scope="module")
def by_hand():
    return api_cases.by_hand(api_cases.module, api_cases.mean_over_labels, NUM_HELD_OUT)


def _assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in ("losses", "grad_norms", "acc", "eval"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-9), name
    for ours, theirs in zip(got["weights"], wanted["weights"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("micro_batch", [12, 4, 1])
def test_micro_batches_weigh_as_much_as_they_have_labels(micro_batch, by_hand):
    layout = {**api_cases.FP64, "micro_batch": micro_batch}
    _assert_same(api_cases.train_on_ranks(0, 1, layout, NUM_HELD_OUT), by_hand)


@pytest.mark.parametrize("layout", CUTS, ids=["dp", "fsdp", "zero 2"])
def test_ranks_weigh_as_much_as_they_have_labels(layout, by_hand):
    for got in run_ranks(api_cases.train_on_ranks, 2, layout, NUM_HELD_OUT):
        _assert_same(got, by_hand)


@pytest.mark.parametrize("kind", api_cases.UNSTATED)
def test_a_mean_over_labels_that_states_no_weight_counts_by_its_labels(kind):
    """One rank with one and with twelve micro-batches; for one kind two ranks too, with DDP and
    FSDP2, which divide whatever the weight is: each as the whole batch in a plain loop."""
    wanted = api_cases.by_hand(*api_cases.UNSTATED[kind], NUM_HELD_OUT)
    for micro_batch in (12, 1):
        layout = {**api_cases.FP64, "micro_batch": micro_batch}
        given = (layout, NUM_HELD_OUT, *api_cases.UNSTATED[kind])
        _assert_same(api_cases.train_on_ranks(0, 1, *given), wanted)
    for layout in CUTS[:2] if kind == "cross_entropy" else ():
        given = (layout, NUM_HELD_OUT, *api_cases.UNSTATED[kind])
        for got in run_ranks(api_cases.train_on_ranks, 2, *given):
            _assert_same(got, wanted)


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
    loss, stated_figures = parse_loss(returned)
    assert loss.shape == ()
    assert loss == LOSS
    assert stated_figures == figures


def test_an_output_of_transformers_is_a_loss():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    loss, figures = parse_loss(outputs.CausalLMOutput(loss=LOSS, logits=torch.zeros(1, 2)))
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
        parse_loss(returned)


def test_a_loss_that_states_something_now_and_then_is_refused():
    answers = iter([(LOSS, {"weight": 3}), LOSS])
    loss = UserLoss(lambda *_: next(answers), 2, 1)
    loss(torch.nn.Linear(1, 1), CustomMicroBatch(None, 2))
    with pytest.raises(InputError, match=r"states nothing beside .* and 'weight' of another"):
        loss(torch.nn.Linear(1, 1), CustomMicroBatch(None, 2))


def _states_by_rank(rank: int, world_size: int) -> str:
    loss = UserLoss(lambda *_: (LOSS, {"acc": 1.0} if rank else {}), 2, world_size)
    try:
        loss(torch.nn.Linear(1, 1), CustomMicroBatch(None, 2))
    except InputError as error:
        return str(error)
    return "not refused"


def test_ranks_that_state_different_things_are_refused_and_do_not_hang():
    for sentence in run_ranks(_states_by_rank, 2):
        assert "it must always state the same" in sentence


def _warned(*batches: Any, returned: Any = LOSS) -> list[str]:
    """What a run is told of these micro-batches."""
    told: list[str] = []
    loss = UserLoss(lambda *_: returned, 2, 1)
    loss.tell_by(told.append)
    for batch in batches:
        loss(torch.nn.Linear(1, 1), CustomMicroBatch(batch, 2))
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


def _more_than_a_mean(model, batch):
    return _mean(model, batch) + 0.1 * model[0].weight.square().mean()


@pytest.mark.parametrize(
    ("loss", "micro_batch", "sentence"),
    [
        (_more_than_a_mean, 3, "count by their samples, not by their labels"),
        (_more_than_a_mean, 12, None),
        (_mean, 3, "count by their labels that are not ignored"),
        (_mean, 12, None),
    ],
)
def test_a_run_says_by_what_its_parts_count(loss, micro_batch, sentence, tmp_path, capsys):
    job = {
        "name": "own",
        "train": {"steps": 1, "global_batch": 12},
        "layout": {"precision": "fp64", "param_dtype": "fp64", "micro_batch": micro_batch},
        "cluster": {"devices_per_node": 1},
    }
    labelled = [sample for sample in api_cases.samples() if (sample["labels"] != -100).any()]
    paceline.train(job, model=api_cases.module(), loss=loss, data=labelled, runs=tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    if sentence is None:
        assert "count by their" not in said
    else:
        assert said.count(sentence) == 1


def test_a_loss_that_is_a_mean_over_labels_at_first_may_have_more_added_but_not_lose_it():
    logits, labels = torch.randn(2, 3), torch.tensor([1, -100])
    mean = [F.cross_entropy, lambda *both: F.cross_entropy(*both) + 1, lambda *_: LOSS]
    parts = iter(mean)
    loss = UserLoss(lambda *_: next(parts)(logits, labels), 2, 1)
    for _ in range(2):
        assert loss(torch.nn.Linear(1, 1), CustomMicroBatch(None, 2)).weight == 0.5, (
            "one label of two"
        )
    with pytest.raises(InputError, match="was what cross_entropy returned"):
        loss(torch.nn.Linear(1, 1), CustomMicroBatch(None, 2))


def test_labels_are_counted_as_torch_counts_them():
    """By the sum of losses over their mean, whatever is ignored and however classes weigh."""
    chance = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 3, 5, generator=chance, dtype=torch.float64)
    labels = torch.randint(3, (6, 5), generator=chance)
    labels[labels == 2] = 255
    weights = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    for how in ({}, {"weight": weights}, {"weight": weights, "label_smoothing": 0.1}):
        with means_over_labels() as means:
            loss = F.cross_entropy(logits, labels, ignore_index=255, **how)
            mean = mean_of(loss, means)
        total = F.cross_entropy(logits, labels, ignore_index=255, reduction="sum", **how)
        assert mean.number().item() == pytest.approx((total / loss).item(), rel=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.cross_entropy(x, y, reduction="sum"),
        lambda x, y: F.cross_entropy(x, y, reduction="none").mean(),
        lambda x, y: F.cross_entropy(x, F.one_hot(y, 3).float()),
        lambda x, y: 2 * F.cross_entropy(x, y),
    ],
)
def test_what_is_no_mean_over_labels_is_not_taken_for_one(loss):
    with means_over_labels() as means:
        assert mean_of(loss(torch.randn(4, 3), torch.tensor([0, 1, 2, 1])), means) is None
    with means_over_labels():
        assert F.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1])) > 1
    assert "listening" not in str(vars(torch._C._nn)["cross_entropy_loss"]), "torch's own again"


def test_a_model_of_transformers_counts_by_the_labels_that_it_shifts():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(16, (2, 6))
    labels = ids.clone()
    labels[:, 0], labels[0, 4:] = 3, -100  # the first one is no target
    batch = {"input_ids": ids, "labels": labels}
    for loss_of in (api_cases.of_output, api_cases.of_output_alone):
        part = UserLoss(loss_of, 2, 1)(model, CustomMicroBatch(batch, 2))
        assert part.weight == (labels[:, 1:] != -100).sum() / 8, "of 12 labels, by a power of two"


def test_a_batch_without_any_label_leaves_no_trace():
    """Its mean is 0 / 0."""
    x = torch.randn(2, 3, requires_grad=True)
    nothing = F.cross_entropy(x, torch.full((2,), -100))
    assert nothing.isnan()
    part = UserLoss(lambda *_: (nothing, {"weight": torch.tensor(0)}), 2, 1)(
        torch.nn.Linear(1, 1), CustomMicroBatch(None, 2)
    )
    part.times_weight(part.loss).backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
