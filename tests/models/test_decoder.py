"""The decoder on its own: pure functions, then one process, then two pretended ranks.

That it computes what the published families compute is tests/models/test_families.py.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from paceline.config.errors import InputError
from paceline.config.layers import Experts, LatentAttention
from paceline.config.model import Model
from paceline.kernels.loss import cross_entropy
from paceline.models.attention import PLAIN, Sdpa
from paceline.models.decoder import Decoder, document_starts
from paceline.models.feedforward import FeedForward
from paceline.models.rope import rope_frequencies

MODEL = Model(
    vocab_size=50,
    hidden_size=32,
    ffn_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=32,
)
UNGATED = {"gated": False, "activation": "gelu_tanh"}
VARIANTS = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "sliding": {"sliding_window": 5, "full_layers": [1]},
    "bias": {"qkv_bias": True},
    "qk_norm": {"qk_norm": True, "head_dim": 10},
    "gpt2": {"norm": "layer", "positions": "learned", "bias": True, **UNGATED},
    "neox": {"norm": "layer", "residual": "parallel", "rotary_share": 0.25, "bias": True},
    "phi": {
        "norm": "layer",
        "residual": "parallel_shared",
        "rotary_share": 0.5,
        "bias": True,
        "head_bias": True,
        **UNGATED,
    },
    "gated gelu": {"activation": "gelu_tanh", "bias": True, "residual": "parallel"},
    "gemma3": {
        "norm": "rms_plus_one",
        "post_norms": True,
        "qk_norm": True,
        "sliding_window": 5,
        "full_layers": [1],
        "window_rope_theta": 50.0,
        "score_width": 12,
        "scale_embeddings": True,
        "activation": "gelu_tanh",
        "tie_embeddings": True,
    },
    "gemma2": {
        "norm": "rms_plus_one",
        "post_norms": True,
        "sliding_window": 5,
        "full_layers": [1],
        "score_cap": 0.5,
        "logit_cap": 0.5,
        "activation": "gelu_tanh",
    },
    "gpt_oss": {
        "sinks": True,
        "bias": True,
        "sliding_window": 5,
        "full_layers": [1],
        "experts": Experts(
            num_experts=8, experts_per_token=2, ffn_size=12, bias=True, gate_limit=0.1
        ),
    },
    "bert, causal": {
        "norm": "layer",
        "positions": "learned",
        "bias": True,
        "residual": "post_norm",
        "embedding_norm": True,
        "token_types": 2,
        "head_layer": True,
        "head_bias": True,
        "tie_embeddings": True,
        **UNGATED,
    },
    "partial, qk_norm": {"qk_norm": True, "rotary_share": 0.5},
    "experts": {
        "experts": Experts(
            num_experts=8,
            experts_per_token=2,
            ffn_size=12,
            shared_ffn_size=20,
            shared_gate=True,
            dense_layers=(1,),
        )
    },
    "latent": {
        "num_kv_heads": 4,
        "head_dim": 14,
        "latent": LatentAttention(q_rank=12, kv_rank=10, nope_dim=8, rope_dim=6, v_dim=4),
        "experts": Experts(
            num_experts=8,
            experts_per_token=3,
            ffn_size=12,
            scores="sigmoid",
            num_groups=4,
            groups_per_token=2,
            choice_bias=True,
        ),
    },
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def built(model=MODEL, seed=0, **options):
    decoder = Decoder(model, **options)
    decoder.init_weights(seeded(seed))
    return decoder


def tokens_of(model=MODEL, batch=2, seq=17, seed=1):
    return torch.randint(0, model.vocab_size, (batch, seq), generator=seeded(seed))


def test_document_starts():
    ids = torch.tensor([[7, 7, 2, 2, 2, 7], [0, 1, 1, 3, 4, 4]])
    assert document_starts(ids).tolist() == [[0, 0, 2, 2, 2, 5], [0, 1, 1, 3, 4, 4]]


def test_mask_holds_exactly_the_visible_pairs():
    starts = document_starts(torch.tensor([[0, 0, 0, 0, 1, 1]]))
    mask = Sdpa().mask(6, 3, starts, torch.device("cpu"))
    for query in range(6):
        for key in range(6):
            same = (query < 4) == (key < 4)
            assert mask[0, 0, query, key] == (same and key <= query and query - key < 3)


def test_plain_causal_attention_needs_no_mask():
    """Whatever sees all earlier tokens takes the fast path, also a window as long as the text."""
    for window in (None, 6, 7):
        assert Sdpa().mask(6, window, None, torch.device("cpu")) is None
    assert Sdpa().mask(6, 5, None, torch.device("cpu")) is not None


def test_linear_scaling_is_slower_rotation():
    scaled = MODEL.replace(rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert torch.equal(rope_frequencies(scaled), rope_frequencies(MODEL) / 4)


def test_cross_entropy_is_a_mean_in_fp32_and_skips_minus_100():
    logits = torch.randn(2, 3, 50, generator=seeded()).bfloat16()
    targets = tokens_of(seq=3)
    by_hand = -logits.float().log_softmax(-1).gather(-1, targets[..., None])
    assert cross_entropy(logits, targets).dtype == torch.float32
    torch.testing.assert_close(cross_entropy(logits, targets), by_hand.mean())
    targets[0, 1] = -100
    by_hand[0, 1] = 0
    torch.testing.assert_close(cross_entropy(logits, targets), by_hand.sum() / 5)
    assert cross_entropy(logits.double(), targets).dtype == torch.float64


@pytest.mark.parametrize("name", VARIANTS)
def test_num_params_is_that_of_the_module(name):
    model = MODEL.replace(**VARIANTS[name])
    with torch.device("meta"):
        decoder = Decoder(model)
    assert sum(p.numel() for p in decoder.parameters()) == model.num_params
    for layer, block in enumerate(decoder.blocks):
        assert sum(p.numel() for p in block.parameters()) == model.num_block_params(layer)
    looked_up = [m.weight for m in decoder.modules() if isinstance(m, nn.Embedding)]
    matrices = [
        p
        for name, p in decoder.named_parameters()
        if p.ndim > 1 and not name.endswith("bias") and all(p is not e for e in looked_up)
    ]
    # A token meets some of the experts, whose matrices are stacked.
    share = model.experts.experts_per_token / model.experts.num_experts if model.experts else 1
    met = sum(p.numel() * (share if p.ndim == 3 else 1) for p in matrices)
    tied = model.num_embedding_params if model.tie_embeddings else 0
    assert met + tied == model.num_matmul_params


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_are_those_that_torch_counts(name):
    """The counter multiplies out the full square: causal=False, windows as the full sequence.

    It doesn't know the fused kernel of the CPU, so attention runs as plain matrix products, nor the
    grouped ones of experts, which fp64 does without.
    """
    no_windows = {"sliding_window": None, "full_layers": [], "window_rope_theta": None}
    model = MODEL.replace(**{**VARIANTS[name], **no_windows})

    class Unpadded(Sdpa):
        def __call__(self, q, k, v, mask, scores=PLAIN):
            if scores.cap is not None:
                return super().__call__(q, k, v, mask, scores)
            return self._attend(q, k, v, mask, q.shape[-1] ** -0.5)

    decoder, tokens = built(model, attend=Unpadded()).double(), tokens_of()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        logits = decoder(tokens)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
        cross_entropy(logits, tokens).backward()
    expected = model.forward_flops_per_token(17, causal=False) * tokens.numel()
    assert forward.get_total_flops() == expected
    total = forward.get_total_flops() + backward.get_total_flops()
    assert total == model.train_flops_per_token(17, causal=False) * tokens.numel()


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_documents_equal_the_documents_alone(name):
    decoder = built(MODEL.replace(**VARIANTS[name])).double()
    tokens = tokens_of(batch=2, seq=20)
    # The number 3 returns: a document is a run, so these are four documents.
    ids = torch.tensor([[3] * 6 + [1] * 7 + [3] * 7, [3] * 20])
    packed = decoder(tokens, ids)
    parts = [(0, 0, 6), (0, 6, 13), (0, 13, 20), (1, 0, 20)]
    for row, start, end in parts:
        alone = decoder(tokens[row : row + 1, start:end])
        torch.testing.assert_close(packed[row, start:end], alone[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_no_token_sees_the_future(name):
    decoder, tokens = built(MODEL.replace(**VARIANTS[name])).double(), tokens_of()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % MODEL.vocab_size
    before, after = decoder(tokens), decoder(changed)
    # The changed token may go to another expert. Group sizes then differ, and some CPUs round a
    # row of a product by the number of rows: equal to the last digits of fp64, not to the bit.
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, 9], after[:, 9])


@pytest.mark.parametrize("name", ["plain", "experts"])
def test_a_step_is_the_same_to_the_bit_twice(name):
    gradients = []
    for _ in range(2):
        decoder, tokens = built(MODEL.replace(**VARIANTS[name])), tokens_of(batch=4, seq=32)
        cross_entropy(decoder(tokens), tokens).backward()
        gradients.append([p.grad for p in decoder.parameters()])
    assert all(map(torch.equal, *gradients))


def test_init_follows_its_seed_and_its_scales():
    first, second, other = built(seed=3), built(seed=3), built(seed=4)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first.embed.weight, other.embed.weight)
    assert not torch.equal(first.blocks[0].ffn.up_proj.weight, first.blocks[1].ffn.up_proj.weight)
    wide = built(MODEL.replace(hidden_size=256, ffn_size=256, qkv_bias=True, init_std=0.1))
    block = wide.blocks[0]
    assert block.ffn.up_proj.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert block.ffn.down_proj.weight.std().item() == pytest.approx(0.1 / 6**0.5, rel=0.05)
    assert block.attention.o_proj.weight.std().item() == pytest.approx(0.1 / 6**0.5, rel=0.05)
    assert block.attention.q_proj.bias.eq(0).all()
    assert block.ffn_norm.weight.eq(1).all()


def test_init_of_a_block_does_not_depend_on_the_others():
    """A pipeline stage that holds the first block only starts with the same weights."""
    stage = Decoder(MODEL)
    stage.blocks = stage.blocks[:1]
    stage.init_weights(seeded())
    alone, among_others = stage.blocks[0].parameters(), built().blocks[0].parameters()
    assert all(map(torch.equal, alone, among_others))


def test_init_of_experts():
    experts = VARIANTS["experts"]["experts"].replace(ffn_size=200, choice_bias=True)
    block = built(MODEL.replace(hidden_size=160, init_std=0.1, experts=experts)).blocks[0].ffn
    stacks = block.experts
    assert stacks.up_proj.std().item() == pytest.approx(0.1, rel=0.02)
    assert stacks.down_proj.std().item() == pytest.approx(0.1 / 6**0.5, rel=0.02)
    assert block.router.weight.std().item() == pytest.approx(0.1, rel=0.1)
    assert not torch.equal(stacks.up_proj[0], stacks.up_proj[1])
    assert block.slot_of_expert.tolist() == list(range(8))
    assert not block.choice_bias.any()


@pytest.mark.parametrize("name", ["plain", "tied", "experts", "latent"])
def test_meta_build_gives_the_same_network(name):
    model = MODEL.replace(**VARIANTS[name])
    with torch.device("meta"):
        decoder = Decoder(model)
    decoder.to_empty(device="cpu")
    for buffer in decoder.buffers():
        buffer.fill_(torch.nan if buffer.is_floating_point() else -1)
    decoder.init_weights(seeded())
    assert torch.equal(decoder(tokens_of()), built(model)(tokens_of()))


@pytest.fixture
def rank_1_of_2():
    """One process that believes to be rank 1 of 2; its collectives do nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["plain", "experts"])
def test_init_of_a_sharded_network_is_the_share_of_the_whole(name, rank_1_of_2):
    model = MODEL.replace(**VARIANTS[name])
    with torch.device("meta"):
        decoder = Decoder(model)
    for block in decoder.blocks:
        fully_shard(block, mesh=rank_1_of_2)
    fully_shard(decoder, mesh=rank_1_of_2)
    decoder.to_empty(device="cpu")
    decoder.init_weights(seeded())
    whole = dict(built(model).named_parameters())
    for name, parameter in decoder.named_parameters():
        share = torch.tensor_split(whole[name], 2)[1] if len(whole[name]) > 1 else whole[name][1:]
        assert torch.equal(parameter.to_local(), share), name


def test_init_of_experts_split_along_any_dimension(rank_1_of_2):
    """Expert parallel with tensor parallel: whole experts and parts of them."""
    model = MODEL.replace(**VARIANTS["experts"])
    decoder, whole = Decoder(model), built(model).blocks[0].ffn.experts
    experts = decoder.blocks[0].ffn.experts
    for name, dim in {"gate_proj": 0, "up_proj": 1, "down_proj": 2}.items():
        spread = distribute_tensor(
            getattr(experts, name), rank_1_of_2, [Shard(dim)], src_data_rank=None
        )
        setattr(experts, name, nn.Parameter(spread))
    decoder.init_weights(seeded())
    for name, dim in {"gate_proj": 0, "up_proj": 1, "down_proj": 2}.items():
        share = getattr(whole, name).chunk(2, dim)[1]
        assert torch.equal(getattr(experts, name).to_local(), share), name


@pytest.mark.parametrize("name", ["plain", "experts", "latent"])
def test_blocks_can_be_recomputed(name):
    plain, recomputed = (built(MODEL.replace(**VARIANTS[name])) for _ in range(2))
    for block in recomputed.blocks:
        forward = block.forward
        block.forward = lambda *args, f=forward: checkpoint(f, *args, use_reentrant=False)
    tokens = tokens_of()
    ids = (torch.arange(17) // 6).expand(2, -1)
    for decoder in (plain, recomputed):
        cross_entropy(decoder(tokens, ids), tokens).backward()
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_bf16_activations_with_fp32_rotary_tables():
    """Mixed precision converts the parameters only; the rotation must not change the dtype."""
    decoder, tokens = built(), tokens_of()
    expected = decoder(tokens)
    for parameter in decoder.parameters():
        parameter.data = parameter.data.bfloat16()
    logits = decoder(tokens)
    assert (logits.dtype, decoder.rope_cos.dtype) == (torch.bfloat16, torch.float32)
    assert (logits.float() - expected).norm() < 0.02 * expected.norm()


def test_the_attention_core_can_be_replaced():
    """Also the contract a core relies on: one mask per distinct window, kv heads not expanded."""

    class Recording(Sdpa):
        def __init__(self):
            self.windows, self.shapes = [], set()

        def mask(self, seq_len, window, documents, device):
            self.windows.append(window)
            return super().mask(seq_len, window, documents, device)

        def __call__(self, q, k, v, mask):
            self.shapes.add((*q.shape, *k.shape))
            return super().__call__(q, k, v, mask)

    core = Recording()
    model = MODEL.replace(sliding_window=5, full_layers=[1])
    decoder = built(model, attend=core)
    assert torch.equal(decoder(tokens_of()), built(model)(tokens_of()))
    assert sorted(core.windows, key=str) == [5, None]
    assert core.shapes == {(2, 4, 17, 8, 2, 2, 17, 8)}


def test_a_stage_has_the_layers_of_the_whole_network():
    """Which blocks have experts goes by their number in the network, not in the stage."""
    model = MODEL.replace(**VARIANTS["experts"])
    whole, first, last = built(model), built(model), built(model)
    first.cut(0, 1)
    last.cut(1, 3)
    assert type(last.get_submodule("blocks.1").ffn) is FeedForward
    assert set(first.state_dict()) | set(last.state_dict()) == set(whole.state_dict())
    tokens = tokens_of()
    assert torch.equal(last(first(tokens)), whole(tokens))


def test_a_sequence_beyond_the_model_is_refused():
    with pytest.raises(InputError, match="33 tokens was given, but the model's max_seq_len is 32"):
        built()(tokens_of(seq=33))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize("name", ["plain", "sliding"])
def test_compiles_as_one_graph(name):
    """The captured graph (`aot_eager`: what autograd and the code generator see) equals eager."""
    decoder, tokens = built(MODEL.replace(**VARIANTS[name])), tokens_of()
    ids = (torch.arange(17) // 6).expand(2, -1)
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    for arguments in [(tokens,), (tokens, ids)]:
        torch.testing.assert_close(compiled(*arguments), decoder(*arguments))
    cross_entropy(compiled(tokens, ids), tokens).backward()
    captured = [p.grad.clone() for p in decoder.parameters()]
    decoder.zero_grad()
    cross_entropy(decoder(tokens, ids), tokens).backward()
    for found, parameter in zip(captured, decoder.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)
