"""Tensor parallelism of a person's own module by a plan, on gloo ranks, against a plain loop."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from paceline.config.errors import InputError
from paceline.parallel.tp_plan import check_plan
from tests.command_line import losses, python
from tests.ranks import run_ranks
from tests.train import api_cases, api_script

PLACES = api_cases.PLACES


class Heads(nn.Module):
    """Attention over however many heads a rank has, each with a norm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, 16) for _ in range(3))
        self.q_norm = nn.LayerNorm(4)
        self.out = nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(self.q_norm(q), k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = Heads(width)
        self.ffn = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.heads(self.norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Network(nn.Module):
    """Two layers between two tables that are one: a row for each of sixteen values of a place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.place = nn.Parameter(torch.randn(PLACES, 8))
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def network() -> nn.Module:
    torch.manual_seed(3)
    return Network().double()


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    ids = (batch["x"][..., 0] * 4).long().clamp(-8, 7) + 8
    logits, labels = model(ids).flatten(0, 1), batch["labels"].flatten()
    right = (logits.argmax(dim=1) == labels)[labels != -100].double().mean()
    return F.cross_entropy(logits, labels), {"acc": right, "weight": (labels != -100).sum()}


WORDS: dict[str, Any] = {
    "embed": "embedding_rowwise",
    "head": "colwise_gather_output",
    **{f"layers.*.heads.{name}": "colwise" for name in "qkv"},
    "layers.*.heads.q_norm": "replicated_with_grad_allreduce",
    "layers.*.heads.out": "rowwise",
    "layers.*.ffn.0": "colwise",
    "layers.*.ffn.2": "rowwise",
}
"""As plans of transformers are."""


def _tokens_shared_out() -> dict[str, Any]:
    """torch's styles: the tokens between layers are shared out."""
    along = Shard(1)
    return WORDS | {
        "layers.*.norm": SequenceParallel(use_local_output=True),
        "layers.*.ffn_norm": SequenceParallel(use_local_output=True),
        "norm": SequenceParallel(use_local_output=True),
        "layers.*.heads": PrepareModuleInput(
            input_layouts=along, desired_input_layouts=Replicate(), use_local_output=True
        ),
        "layers.*.heads.out": RowwiseParallel(output_layouts=along),
        "layers.*.ffn.0": ColwiseParallel(input_layouts=along),
        "layers.*.ffn.2": RowwiseParallel(output_layouts=along),
        "layers.0": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=along, use_local_output=True
        ),
        "head": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
    }


NUM_HELD_OUT = 15  # one batch of 12 and one of 3
CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"tp": 2}, WORDS),
    (2, {"tp": 2, "micro_batch": 3}, _tokens_shared_out()),
    (2, {"tp": 2, "micro_batch": 4, "recompute": "full"}, WORDS),
    (4, {"tp": 2, "dp": 2, "micro_batch": 3}, WORDS),
    (4, {"tp": 2, "fsdp": 2, "micro_batch": 3}, WORDS),
    (4, {"tp": 2, "fsdp": 2, "zero": 1, "micro_batch": 3}, _tokens_shared_out()),
]
NAMES = ["alone", "tokens", "recompute", "dp", "fsdp", "zero 1, tokens"]


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return api_cases.by_hand(network, loss_of, NUM_HELD_OUT)


@pytest.mark.parametrize(("num_ranks", "layout", "plan"), CASES, ids=NAMES)
def test_ranks_that_share_a_module_do_what_one_does(num_ranks, layout, plan, one_rank):
    given = ({**api_cases.FP64, **layout}, NUM_HELD_OUT, network, loss_of, plan)
    for got in run_ranks(api_cases.train_on_ranks, num_ranks, *given):
        for name in ("losses", "grad_norms", "acc", "eval"):
            assert got[name] == pytest.approx(one_rank[name], rel=1e-9), name
        for ours, theirs in zip(got["weights"], one_rank["weights"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_a_part_that_no_style_sums_up_is_found_in_the_first_step():
    plan = {name: style for name, style in WORDS.items() if "q_norm" not in name}
    given = ({**api_cases.FP64, "tp": 2}, NUM_HELD_OUT, network, loss_of, plan)
    with pytest.raises(
        AssertionError, match=r"heads\.q_norm\.weight is whole on every rank of lay"
    ):
        run_ranks(api_cases.train_on_ranks, 2, *given)


def _llama() -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads)).double()
    # Its own norms compute in fp32 whatever the weights, which rounds sums of other orders apart.
    for name, child in list(model.named_modules()):
        if name.endswith("norm"):
            norm = nn.RMSNorm(16, eps=child.variance_epsilon, dtype=torch.float64)
            model.set_submodule(name, norm)
    return model


def _of_llama(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return loss_of(lambda ids: model(input_ids=ids).logits, batch)


def test_a_model_of_transformers_is_cut_by_its_own_plan():
    pytest.importorskip("transformers")
    plan = dict(_llama().tp_plan)
    check_plan(_llama(), plan, 2)
    wanted = api_cases.by_hand(_llama, _of_llama, NUM_HELD_OUT)
    given = ({**api_cases.FP64, "tp": 2}, NUM_HELD_OUT, _llama, _of_llama, plan)
    for got in run_ranks(api_cases.train_on_ranks, 2, *given):
        assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-9)
        assert got["grad_norms"] == pytest.approx(wanted["grad_norms"], rel=1e-9)
        for ours, theirs in zip(got["weights"], wanted["weights"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


PLAN = {"0": "colwise_gather_output", "3": "rowwise_split_input"}


def _trained(folder: Path, layout: dict[str, int], steps: int = 8) -> dict[int, float]:
    job = {
        "cluster": {"devices_per_node": layout.get("tp", 1)},
        "layout": layout,
        "train": {"steps": steps},
    }
    folder.mkdir(exist_ok=True)
    done = python(api_script.__file__, json.dumps({"job": job, "tp_plan": PLAN}), folder=folder)
    assert done.returncode == 0, done.stderr
    return losses(folder, "own")


@pytest.mark.parametrize(
    ("first", "then"), [({"tp": 2}, {}), ({}, {"tp": 2})], ids=["to 1", "to 2"]
)
def test_a_checkpoint_goes_on_with_another_number_of_ranks(first, then, tmp_path):
    _trained(tmp_path / "cut", first, steps=4)
    got = _trained(tmp_path / "cut", then)
    assert got == pytest.approx(_trained(tmp_path / "whole", {}), rel=1e-5)
    ours, theirs = (torch.load(tmp_path / name / "own.pt") for name in ("cut", "whole"))
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("plan", "tp", "sentence"),
    [
        (None, 2, "layout.tp = 2 cuts a module of your own by a plan, and there is none"),
        ({"layer.*.ffn.0": "colwise"}, 2, 'tp_plan names "layer.*.ffn.0", and no module of Netw'),
        ({"layers.*.ffn.0": "columns"}, 2, 'the style "columns", which is not known: use one of'),
        ({"layers.*.ffn.0": 1}, 2, "tp_plan maps 'layers.*.ffn.0' to 1: map"),
        (WORDS, 3, "layout.tp = 3 does not divide the 16 that dimension 0 of embed.weight has"),
        ({"norm": "colwise"}, 2, "tp_plan cuts norm by ColwiseParallel, which is of Linear and"),
        ({"head": "colwise"}, 2, "embed.weight and head.weight are one parameter, which tp_plan"),
    ],
    ids=["none", "no module", "no style", "no word", "does not divide", "norm", "tied"],
)
def test_a_plan_that_cannot_be_followed_is_refused_before_ranks_start(plan, tp, sentence):
    with pytest.raises(InputError) as refused:
        check_plan(network(), plan, tp)
    assert sentence in str(refused.value)


def test_a_start_without_a_plan_or_with_elastic_ranks_ends_with_a_sentence(tmp_path):
    job = {"cluster": {"devices_per_node": 2}, "layout": {"tp": 2}}
    done = python(api_script.__file__, json.dumps({"job": job}), folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: layout.tp = 2 cuts a module of your own by a plan")
    job["elastic"] = {"min_nodes": 1}
    given = json.dumps({"job": job, "tp_plan": PLAN})
    done = python(api_script.__file__, given, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: elastic.exact and elastic.min_nodes are of ranks")
    assert not (tmp_path / "runs" / "own").exists()
