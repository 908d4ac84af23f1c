"""Single tokens attend to the blocks of their sequences, as plain attention does."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.generate.paged import KeyShape, Memory, Packed, PagedAttend, Part, _LayerAttend

_SIZE, _WIDTH, _HEADS = 4, 8, 2


@pytest.mark.parametrize(("queries", "has_columns"), [(1, True), (3, True), (8, False)])
@pytest.mark.parametrize("window", [None, 6])
def test_single_tokens_attend_as_each_alone(queries, has_columns, window):
    memory = _memory(KeyShape(1, _HEADS, _WIDTH, True, queries), 24, torch.float64)
    assert memory.has_columns == has_columns
    places = [0, 3, 4, 13, 30]
    free = iter(np.random.default_rng(0).permutation(24).tolist())
    parts = [
        Part(row, place, 1, [next(free) for _ in range(place // _SIZE + 1)])
        for row, place in enumerate(places)
    ]
    q = torch.randn(1, _HEADS * queries, len(parts), _WIDTH, dtype=torch.float64)
    k, v = torch.randn(2, 1, _HEADS, len(parts), _WIDTH, dtype=torch.float64)
    core = PagedAttend(memory)
    core.packed = Packed(parts, memory)
    found = _LayerAttend(memory, 0)(q, k, v, core.mask(0, window, None, q.device))
    for part in parts:
        seen = [
            kept[0, part.blocks].transpose(0, 1).flatten(1, 2)[None, :, : part.first + 1]
            for kept in (memory.keys, memory.values)
        ]
        for kept, new in zip(seen, (k, v), strict=True):
            assert torch.equal(kept[:, :, -1], new[:, :, part.row])
        seen = [kept[:, :, -window:] if window else kept for kept in seen]
        own = q[:, :, part.row, None]
        alone = F.scaled_dot_product_attention(own, *seen, enable_gqa=True)
        assert torch.allclose(found[:, :, part.row, None], alone, rtol=1e-12)


def test_a_block_has_the_same_bytes_after_it_was_read_and_written():
    shape = KeyShape(2, _HEADS, _WIDTH, True, 2)
    memory, other = (_memory(shape, 3, torch.bfloat16) for _ in range(2))
    other.write(0, memory.read(2))
    assert torch.equal(other.keys[:, 0], memory.keys[:, 2])
    assert torch.equal(other.values[:, 0], memory.values[:, 2])


def _memory(shape: KeyShape, num_blocks: int, dtype: torch.dtype) -> Memory:
    memory = Memory(shape, num_blocks, _SIZE, dtype, torch.device("cpu"))
    for kept in (memory.keys, memory.values):
        kept.normal_()
    return memory
