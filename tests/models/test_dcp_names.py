"""Others' names and forms in DCP: to the bit there and back, and as they document them.

recorded/megatron_core is what Megatron-Core 0.16.1 itself wrote (dist_checkpointing.save of a
GPTModel, local spec, one process): two layers of width 8, four heads in two groups, 6 wide
feed-forward, a vocabulary of 12. Parameter k of the model, by name, holds 1000 k + 0, 1, 2, ...
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import cli
from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.config.model import Model
from paceline.models.dcp import DcpFolder, check_dcp, load_dcp
from paceline.models.dcp_names import _TITAN_OLD, _titan_name, halves, neighbours, state_as
from paceline.models.decoder import Decoder
from paceline.observe.run import Run
from paceline.train.command import train_job
from paceline.train.export import export_as
from paceline.train.export import load as load_run
from tests.models.test_dcp import SHAPES, decoder, same, write
from tests.small_job import work_in, write_small_job

RECORDED = Path(__file__).parent / "recorded" / "megatron_core"
KINDS = {
    "plain": {},
    "one key a head": {"num_kv_heads": 4},
    "one key": {"num_kv_heads": 1},
    "biases": {"qkv_bias": True},
    "norms": {"qk_norm": True},
    "tied": {"tie_embeddings": True},
}
LAYERS = 2
MEGATRON = {
    "embedding.word_embeddings.weight": (31, 16),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (LAYERS, 16),
    "decoder.layers.self_attention.linear_qkv.weight": (LAYERS, (4 + 2 * 2) * 4, 16),
    "decoder.layers.self_attention.linear_proj.weight": (LAYERS, 16, 16),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (LAYERS, 16),
    "decoder.layers.mlp.linear_fc1.weight": (LAYERS, 2 * 24, 16),
    "decoder.layers.mlp.linear_fc2.weight": (LAYERS, 16, 24),
    "decoder.final_layernorm.weight": (16,),
    "output_layer.weight": (31, 16),
}
TITAN_BLOCK = {
    "attention.qkv_linear.wq.weight": (16, 16),
    "attention.qkv_linear.wk.weight": (8, 16),
    "attention.qkv_linear.wv.weight": (8, 16),
    "attention.wo.weight": (16, 16),
    "feed_forward.w1.weight": (24, 16),
    "feed_forward.w2.weight": (16, 24),
    "feed_forward.w3.weight": (24, 16),
    "attention_norm.weight": (16,),
    "ffn_norm.weight": (16,),
}
TITAN = {
    "tok_embeddings.weight": (31, 16),
    "norm.weight": (16,),
    "lm_head.weight": (31, 16),
    **{f"layers.{at}.{name}": size for at in range(LAYERS) for name, size in TITAN_BLOCK.items()},
}


def state_of(form: Any, network: Decoder) -> dict[str, torch.Tensor]:
    return state_as(form, network.model, network.state_dict())


@pytest.mark.parametrize(("form", "names"), [("megatron", MEGATRON), ("torchtitan", TITAN)])
def test_names_and_shapes_are_those_that_are_documented(form, names):
    assert {name: tuple(each.shape) for name, each in state_of(form, decoder()).items()} == names


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        *(("megatron", kind) for kind in KINDS),
        *(("torchtitan", kind) for kind in ("plain", "one key a head", "one key", "tied")),
    ],
)
def test_what_is_written_is_read_to_the_bit(form, kind, tmp_path):
    network = decoder(**KINDS[kind])
    folder = write(tmp_path / "dcp", state_of(form, network))
    check_dcp(network.model, folder)
    loaded = decoder(seed=1, **KINDS[kind])
    assert not same(loaded, network)
    load_dcp(loaded, folder)
    assert same(loaded, network)


def test_names_of_torchtitan_before_0_3_are_read(tmp_path):
    """Its rotary positions turn neighbours, ours the two halves of a head."""
    network = decoder()
    theirs = {}
    for name, tensor in network.state_dict().items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        sorted_as_theirs = neighbours(tensor, heads) if heads else tensor
        theirs[_titan_name(name, _TITAN_OLD)] = sorted_as_theirs
    assert {"layers.1.attention.wq.weight", "output.weight"} <= theirs.keys()
    loaded = decoder(seed=1)
    load_dcp(loaded, write(tmp_path / "dcp", theirs))
    assert same(loaded, network)


def test_neighbours_and_halves_are_each_others_way_back():
    rows = torch.arange(48.0).reshape(16, 3)
    assert torch.equal(halves(neighbours(rows, 2), 2), rows)
    # Heads of 4 rows: 0 1 2 3 in two halves turn as (0 2) and (1 3).
    assert neighbours(torch.arange(8.0)[:, None], 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_what_megatron_core_wrote_is_read():
    small = {"vocab_size": 11, "hidden_size": 8, "ffn_size": 6, "max_seq_len": 8}
    model = Model.parse({**SHAPES, **small})
    network = Decoder(model)
    network.init_weights(torch.Generator().manual_seed(0))
    load_dcp(network, RECORDED)
    state = network.state_dict()

    def rows(parameter: int, begin: int, end: int, width: int = 8) -> torch.Tensor:
        whole = 1000.0 * parameter + torch.arange(end * width)
        return whole.reshape(end, width)[begin:]

    # A vocabulary of 12 is made divisible of 11: its last row is nobody's.
    assert torch.equal(state["embed.weight"], rows(13, 0, 11))
    assert torch.equal(state["head.weight"], rows(14, 0, 11))
    assert torch.equal(state["norm.weight"], torch.arange(8.0))
    for layer, first in enumerate((1, 7)):
        block = f"blocks.{layer}."
        # Heads of two rows: two of queries, one of the key, one of the value; twice.
        fused = rows(first + 5, 0, 16)
        query = torch.cat([fused[0:4], fused[8:12]])
        assert torch.equal(state[f"{block}attention.q_proj.weight"], query)
        key = torch.cat([fused[4:6], fused[12:14]])
        assert torch.equal(state[f"{block}attention.k_proj.weight"], key)
        value = torch.cat([fused[6:8], fused[14:16]])
        assert torch.equal(state[f"{block}attention.v_proj.weight"], value)
        assert torch.equal(state[f"{block}attention.o_proj.weight"], rows(first + 4, 0, 8))
        assert torch.equal(state[f"{block}ffn.gate_proj.weight"], rows(first + 1, 0, 6))
        assert torch.equal(state[f"{block}ffn.up_proj.weight"], rows(first + 1, 6, 12))
        assert torch.equal(state[f"{block}ffn.down_proj.weight"], rows(first + 2, 0, 8, 6))
        assert torch.equal(state[f"{block}attention_norm.weight"], rows(first, 0, 1)[0])
        assert torch.equal(state[f"{block}ffn_norm.weight"], rows(first + 3, 0, 1)[0])


def test_what_is_written_has_the_shapes_and_objects_that_megatron_core_writes(
    tmp_path, monkeypatch
):
    work_in(tmp_path, monkeypatch)
    run, job = small_run(tmp_path)
    assert export_as("megatron", run, Path("megatron")) == 4
    theirs, ours = DcpFolder(RECORDED), DcpFolder(Path("megatron"))
    assert theirs.shapes.keys() == ours.shapes.keys()
    raw = Path("megatron/.metadata").read_bytes()
    for layer in range(job.model.num_layers):
        for what in ("self_attention.linear_qkv", "mlp.linear_fc2"):
            name = f"decoder.layers.{what}._extra_state/shard_{layer}_{job.model.num_layers}"
            assert name.encode() in raw
    told = json.loads(Path("megatron/metadata.json").read_text())
    assert told["sharded_backend"] == "torch_dist"
    assert torch.load("megatron/common.pt", weights_only=True) == {}


def small_run(folder: Path) -> tuple[Run, Any]:
    run = Run(folder / "runs" / "small")
    train_job(read_job(write_small_job(folder)), run, fresh=False)
    return run, run.job()


@pytest.mark.parametrize("form", ["torchtitan", "megatron"])
def test_a_run_is_exported_and_read_back_to_the_bit(form, tmp_path, monkeypatch, capsys):
    work_in(tmp_path, monkeypatch)
    run, job = small_run(tmp_path)
    expected, loaded = Decoder(job.model), Decoder(job.model)
    load_run(run, expected)
    monkeypatch.setattr("sys.argv", ["paceline", "export", "runs/small", form, "--format", form])
    cli.main()
    assert capsys.readouterr().out.endswith(f"{form}: the weights after step 4\n")
    load_dcp(loaded, form)
    assert same(loaded, expected)
    half = tmp_path / "half"
    export_as(form, run, half, "bf16")
    load_dcp(loaded, half)
    for name, tensor in expected.state_dict().items():
        rounded = tensor.to(torch.bfloat16).float() if tensor.is_floating_point() else tensor
        assert torch.equal(loaded.state_dict()[name], rounded)


@pytest.mark.parametrize(
    ("form", "changes", "what"),
    [
        ("megatron", {"gated": False}, "a feed-forward without a gate"),
        ("torchtitan", {"qkv_bias": True}, "biases of queries"),
        ("torchtitan", {"qk_norm": True}, "norms of queries"),
    ],
)
def test_a_network_without_names_is_refused(form, changes, what, tmp_path):
    model = Model.parse({**SHAPES, **changes})
    with pytest.raises(InputError, match=what):
        state_as(form, model, Decoder(model).state_dict())
    folder = write(tmp_path / "dcp", state_of(form, decoder()))
    with pytest.raises(InputError, match=what):
        check_dcp(model, folder)


def test_other_shapes_and_names_are_refused(tmp_path):
    network = decoder()
    state = state_of("megatron", network)
    folder = write(tmp_path / "dcp", state)
    with pytest.raises(InputError, match=r"linear_fc[12]\.weight"):
        check_dcp(Model.parse({**SHAPES, "ffn_size": 32}), folder)
    with pytest.raises(InputError, match=r"word_embeddings\.weight"):
        check_dcp(Model.parse({**SHAPES, "vocab_size": 40}), folder)
    with pytest.raises(InputError, match="layers"):
        check_dcp(Model.parse({**SHAPES, "num_layers": 3}), folder)
    del state["decoder.layers.mlp.linear_fc2.weight"]
    with pytest.raises(InputError, match=r"linear_fc2\.weight"):
        check_dcp(network.model, write(tmp_path / "less", state))
    with pytest.raises(InputError, match="torchtitan's or Megatron's names"):
        check_dcp(network.model, write(tmp_path / "none", {"w": torch.ones(2)}))
