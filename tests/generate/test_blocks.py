"""Blocks: who uses which, and which of the idle ones goes first."""

import pytest

from paceline.generate.blocks import Blocks, OutOfBlocksError, name_of


def test_a_block_is_free_when_its_last_user_gives_it_back():
    blocks = Blocks(3)
    first, name = blocks.take(), name_of(b"", [1, 2])
    blocks.put_name(first, name)
    blocks.use(first)
    blocks.give_back(first)
    assert (blocks.num_free, blocks.num_idle) == (2, 0)
    blocks.give_back(first)
    assert (blocks.num_free, blocks.num_idle) == (3, 1)
    assert blocks.find(name) == first
    blocks.use(first)
    assert (blocks.num_free, blocks.num_idle) == (2, 0)


def test_blocks_without_tokens_of_anybody_go_before_idle_ones_and_these_by_their_last_use():
    blocks = Blocks(3)
    taken = [blocks.take() for _ in range(3)]
    assert taken == [0, 1, 2]
    names = [name_of(b"", [number]) for number in taken]
    for block in (1, 0):
        blocks.put_name(block, names[block])
    for block in (0, 2, 1):
        blocks.give_back(block)
    assert [blocks.take() for _ in range(3)] == [2, 0, 1]
    assert [blocks.find(name) for name in names] == [None] * 3
    with pytest.raises(OutOfBlocksError):
        blocks.take()
    assert blocks.newly_taken() == [0, 1, 2, 2, 0, 1]
    assert blocks.newly_taken() == []


def test_names_tell_tokens_order_and_beginnings_apart():
    names = {
        name_of(b"", [1, 2]),
        name_of(b"", [2, 1]),
        name_of(b"", [1, 2, 0]),
        name_of(b"other", [1, 2]),
        name_of(name_of(b"", [1, 2]), [1, 2]),
    }
    assert len(names) == 5


def test_the_first_of_two_equal_blocks_is_the_one_that_is_found():
    blocks = Blocks(2)
    first, second = blocks.take(), blocks.take()
    name = name_of(b"", [7])
    blocks.put_name(first, name)
    blocks.put_name(second, name)
    assert blocks.find(name) == first
    blocks.give_back(second)
    assert blocks.num_idle == 0


@pytest.mark.parametrize("forgets", [True, False])
def test_nothing_is_found_where_nothing_is_shared(forgets):
    blocks = Blocks(2, shares=forgets)
    block, name = blocks.take(), name_of(b"", [7])
    blocks.put_name(block, name)
    if forgets:
        blocks.forget_all()
    assert blocks.find(name) is None
    blocks.give_back(block)
    assert (blocks.num_free, blocks.num_idle) == (2, 0)
