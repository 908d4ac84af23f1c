"""Adapters of routed experts: equal to PEFT's, back and forth in its format. On several ranks they
are in tests/parallel/test_combinations.py, counted in tests/plan/test_adapters.py."""

import json

import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.finetune import Finetune
from paceline.models.adapters import (
    adapt,
    adapted_names,
    init_adapters,
    is_of_adapter,
    merged,
    without_adapters,
)
from paceline.models.decoder import Decoder
from paceline.models.peft_format import check_adapters, load_adapters, write_adapters
from paceline.models.weights import write_weights
from paceline.train.finetune import check_finetune, train_flops_per_token
from tests.generate.networks import MODELS, built
from tests.parallel.training import MODELS as SETTINGS
from tests.parallel.training import job_of
from tests.train.test_finetune import (
    adapted,
    assert_comes_back,
    assert_learns_alike,
    merged_base,
    tokens,
)

ALL = Finetune(method="lora", rank=4, alpha=12.0, targets=("attention.*", "experts.*"))
DOWN_ALONE = ALL.replace(targets=("experts.down_proj",))
SOME = ALL.replace(targets=("q_proj", "blocks.1.*experts.gate_up_proj", "blocks.2.*experts.*"))
EXPERTS = MODELS["experts"]
FAMILIES = {
    "qwen3_moe": EXPERTS.replace(qk_norm=True),
    "mixtral": EXPERTS.replace(experts=EXPERTS.experts.replace(dense_layers=())),
    "gpt_oss": MODELS["gpt_oss"].replace(
        ffn_size=16, experts=MODELS["gpt_oss"].experts.replace(dense_layers=())
    ),
}


def test_targets_that_say_experts_name_their_stacks():
    decoder = Decoder(EXPERTS)
    both = [f"blocks.{n}.ffn.experts.{kind}_proj" for n in (1, 2) for kind in ("gate_up", "down")]

    def names(*targets):
        return adapted_names(decoder, ALL.replace(targets=targets))

    assert names("experts.*") == both
    assert names("blocks.*.ffn.experts.down_proj") == both[1::2]
    assert names("*") == [name for name in names("*") if "experts" not in name]
    with pytest.raises(
        InputError, match=r"names no matrix.*down_proj, experts\.down_proj, experts"
    ):
        names("experts.up_proj")


@pytest.mark.parametrize("finetune", [ALL, DOWN_ALONE, SOME], ids=["all", "down", "some"])
def test_merged_weights_compute_the_same(finetune):
    decoder = adapted(EXPERTS, finetune)
    plain = Decoder(EXPERTS).double()
    plain.load_state_dict(merged(decoder.state_dict(), finetune))
    x = tokens(EXPERTS)
    found, before = plain(x), built(EXPERTS)(x)
    assert (found - decoder(x)).abs().max() < 1e-10
    assert (found - before).abs().max() > 0.1
    with without_adapters(decoder):
        assert (decoder(x) - before).abs().max() < 1e-12


def test_each_expert_has_an_adapter_and_they_begin_without_effect():
    decoder, x = built(EXPERTS), tokens(EXPERTS)
    before = decoder(x)
    adapt(decoder, ALL)
    decoder.double()
    init_adapters(decoder, torch.Generator().manual_seed(1))
    assert (decoder(x) - before).abs().max() < 1e-12
    decoder(x).square().mean().backward()
    trained = {name: p for name, p in decoder.named_parameters() if p.grad is not None}
    assert trained.keys() == {n for n, _ in decoder.named_parameters() if is_of_adapter(n)}
    stack = "blocks.1.ffn.experts.adapters"
    shapes = {n: tuple(p.shape) for n, p in trained.items() if n.startswith(stack)}
    assert shapes == {
        f"{stack}.gate_up_proj.lora_a.weight": (6, 4, 32),
        f"{stack}.gate_up_proj.lora_b.weight": (6, 32, 4),
        f"{stack}.down_proj.lora_a.weight": (6, 4, 16),
        f"{stack}.down_proj.lora_b.weight": (6, 32, 4),
    }


# --- PEFT


@pytest.mark.filterwarnings("ignore")  # of peft and transformers
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("finetune", [ALL, DOWN_ALONE, SOME], ids=["all", "down", "some"])
def test_steps_are_those_of_peft(tmp_path, family, finetune):
    """The same batches: losses and adapters after three steps of SGD."""
    peft = pytest.importorskip("peft", minversion="0.21")
    from transformers import AutoModelForCausalLM

    model = FAMILIES[family]
    ours = adapted(model, finetune, torch.float32)
    write_weights(tmp_path / "base", model, merged_base(ours))
    write_adapters(tmp_path / "peft", model, ours.state_dict(), finetune, None, torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    assert base.config.model_type == family
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "peft", is_trainable=True)
    batches = [tokens(model, seed=step) for step in range(3)]
    assert_learns_alike(ours, theirs, [(x, x) for x in batches])
    theirs.save_pretrained(tmp_path / "trained")
    back = adapted(model, finetune, torch.float32)
    assert_comes_back(tmp_path / "trained", model, finetune, back, ours)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_folder_is_read_back_bit_for_bit(tmp_path, family):
    """Also of experts that were moved to other slots while they were trained."""
    model = FAMILIES[family]
    decoder, moved = (adapted(model, ALL, torch.float32) for _ in range(2))
    slots = torch.tensor([3, 0, 5, 1, 2, 4])
    state = moved.state_dict()
    for name, tensor in decoder.state_dict().items():
        if name.endswith("slot_of_expert"):
            state[name].copy_(slots)
        elif ".experts." in name:
            state[name][slots] = tensor
    x = tokens(model)
    assert (moved(x) - decoder(x)).abs().max() < 1e-5
    write_adapters(tmp_path / "a", model, state, ALL, "x", torch.float32)
    check_adapters(model, ALL, str(tmp_path / "a"))
    other = built(model, torch.float32)
    adapt(other, ALL)
    load_adapters(other, str(tmp_path / "a"))
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert {name.rpartition(".")[2] for name in config["target_modules"]} == {
        f"{each}_proj" for each in "qkvo"
    }
    assert "model.layers.1.mlp.experts.gate_up_proj" in config["target_parameters"]


def test_adapters_of_other_experts_are_refused(tmp_path):
    model = FAMILIES["mixtral"]
    decoder = adapted(model, DOWN_ALONE, torch.float32)
    write_adapters(tmp_path / "a", model, decoder.state_dict(), DOWN_ALONE, None, torch.float32)
    with pytest.raises(InputError, match=r"experts\.base_layer\.lora_A\.weight is missing"):
        check_adapters(model, DOWN_ALONE.replace(targets=("experts.*",)), str(tmp_path / "a"))
    fewer = model.replace(experts=model.experts.replace(num_experts=4))
    with pytest.raises(InputError, match=r"experts\.lora_A\.weight"):
        check_adapters(fewer, DOWN_ALONE, str(tmp_path / "a"))


# --- Jobs


@pytest.mark.parametrize(
    ("num_ranks", "settings", "words"),
    [
        (1, ["finetune.decomposed=true"], "finetune.decomposed = true is not there for the routed"),
        (1, ["finetune.dropout=0.1"], "finetune.dropout = 0.1 is not there for the routed"),
        (1, ["finetune.base=nf4"], 'finetune.base = "nf4" is not there for the routed'),
        (
            4,
            ["finetune.rank=3", "layout.fsdp=4", "layout.ep=2", "layout.micro_batch=6"],
            "finetune.rank = 3 of adapters of experts can't be sharded over the 2 ranks",
        ),
    ],
)
def test_what_experts_cannot_have_is_refused(num_ranks, settings, words):
    job = job_of(num_ranks, (*SETTINGS["adapters of experts"], *settings, "train.weights=base"))
    with pytest.raises(InputError, match=words):
        check_finetune(job.model, job)


def test_a_token_computes_the_adapters_of_its_experts_alone():
    job = job_of(1, (*SETTINGS["adapters of experts"], "finetune.targets=['experts.*']"))
    decoder = Decoder(job.model)
    adapt(decoder, job.finetune)
    whole = job.model.train_flops_per_token(job.train.seq_len)
    added = train_flops_per_token(job.model, job, decoder) - whole + 2 * job.model.num_matmul_params
    # Three layers with two experts of eight a token: rank 4, hidden 32, width 16.
    assert added == 6 * 3 * 2 * 4 * ((32 + 32) + (16 + 32))
