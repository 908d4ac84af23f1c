"""Context parallelism against one process that holds the whole sequence.

In order: which tokens a rank holds and which tiles it works on, against all pairs (pure); attention
to one block (one process); the cores on 2, 4 and 8 gloo ranks, out and gradients; what is sent and
what is kept; a whole decoder, also recomputed, compiled and in bf16.
"""

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.ring_attention import kept_bytes, peak_bytes
from paceline.config.errors import InputError
from paceline.config.model import Model
from paceline.models.attention import Sdpa
from paceline.models.decoder import Decoder
from paceline.parallel.cp import RingAttend, context_groups, local, make_attend, positions_of, tiles
from paceline.parallel.cp.ring import _starts
from paceline.parallel.cp.ulysses import UlyssesAttend
from tests.ranks import run_ranks

# --- which tokens, which tiles ---


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 1), (1, 4), (2, 2), (4, 2), (3, 2)])
def test_the_ranks_hold_every_token_once(ring, ulysses):
    shares = [positions_of(96, ring, ulysses, rank) for rank in range(ring * ulysses)]
    assert {len(share) for share in shares} == {96 // (ring * ulysses)}
    assert torch.cat(shares).sort().values.tolist() == list(range(96))


def test_ulysses_neighbours_together_hold_a_ring_ranks_two_chunks():
    neighbours = [positions_of(32, 2, 2, rank) for rank in (0, 1)]
    assert torch.cat(neighbours).tolist() == [*range(8), *range(24, 32)]
    assert torch.equal(torch.cat(neighbours), positions_of(32, 2, 1, 0))


def test_a_sequence_that_does_not_split_is_refused():
    with pytest.raises(InputError, match=r"30 tokens .* 2 x 2 ranks .* multiple of 8"):
        positions_of(30, 2, 2, 0)


def _area(tile):
    size = tile.q1 - tile.q0
    return size * (size + 1) // 2 if tile.kind == "causal" else size * (tile.k1 - tile.k0)


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_every_rank_works_the_same_in_every_step_and_on_nothing_hidden(ring):
    half = 6
    works = [
        [sum(map(_area, tiles.causal_tiles(rank, source % ring, half))) for source in steps]
        for rank in range(ring)
        for steps in [range(rank, rank - ring, -1)]
    ]
    assert all(work == works[0] for work in works)
    seq_len = 2 * half * ring
    assert sum(map(sum, works)) == seq_len * (seq_len + 1) // 2


def _visible(documents, window):
    """(batch, seq, seq): all pairs, one by one."""
    positions = torch.arange(documents.shape[1])
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (distance < (window or len(positions)))
    return seen & (documents[:, :, None] == documents[:, None, :])


@settings(deadline=None, max_examples=60)
@given(
    ring=st.integers(2, 4),
    half=st.integers(1, 7),
    window=st.none() | st.integers(1, 30),
    cuts=st.lists(st.lists(st.integers(1, 55), max_size=4), min_size=1, max_size=2),
    rows=st.integers(1, 8),
)
def test_masked_tiles_cover_what_is_visible_once_and_only_masked_ones_hide(
    ring, half, window, cuts, rows
):
    seq_len = 2 * half * ring
    starts = torch.zeros(len(cuts), seq_len, dtype=torch.long)
    for sample, at in zip(starts, cuts, strict=True):
        sample[[cut for cut in at if cut < seq_len]] = 1
    documents = starts.cumsum(1)
    visible = _visible(documents, window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "ROWS", rows)
        covered = torch.zeros(seq_len, seq_len, dtype=torch.long)
        for rank in range(ring):
            blocks = tiles.row_blocks(ring, rank, half)
            low, sure = _starts(documents, [b.start for b in blocks], [b.last for b in blocks])
            if window is not None:
                low = [max(at, b.start - window + 1) for at, b in zip(low, blocks, strict=True)]
                sure = [max(at, b.last - window + 1) for at, b in zip(sure, blocks, strict=True)]
            mine = positions_of(seq_len, ring, 1, rank)
            for source in range(ring):
                theirs = positions_of(seq_len, ring, 1, source)
                for tile in tiles.masked_tiles(ring, source, half, blocks, low, sure):
                    q, k = mine[tile.q0 : tile.q1], theirs[tile.k0 : tile.k1]
                    covered[q[:, None], k] += 1
                    assert (q[0], k[0]) == (tile.q_at, tile.k_at)
                    _check_kind(tile, visible[:, q][:, :, k])
    assert covered.max() <= 1
    assert (covered[visible.any(0)] == 1).all()


def _check_kind(tile, visible):
    assert visible.any() or tile.kind == "masked"
    if tile.kind == "full":
        assert visible.all()
    elif tile.kind == "causal":
        assert torch.equal(visible, torch.ones_like(visible).tril())


def test_a_narrow_window_skips_the_blocks_it_does_not_reach():
    blocks = tiles.row_blocks(8, 0, 16)
    low = [max(0, block.start - 3) for block in blocks]
    sure = [max(0, block.last - 3) for block in blocks]
    count = [len(tiles.masked_tiles(8, source, 16, blocks, low, sure)) for source in range(8)]
    assert count == [2, 1, 0, 0, 0, 0, 0, 0]


# --- one block ---


def _random(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes
    ]


@pytest.mark.parametrize("kernel", ["cpu", "plain"])
@pytest.mark.parametrize(("dim", "v_dim"), [(8, 8), (12, 8), (6, 10)])
def test_blocks_merge_to_the_whole_and_their_gradients_add_up(kernel, dim, v_dim, monkeypatch):
    """Queries after two blocks of keys, then on the diagonal; grouped heads."""
    monkeypatch.setattr(local, "_kernel", lambda q, bias: kernel)
    q, k, v = _random((2, 4, 10, dim), (2, 2, 30, dim), (2, 2, 30, v_dim))
    (grad,) = _random((2, 4, 10, v_dim), seed=1)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    seen = torch.arange(20, 30)[:, None] >= torch.arange(30)
    seen[:, :4] = False
    wanted = F.scaled_dot_product_attention(*leaves, attn_mask=seen, enable_gqa=True)
    wanted.backward(grad)

    bias = torch.zeros(1, 1, 10, 10, dtype=q.dtype)
    bias[..., :4] = local.hidden_score(q.dtype)
    blocks = [
        (slice(0, 10), bias, False),
        (slice(10, 20), None, False),
        (slice(20, 30), None, True),
    ]
    out, lse = torch.zeros_like(wanted), torch.full((2, 4, 10), -math.inf, dtype=q.dtype)
    for at, *how in blocks:
        local.merge(out, lse, *local.attend_block(q, k[:, :, at], v[:, :, at], *how))
    torch.testing.assert_close(out, wanted.detach(), rtol=0, atol=1e-12)
    dq = torch.zeros_like(q)
    for at, *how in blocks:
        share = local.attend_block_backward(grad, q, k[:, :, at], v[:, :, at], out, lse, *how)
        dq += share[0]
        for got, leaf in zip(share[1:], leaves[1:], strict=True):
            torch.testing.assert_close(got, leaf.grad[:, :, at], rtol=0, atol=1e-12)
    torch.testing.assert_close(dq, leaves[0].grad, rtol=0, atol=1e-12)


def test_a_tile_that_a_query_sees_nothing_of_has_no_weight():
    q, k, v = _random((1, 1, 2, 8), (1, 1, 4, 8), (1, 1, 4, 8))
    bias = torch.zeros(1, 1, 2, 4, dtype=q.dtype)
    bias[:, :, 0] = local.hidden_score(q.dtype)
    out, lse = torch.zeros_like(q), torch.full((1, 1, 2), -math.inf, dtype=q.dtype)
    local.merge(out, lse, *local.attend_block(q, k, v, bias, False))
    wanted, wanted_lse = local.attend_block(q, k[:, :, :2], v[:, :, :2], None, False)
    local.merge(out, lse, wanted, wanted_lse)
    assert torch.equal(out[:, :, 0], wanted[:, :, 0])
    assert torch.equal(lse[:, :, 0], wanted_lse[:, :, 0])
    assert not torch.allclose(out[:, :, 1], wanted[:, :, 1])


@pytest.mark.parametrize(
    ("kernel", "dtype", "has_bias"),
    [
        ("flash", torch.bfloat16, False),
        ("efficient", torch.bfloat16, True),
        ("efficient", torch.float32, False),
    ],
)
@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (12, 8), (192, 128)])
def test_the_cuda_operators_take_what_they_are_given(
    kernel, dtype, has_bias, dim, v_dim, monkeypatch
):
    """Arguments and shapes only, on tensors without memory: the arithmetic needs a GPU."""
    monkeypatch.setattr(local, "_kernel", lambda q, bias: kernel)
    empty = partial(torch.empty, dtype=dtype, device="meta")
    q, k, v = empty(2, 4, 40, dim), empty(2, 2, 24, dim), empty(2, 2, 24, v_dim)
    bias = empty(2, 1, 40, 24) if has_bias else None
    out, lse = local.attend_block(q, k, v, bias, False)
    assert (out.shape, lse.shape) == ((2, 4, 40, v_dim), (2, 4, 40))
    grads = local.attend_block_backward(torch.empty_like(out), q, k, v, out, lse, bias, False)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


# --- on ranks ---

SEQ = 48


class Case(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    window: int | None = None
    packed: bool = False


CASES = (
    Case(8, 8, 8, 8),
    Case(8, 2, 8, 8),
    Case(8, 4, 12, 8),
    Case(8, 2, 8, 8, window=10),
    Case(8, 2, 8, 8, packed=True),
    Case(8, 4, 12, 8, window=7, packed=True),
)


def _attend(ring, ulysses, world_size):
    cp = ring * ulysses
    mesh = init_device_mesh("cpu", (world_size // cp, cp), mesh_dim_names=("dp", "cp"))
    return make_attend(Sdpa(), context_groups(mesh, ulysses)), mesh.get_local_rank("cp")


def _packed():
    """Numbers of documents, as a decoder gives them: where each starts."""
    return torch.tensor([[0] * 5 + [5] * 20 + [25] * 23, [0] * 30 + [30] * 18])


def _errors(rank, world_size, splits):
    """The largest difference to one process, by (split, case, type)."""
    tiles.ROWS = 5  # so that even these short chunks are cut
    found = {}
    for ring, ulysses in splits:
        attend, place = _attend(ring, ulysses, world_size)
        mine = positions_of(SEQ, ring, ulysses, place)
        for case in CASES:
            for dtype in (torch.float64, torch.float32):
                found[ring, ulysses, case, dtype] = _error(attend, mine, case, dtype)
    return found


def _error(attend, mine, case, dtype):
    heads, kv_heads, dim, v_dim, window, packed = case
    shapes = ((2, heads, SEQ, dim), (2, kv_heads, SEQ, dim), (2, kv_heads, SEQ, v_dim))
    q, k, v, grad = _random(*shapes, (2, heads, SEQ, v_dim), dtype=dtype)
    documents = _packed() if packed else None
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = Sdpa()(*whole, Sdpa().mask(SEQ, window, documents, q.device))
    wanted.backward(grad)
    share = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
    out = attend(*share, attend.mask(len(mine), window, documents, q.device))
    out.backward(grad[:, :, mine])
    pairs = [(out, wanted[:, :, mine])]
    pairs += [(a.grad, b.grad[:, :, mine]) for a, b in zip(share, whole, strict=True)]
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize(
    ("num_ranks", "splits"),
    [
        (2, [(2, 1), (1, 2)]),
        (4, [(4, 1), (1, 4), (2, 2), (2, 1)]),
        (8, [(2, 4), (4, 2)]),
    ],
)
def test_attention_over_ranks_equals_one_process(num_ranks, splits):
    for found in run_ranks(_errors, num_ranks, splits):
        assert len(found) == len(splits) * len(CASES) * 2
        for (*what, dtype), error in found.items():
            assert error <= (1e-10 if dtype == torch.float64 else 1e-5), what


def _sent(rank, world_size, splits):
    """What a forward and a backward pass send, by split: [(kind, bytes), ...] each."""
    log = []
    batch, exchange = dist.batch_isend_irecv, dist.all_to_all_single

    def logged_batch(operations):
        sends = [each.tensor.nbytes for each in operations if each.op is dist.isend]
        log.extend(("send", size) for size in sends)
        return batch(operations)

    def logged_exchange(output, given, **options):
        log.append(("all-to-all", given.nbytes))
        return exchange(output, given, **options)

    dist.batch_isend_irecv, dist.all_to_all_single = logged_batch, logged_exchange
    found = {}
    for split in splits:
        attend, _ = _attend(*split, world_size)
        shapes = (1, 8, 16, 8), (1, 2, 16, 8), (1, 2, 16, 4)
        q, k, v = (x.requires_grad_() for x in _random(*shapes, dtype=torch.bfloat16))
        out = attend(q, k, v, attend.mask(16, None, None, q.device))
        forward, log[:] = list(log), []
        out.sum().backward()
        found[split], log[:] = (forward, list(log)), []
    return found


def test_what_is_sent():
    """A ring: blocks forward, blocks and gradients backward. Ulysses: four tensors each way."""
    block = 2 * 16 * (8 + 4) * 2  # k and v, two bytes each
    q, k, v, out = 8 * 16 * 8 * 2, 2 * 16 * 8 * 2, 2 * 16 * 4 * 2, 8 * 16 * 4 * 2
    exchanges = [("all-to-all", size) for size in (q, k, v, out)]
    for found in run_ranks(_sent, 4, [(4, 1), (1, 2)]):
        forward, backward = found[4, 1]
        assert forward == [("send", block)] * 3
        assert sorted(backward) == [("send", block)] * 3 + [("send", 2 * block)] * 3
        forward, backward = found[1, 2]
        assert forward == exchanges
        assert sorted(backward) == sorted(exchanges)


def _memory(rank, world_size, seq_len):
    """Kept and peak bytes of a step of the ring, with and without documents."""
    attend, _ = _attend(world_size, 1, world_size)
    local_len = seq_len // world_size
    documents = torch.arange(seq_len)[None] // (seq_len // 3)

    def step(given):
        q, k, v = (x.requires_grad_() for x in _random((1, 4, local_len, 16),
                   (1, 1, local_len, 16), (1, 1, local_len, 16), dtype=torch.float32))  # fmt: skip
        attend(q, k, v, attend.mask(local_len, None, given, q.device)).sum().backward()

    return [
        (kept_bytes(partial(step, given)), min(peak_bytes(partial(step, given)) for _ in range(3)))
        for given in (None, documents)
    ]


def test_a_ring_keeps_its_share_alone_and_never_holds_all_scores():
    seq_len, ring = 4096, 4
    share = seq_len // ring * 16 * 4  # a head of this rank's tokens
    lse = seq_len // ring * 4 * 4
    for found in run_ranks(_memory, ring, seq_len):
        for kept, peak in found:
            assert kept == (4 + 1 + 1 + 4) * share + lse  # q, k, v, out
            # A few blocks and gradients (the draws are fp64); the scores of even this rank's own
            # tokens would be 256 shares, their mask 64.
            assert peak < 100 * share


def _mixed_types(rank, world_size, splits):
    """Types of the result and of q's gradient where autocast left q and k in fp32, by split."""
    found = {}
    for split in splits:
        attend, _ = _attend(*split, world_size)
        q, k, v = _random(*[(1, 2, 8, 8)] * 3, dtype=torch.float32)
        q.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = attend(q, k, v.bfloat16(), attend.mask(8, None, None, q.device))
        out.sum().backward()
        found[split] = out.dtype, q.grad.dtype
    return found


def test_autocast_holds_for_the_cores():
    for found in run_ranks(_mixed_types, 2, [(2, 1), (1, 2)]):
        assert set(found.values()) == {(torch.bfloat16, torch.float32)}


def _refusals(rank, world_size):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    groups = context_groups(mesh, 2)
    ring = RingAttend(dist.group.WORLD)
    few = UlyssesAttend(groups.ulysses, Sdpa())
    x = torch.zeros(1, 3, 4, 8)
    calls = [
        lambda: context_groups(mesh, 3),
        lambda: few(x, x, x, None),
        lambda: ring.mask(5, None, None, x.device),
        lambda: ring.mask(4, None, torch.zeros(1, 4, dtype=torch.long), x.device),
    ]
    sentences = []
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()
        sentences.append(str(caught.value))
    return sentences


def test_what_does_not_split_is_refused_in_a_sentence():
    (sentences, _) = run_ranks(_refusals, 2)
    for sentence, words in zip(
        sentences,
        ("ulysses = 3", "3 query heads", "given 5 tokens", "those of all 8 tokens"),
        strict=True,
    ):
        assert words in sentence


# --- a whole decoder ---

SMALL = {
    "vocab_size": 61, "hidden_size": 32, "ffn_size": 48, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "max_seq_len": SEQ, "sliding_window": 9, "full_layers": (0,),
}  # fmt: skip


def _products_stay(_context, operator, *_args, **_kw):
    kept = {
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _change(network, how):
    """Put the blocks under checkpointing or dynamo."""
    selective = {"context_fn": partial(create_selective_checkpoint_contexts, _products_stay)}
    for name, block in list(network.blocks.named_children()):
        if how == "compiled":
            block.compile(backend="eager")
        elif how in ("full", "selective"):
            options = selective if how == "selective" else {}
            network.blocks.register_module(name, checkpoint_wrapper(block, **options))


def _gradients(network, mine, autocast=False):
    """Loss summed over the tokens given, per token of all, and the gradients."""
    tokens = torch.randint(61, (2, SEQ + 1), generator=torch.Generator().manual_seed(3))
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = network(tokens[:, :-1][:, mine], _packed(), mine)
    targets = tokens[:, 1:][:, mine]
    loss = F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), reduction="sum")
    loss = loss / (2 * SEQ)
    loss.backward()
    names = [
        name.replace("_checkpoint_wrapped_module.", "") for name, _ in network.named_parameters()
    ]
    return loss.detach(), dict(zip(names, (p.grad for p in network.parameters()), strict=True))


def _decoder(attend, dtype):
    network = Decoder(Model(**SMALL), attend)
    network.init_weights(torch.Generator().manual_seed(5))
    return network.to(dtype)


def _decoder_errors(rank, world_size, splits):
    """Largest difference to the serial decoder, by (split, how)."""
    tiles.ROWS = 5
    everything, found = torch.arange(SEQ), {}
    serial = _gradients(_decoder(None, torch.float64), everything)
    low = _gradients(_decoder(None, torch.float32), everything, autocast=True)
    for split in splits:
        attend, place = _attend(*split, world_size)
        mine = positions_of(SEQ, *split, place)
        for how in ("plain", "full", "selective", *(["compiled"] if split == (2, 2) else [])):
            network = _decoder(attend, torch.float64)
            _change(network, how)
            found[split, how] = _apart(_gradients(network, mine), serial)
        network = _decoder(attend, torch.float32)
        found[split, "bf16"] = _apart(_gradients(network, mine, autocast=True), low)
    return found


def _apart(shares, serial):
    """Largest difference of the loss and gradients, summed over ranks, to the serial ones."""
    (loss, grads), (wanted_loss, wanted) = shares, serial
    pairs = [(loss, wanted_loss), *((grads[name], wanted[name]) for name in wanted)]
    worst = 0.0
    for got, want in pairs:
        got = got.clone()
        dist.all_reduce(got)
        worst = max(worst, (got - want).abs().max().item() / max(1.0, want.abs().max().item()))
    return worst


def test_a_decoder_over_ranks_has_the_serial_gradients():
    for found in run_ranks(_decoder_errors, 4, [(4, 1), (2, 2), (1, 4)]):
        assert len(found) == 13
        for (split, how), error in found.items():
            assert error <= (2e-2 if how == "bf16" else 1e-10), (split, how)
        assert all(error > 0 for (_, how), error in found.items() if how == "bf16")
