"""Weights on disk: names, refusals and complete-or-absent directories; one process, no network.

That transformers open what is written here is tests/models/test_families.py.
"""

import json
import os
import stat
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.config.errors import InputError
from paceline.config.layers import Experts
from paceline.config.model import Model
from paceline.models import weights
from paceline.models.decoder import Decoder
from paceline.models.names import sources
from paceline.models.weights import (
    load_weights,
    read_decoder,
    read_model,
    write_weights,
)

MODEL = Model(vocab_size=20, hidden_size=16, ffn_size=24, num_layers=2, num_heads=2, max_seq_len=16)
EXPERTS = MODEL.replace(experts=Experts(num_experts=4, experts_per_token=2, ffn_size=12))
SHARD_BYTES = 4_000


def built(model=MODEL, seed=0):
    decoder = Decoder(model)
    decoder.init_weights(torch.Generator().manual_seed(seed))
    return decoder


def written(directory, model=MODEL, **options):
    decoder = built(model)
    write_weights(directory, model, decoder.state_dict(), **options)
    return decoder


def their_names(model):
    return list(sources(model, {n: tuple(t.shape) for n, t in Decoder(model).state_dict().items()}))


def edit_tensors(path, edit):
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def edit_json(path, edit):
    contents = json.loads(path.read_text())
    edit(contents)
    path.write_text(json.dumps(contents))


def sentence(call, *args, **options):
    with pytest.raises(InputError) as caught:
        call(*args, **options)
    return str(caught.value)


def test_names():
    model = MODEL.replace(num_layers=1, qkv_bias=True, qk_norm=True)
    assert their_names(model) == [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        *(
            f"model.layers.0.self_attn.{projection}_proj.{part}"
            for projection in "qkv"
            for part in ("weight", "bias")
        ),
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]


@pytest.mark.parametrize("max_shard_bytes", [10**9, SHARD_BYTES, 1])
def test_what_is_written_is_read_again(max_shard_bytes, tmp_path):
    decoder = written(tmp_path / "a", max_shard_bytes=max_shard_bytes)
    assert read_model(tmp_path / "a") == MODEL
    again = read_decoder(tmp_path / "a")
    for name, parameter in decoder.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)
    assert torch.equal(again.rope_cos, decoder.rope_cos)


def test_shards_stay_below_the_limit_and_the_index_is_exact(tmp_path):
    decoder = written(tmp_path / "a", max_shard_bytes=SHARD_BYTES)
    index = json.loads((tmp_path / "a" / weights.INDEX).read_text())
    shards = sorted((tmp_path / "a").glob("*.safetensors"))
    stored = {name: path.name for path in shards for name in load_file(path)}
    assert stored == index["weight_map"]
    sizes = [sum(t.nbytes for t in load_file(path).values()) for path in shards]
    assert sum(sizes) == index["metadata"]["total_size"] == 4 * MODEL.num_params
    assert max(sizes) <= SHARD_BYTES
    assert len(stored) == len(list(decoder.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_are_filled_before_another_is_begun(dtype, tmp_path):
    written(tmp_path / "a", max_shard_bytes=SHARD_BYTES, dtype=dtype)
    shards = [load_file(path) for path in sorted((tmp_path / "a").glob("*.safetensors"))]
    order = their_names(MODEL)
    for shard, following in pairwise(shards):
        first = min(following, key=order.index)
        assert sum(t.nbytes for t in shard.values()) + following[first].nbytes > SHARD_BYTES


def test_files_can_be_read_by_whom_the_umask_allows(tmp_path):
    before = os.umask(0o022)
    try:
        written(tmp_path / "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o755


def test_a_tied_head_is_neither_written_nor_required(tmp_path):
    tied = MODEL.replace(tie_embeddings=True)
    decoder = written(tmp_path / "a", tied)
    tensors = load_file(tmp_path / "a" / weights.SINGLE)
    assert "lm_head.weight" not in tensors
    tokens = torch.arange(16)[None]
    assert torch.equal(read_decoder(tmp_path / "a")(tokens), decoder(tokens))


def test_a_stored_copy_of_a_tied_head_must_be_the_same(tmp_path):
    written(tmp_path / "a", MODEL.replace(tie_embeddings=True))
    file = tmp_path / "a" / weights.SINGLE
    copy = load_file(file)["model.embed_tokens.weight"].clone()
    edit_tensors(file, lambda tensors: tensors.update({"lm_head.weight": copy}))
    read_decoder(tmp_path / "a")
    edit_tensors(file, lambda tensors: tensors["lm_head.weight"].add_(1))
    assert "lm_head.weight differs from model.embed_tokens" in sentence(
        read_decoder, tmp_path / "a"
    )


def test_the_rotary_table_of_llama_2_files_is_passed_over(tmp_path):
    written(tmp_path / "a")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit_tensors(tmp_path / "a" / weights.SINGLE, lambda tensors: tensors.update(extra))
    read_decoder(tmp_path / "a")


WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("max_shard_bytes", [10**9, SHARD_BYTES])
@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda tensors: tensors.pop(WEIGHT), f"The tensor {WEIGHT} is missing"),
        (
            lambda tensors: tensors.update({WEIGHT: torch.ones(24, 17)}),
            f"The tensor {WEIGHT} in .* has shape \\(24, 17\\), .* requires \\(24, 16\\)",
        ),
    ],
)
def test_wrong_tensors_are_named_and_nothing_is_loaded(edit, expected, max_shard_bytes, tmp_path):
    written(tmp_path / "a", max_shard_bytes=max_shard_bytes)
    for path in (tmp_path / "a").glob("*.safetensors"):
        if WEIGHT in load_file(path):
            edit_tensors(path, edit)
    decoder = built(seed=1)
    with pytest.raises(InputError, match=expected):
        load_weights(decoder, tmp_path / "a")
    assert all(map(torch.equal, decoder.parameters(), built(seed=1).parameters()))


def test_an_unexpected_tensor_is_named(tmp_path):
    written(tmp_path / "a")
    extra = {"model.layers.2.mlp.up_proj.weight": torch.ones(24, 16)}
    edit_tensors(tmp_path / "a" / weights.SINGLE, lambda tensors: tensors.update(extra))
    assert "layers.2.mlp.up_proj.weight in" in sentence(read_decoder, tmp_path / "a")


def test_damaged_directories_are_refused(tmp_path):
    directory = tmp_path / "a"
    assert "config.json does not exist" in sentence(read_decoder, directory)
    written(directory, max_shard_bytes=SHARD_BYTES)
    shard = next(iter(sorted(directory.glob("*.safetensors"))))
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    assert "can't be read as safetensors" in sentence(read_decoder, directory)
    shard.unlink()
    assert f"'{shard.name}', which is not a file beside it" in sentence(read_decoder, directory)
    (directory / weights.INDEX).write_text("{}")
    assert "has no weight_map" in sentence(read_decoder, directory)
    (directory / "config.json").write_text("{")
    assert "is not valid JSON" in sentence(read_decoder, directory)
    (directory / "config.json").write_text("[]")
    assert "which must be an object" in sentence(read_decoder, directory)


def test_an_index_cannot_reach_outside_its_directory(tmp_path):
    written(tmp_path / "a", max_shard_bytes=SHARD_BYTES)
    shard = next((tmp_path / "a").glob("*.safetensors"))
    shard.rename(tmp_path / "outside.safetensors")
    index = tmp_path / "a" / weights.INDEX
    index.write_text(index.read_text().replace(shard.name, "../outside.safetensors"))
    assert "'../outside.safetensors', which is not a file" in sentence(read_decoder, tmp_path / "a")


def test_pickles_are_refused_and_never_opened(tmp_path):
    written(tmp_path / "a")
    (tmp_path / "a" / weights.SINGLE).rename(tmp_path / "a" / "pytorch_model.bin")
    assert "pickled weights (pytorch_model.bin)" in sentence(read_decoder, tmp_path / "a")
    (tmp_path / "a" / "pytorch_model.bin").unlink()
    assert "holds neither model.safetensors nor" in sentence(read_decoder, tmp_path / "a")


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def fails_on_the_second(tensors, path, metadata):
        if "00002" in path.name:
            raise KeyboardInterrupt
        save_file(tensors, path, metadata)

    monkeypatch.setattr(weights, "save_file", fails_on_the_second)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "a", max_shard_bytes=SHARD_BYTES)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_files_is_not_overwritten(tmp_path):
    (tmp_path / "empty").mkdir()
    written(tmp_path / "empty")
    assert "exists already" in sentence(written, tmp_path / "empty")
    (tmp_path / "file").touch()
    assert "exists already" in sentence(written, tmp_path / "file")


def test_what_cannot_be_written_is_refused(tmp_path):
    state = built().state_dict()
    short = {name: tensor for name, tensor in state.items() if name != "norm.weight"}
    assert "norm.weight is missing in the given state" in sentence(
        write_weights, tmp_path / "a", MODEL, short
    )
    assert "can't be written as torch.int8" in sentence(
        write_weights, tmp_path / "a", MODEL, state, dtype=torch.int8
    )
    assert "no family" in sentence(
        written, tmp_path / "a", MODEL.replace(qkv_bias=True, qk_norm=True)
    )
    assert list(tmp_path.iterdir()) == []


def test_moved_experts_are_written_in_their_order(tmp_path):
    decoder = built(EXPERTS)
    slots = torch.tensor([2, 0, 3, 1])
    for block in decoder.blocks:
        block.ffn.slot_of_expert.copy_(slots)
        for stack in block.ffn.experts.parameters():
            stack.data[slots] = stack.data.clone()
    write_weights(tmp_path / "a", EXPERTS, decoder.state_dict())
    read = read_decoder(tmp_path / "a")
    for name, parameter in built(EXPERTS).named_parameters():
        assert torch.equal(read.state_dict()[name], parameter), name


def test_only_the_experts_of_this_rank_are_read(rank_1_of_2, tmp_path, monkeypatch):
    written(tmp_path / "a", EXPERTS)
    decoder, read = Decoder(EXPERTS), []
    experts = decoder.blocks[0].ffn.experts
    spread = distribute_tensor(experts.up_proj, rank_1_of_2, [Shard(0)], src_data_rank=None)
    experts.up_proj = torch.nn.Parameter(spread)
    monkeypatch.setattr(
        weights, "assign_row", lambda tensor, place, _: read.append((tensor, place))
    )
    load_weights(decoder, tmp_path / "a")
    assert [place for tensor, place in read if tensor is experts.up_proj] == [0, 1]
    assert [place for tensor, place in read if tensor is experts.gate_proj] == [0, 1, 2, 3]


def test_the_bias_of_experts_is_written_in_fp32(tmp_path):
    shape = EXPERTS.experts.replace(scores="sigmoid", choice_bias=True, shared_ffn_size=12)
    latent = {"kv_rank": 8, "nope_dim": 4, "rope_dim": 4, "v_dim": 4}
    raw = {**MODEL.model_dump(exclude={"head_dim", "num_kv_heads"}), "latent": latent}
    decoder = built(Model.parse({**raw, "experts": shape}))
    decoder.blocks[0].ffn.choice_bias.fill_(0.123456)
    write_weights(tmp_path / "a", decoder.model, decoder.state_dict(), dtype=torch.bfloat16)
    read = read_decoder(tmp_path / "a", dtype=torch.bfloat16)
    assert torch.equal(read.blocks[0].ffn.choice_bias, decoder.blocks[0].ffn.choice_bias)
    assert read.blocks[0].ffn.router.weight.dtype == torch.bfloat16


@pytest.fixture
def rank_1_of_2():
    """One process that believes to be rank 1 of 2; its collectives do nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("model", [MODEL, EXPERTS], ids=["dense", "experts"])
def test_a_sharded_network_loads_its_share(model, rank_1_of_2, tmp_path):
    whole = dict(written(tmp_path / "a", model, max_shard_bytes=SHARD_BYTES).named_parameters())
    with torch.device("meta"):
        decoder = Decoder(model)
    fully_shard(decoder, mesh=rank_1_of_2)
    decoder.to_empty(device="cpu")
    load_weights(decoder, tmp_path / "a")
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter.to_local(), whole[name].chunk(2)[1]), name
