"""Cross-entropy: kernels in the interpreter against the reference in fp64; chunks against the
whole, two ranks against one; nothing waits for the device, one chunk's logits are held."""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config.errors import InputError
from paceline.kernels import launch, loss, switch
from paceline.kernels.launch import Launch, MeasuredLaunch
from paceline.kernels.loss import (
    IGNORED,
    cross_entropy,
    cross_entropy_parallel,
    linear_cross_entropy,
)
from tests.kernels.agreement import (
    DEVICE,
    check,
    kernels,
    random,
    relative_error,
    with_kernels,
)
from tests.ranks import run_ranks

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=2)


def some_targets(*shape: int, vocab: int, seed: int = 7) -> Tensor:
    """Ids, about a third of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.3, IGNORED, ids).to(DEVICE)


def in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """In place of a copy: a leaf can't be given up."""
    return cross_entropy(logits.clone(), targets, inplace=True)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 2 x 8 columns: a row takes many."""
    small = MeasuredLaunch(Launch({"REPEATS": 2, "LANES": 8}), 0, 0)
    rows = ("loss.whole_row", "loss.own_columns", "loss.all_columns")
    monkeypatch.setattr(
        launch, "measured", lambda device, kernel, dtype, size: small if kernel in rows else None
    )


@with_kernels
@given(
    shape=shapes,
    vocab=st.integers(1, 70),
    function=st.sampled_from([cross_entropy, in_place]),
)
@settings(max_examples=8, deadline=None)
def test_it_is_the_reference(shape, vocab, function):
    targets = some_targets(*shape, vocab=vocab)
    targets.view(-1)[0] = vocab - 1
    check(lambda logits: function(logits, targets), [random(*shape, vocab, scale=3)], 1e-5)


@with_kernels
@pytest.mark.parametrize("function", [cross_entropy, in_place])
def test_rows_of_many_blocks(small_blocks, function):
    targets = some_targets(3, vocab=59)
    targets[1] = 58
    check(lambda logits: function(logits, targets), [random(3, 59, scale=3)])


@with_kernels
def test_rows_longer_than_a_block():
    targets = torch.tensor([20000, 3], device=DEVICE)
    check(lambda logits: cross_entropy(logits, targets), [random(2, 20001)])


@with_kernels
def test_rows_are_read_where_they_lie():
    targets = some_targets(3, 2, vocab=9).int()
    check(lambda logits: in_place(logits[..., 3:12], targets), [random(3, 2, 20)])
    check(lambda logits: cross_entropy(logits.transpose(0, 1), targets), [random(2, 3, 9)])


@with_kernels
def test_huge_logits_keep_their_digits():
    """And so do their differences, which the logarithm of the sum would round away."""
    target = torch.tensor([1], device=DEVICE)
    values = random(1, 40, scale=2).detach().mul(64).round().div(64)  # exact beside 1e4
    for offset in (1e4, -1e4):
        logits = (values + offset).requires_grad_()
        check(lambda logits: cross_entropy(logits, target), [logits], 1e-6)


@with_kernels
def test_masked_logits_have_no_share(small_blocks):
    logits, targets = random(4, 40).detach(), torch.tensor([1, 2, 39, IGNORED], device=DEVICE)
    logits[0, :1] = logits[1, 3:] = logits[2, :39] = -math.inf
    check(lambda logits: cross_entropy(logits, targets), [logits.requires_grad_()])
    logits.data[3] = math.nan  # of a row that is ignored
    with kernels():
        cross_entropy(logits, targets).backward()
    assert logits.grad.isfinite().all()


@with_kernels
@pytest.mark.parametrize(
    ("value", "columns"), [(math.nan, 1), (math.inf, 1), (-math.inf, 1), (-math.inf, 40)]
)
def test_what_is_not_finite_is_seen_in_the_loss(small_blocks, value, columns):
    logits, targets = random(2, 40).detach(), torch.tensor([0, 3], device=DEVICE)
    logits[0, :columns] = value
    with kernels():
        mine = cross_entropy(logits, targets)
    torch.testing.assert_close(mine, F.cross_entropy(logits, targets), equal_nan=True)
    assert not mine.isfinite()


@with_kernels
def test_a_target_that_there_is_not_makes_it_nan():
    with kernels():
        assert cross_entropy(random(2, 5), torch.tensor([5, 1], device=DEVICE)).isnan()


@with_kernels
@pytest.mark.parametrize("function", [cross_entropy, in_place, linear_cross_entropy])
@pytest.mark.parametrize("tokens", [0, 3])
def test_no_target_that_counts_is_nan_as_in_torch(function, tokens):
    x, targets = random(tokens, 5), torch.full((tokens,), IGNORED, device=DEVICE)
    rest = (random(6, 5, seed=1),) if function is linear_cross_entropy else ()
    with kernels():
        value = function(x, *rest, targets)
        value.backward()
    assert value.isnan()
    for each in (x, *rest):
        assert torch.equal(each.grad, torch.zeros_like(each))


@with_kernels
def test_in_place_the_gradient_lies_where_the_logits_were():
    logits, targets = random(3, 9), some_targets(3, vocab=9)
    given = logits.clone()
    seen = []
    given.register_hook(lambda grad: seen.append(grad.data_ptr()))
    with kernels():
        cross_entropy(given, targets, inplace=True).backward()
    assert seen == [given.data_ptr()]
    assert torch.equal(given.detach(), logits.grad)


@with_kernels
def test_whoever_needs_the_logits_is_told_that_they_are_gone():
    with kernels():
        capped = random(3, 9).tanh()  # its gradient is of its result
        value = cross_entropy(capped, some_targets(3, vocab=9), inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


@with_kernels
def test_a_second_backward_is_refused():
    with kernels():
        value = cross_entropy(random(3, 9), some_targets(3, vocab=9))
        value.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="asked for twice"):
            value.backward()


@with_kernels
def test_without_a_gradient_the_logits_stay():
    logits, targets = random(3, 9), some_targets(3, vocab=9)
    before = logits.detach().clone()
    with kernels(), torch.no_grad():
        value = cross_entropy(logits, targets, inplace=True)
    assert torch.equal(logits, before)
    torch.testing.assert_close(value, F.cross_entropy(logits, targets).detach())


# The layer and its loss


@with_kernels
@given(
    tokens=st.integers(1, 6),
    vocab=st.integers(2, 40),
    chunk_rows=st.sampled_from([1, 2, 4, 8, None]),
)
@settings(max_examples=8, deadline=None)
def test_layer_and_loss_are_the_reference(tokens, vocab, chunk_rows):
    targets = some_targets(tokens, vocab=vocab)
    targets[-1] = vocab - 1
    check(
        lambda hidden, weight: linear_cross_entropy(hidden, weight, targets, chunk_rows=chunk_rows),
        [random(tokens, 5), random(vocab, 5, seed=1)],
        1e-5,
    )


@with_kernels
@pytest.mark.parametrize("chunk_rows", [2, None])
def test_a_tied_weight_gets_both_gradients(chunk_rows):
    ids = torch.tensor([[1, 3, 3], [0, 6, 2]], device=DEVICE)

    def tied(weight: Tensor) -> Tensor:
        hidden = F.embedding(ids, weight) * 2
        return linear_cross_entropy(hidden, weight, ids.roll(1), chunk_rows=chunk_rows)

    check(tied, [random(7, 5)])


@with_kernels
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_wanted_are_made(wanted):
    made, targets = [random(5, 4), random(9, 4, seed=1)], some_targets(5, vocab=9)
    inputs = [x if yes else x.detach() for x, yes in zip(made, wanted, strict=True)]

    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets)

    if any(wanted):
        check(loss_of, inputs)
    with kernels(), watching() as sizes:
        value = loss_of(*inputs)
    assert value.requires_grad == any(wanted)
    products = [shape for name, shape in sizes if name in ("mm", "addmm_")]
    assert products == [(5, 9), *([(5, 4)] if wanted[0] else []), *([(9, 4)] if wanted[1] else [])]


@with_kernels
@pytest.mark.parametrize("chunk_rows", [2, 5])
def test_autocast_products_are_of_its_type_and_sums_are_not(chunk_rows):
    hidden, weight = random(5, 64), random(33, 64, seed=1)
    targets = some_targets(5, vocab=33)
    with kernels(), torch.autocast(DEVICE.type, torch.bfloat16):
        value = linear_cross_entropy(hidden, weight, targets, chunk_rows=chunk_rows)
    value.backward()
    rounded = [x.detach().bfloat16().double().requires_grad_() for x in (hidden, weight)]
    F.cross_entropy(F.linear(*rounded), targets).backward()
    assert value.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert relative_error(hidden.grad, rounded[0].grad) < 1e-2
    assert relative_error(weight.grad, rounded[1].grad) < 1e-2
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())  # summed in fp32


@with_kernels
def test_a_parameter_takes_the_gradient_without_a_copy():
    hidden, weight = random(5, 4), random(9, 4, seed=1)
    with kernels(), watching() as seen:
        linear_cross_entropy(hidden, weight, some_targets(5, vocab=9)).backward()
    assert not [name for name, shape in seen if name in ("clone", "copy_") and shape == (9, 4)]


@with_kernels
def test_no_more_than_a_chunk_of_logits_is_held():
    tokens, width, vocab, rows = 24, 4, 50, 8
    hidden, weight = random(tokens, width), random(vocab, width, seed=1)
    targets = some_targets(tokens, vocab=vocab)
    with kernels(), watching() as seen:
        linear_cross_entropy(hidden, weight, targets, chunk_rows=rows).backward()
    largest = max(math.prod(shape) for _, shape in seen)
    assert largest == rows * 64  # a row's columns are padded to whole cache lines
    made = [name for name, shape in seen if math.prod(shape) == largest]
    assert made == ["new_empty"]


def test_chunks_are_large_and_even():
    from paceline.kernels.loss.linear import LEAST_ROWS, rows_of_chunk

    assert rows_of_chunk(8192, 131072, 2) == 8192
    assert rows_of_chunk(16384, 128256, 2) == 8192
    assert rows_of_chunk(102_400, 262144, 4) == LEAST_ROWS
    assert rows_of_chunk(7000, 262144, 4) == 7040
    assert rows_of_chunk(10, 1000, 4) == 128


# A vocabulary that ranks share out


@with_kernels
@pytest.mark.parametrize(("is_masked", "inplace"), [(False, False), (True, True)])
def test_two_ranks_are_one(is_masked, inplace):
    """Of 13 columns each: rows with a target on either rank, on none, and masked on one."""
    logits, targets = random(6, 26, scale=3).detach(), some_targets(6, vocab=26)
    targets[:4] = torch.tensor([0, 13, 25, IGNORED])
    if is_masked:
        logits[1, :13] = -math.inf
    wide = logits.double().requires_grad_()
    right = loss.reference.cross_entropy(wide, targets)
    (grad,) = torch.autograd.grad(3 * right, wide)
    arguments = logits.cpu(), targets.cpu(), inplace
    for rank, (plain, mine, sharded) in enumerate(run_ranks(_ranks_loss, 2, *arguments)):
        own = grad[:, 13 * rank : 13 * rank + 13]
        for (value, part), within in ((plain, 1e-12), (mine, 3e-6), (sharded, 3e-6)):
            assert relative_error(value, right.detach()) < within
            assert relative_error(part, own) < within


def _ranks_loss(rank, world_size, logits, targets, inplace):
    """Loss and gradient of the reference, of the kernels, and of DTensors without kernels."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from paceline.parallel import vocabulary

    own = logits[:, 13 * rank : 13 * rank + 13]
    results = []
    for dtype in (torch.float64, torch.float32):
        x = own.to(dtype).requires_grad_()
        with kernels():
            value = cross_entropy_parallel(
                x * 1, targets, 13 * rank, dist.group.WORLD, inplace=inplace
            )
            (grad,) = torch.autograd.grad(3 * value, x)
        results.append((value.detach(), grad))
    mesh = init_device_mesh("cpu", (world_size,))
    x = own.clone().requires_grad_()
    value = vocabulary.cross_entropy(DTensor.from_local(x * 1, mesh, [Shard(-1)]), targets)
    (grad,) = torch.autograd.grad(3 * value, x)
    return *results, (value.detach(), grad)


@with_kernels
def test_ranks_compile_it_as_one_graph():
    for mine, right in run_ranks(_ranks_compiled, 1):
        assert torch.equal(mine, right)


def _ranks_compiled(rank, world_size):
    logits, targets = random(3, 9).cpu(), some_targets(3, vocab=9).cpu()

    def loss_of(logits: Tensor) -> Tensor:
        return cross_entropy_parallel(logits, targets, 0, dist.group.WORLD, inplace=True)

    with kernels():
        compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
        (mine,) = torch.autograd.grad(2 * compiled(logits * 1), logits)
        (right,) = torch.autograd.grad(2 * loss_of(logits * 1), logits)
    return mine, right


# What all have in common


class _Watch(TorchDispatchMode):
    """Refuses what waits for the device, and notes the shape of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "is_nonzero"), "it waits"
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.seen.append((name, tuple(result.shape)))
        return result


@contextmanager
def watching():
    with _Watch() as mode:
        yield mode.seen


@with_kernels
def test_nothing_waits_for_the_device():
    logits, targets = random(3, 9), some_targets(3, vocab=9)
    hidden, weight = random(3, 4), random(9, 4, seed=1)
    with kernels(), watching():
        (2 * cross_entropy(logits, targets)).backward()
        (2 * in_place(logits, targets)).backward()
        (2 * linear_cross_entropy(hidden, weight, targets, chunk_rows=2)).backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs are of CUDA devices")
def test_a_graph_can_record_it():
    hidden, weight = random(64, 32).detach(), random(100, 32, seed=1)
    targets = some_targets(64, vocab=100)
    with switch.using("triton", DEVICE):
        for _ in range(2):
            expected = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            grad = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), weight)
        graph.replay()
    assert torch.equal(grad[0], expected[0])


@with_kernels
def test_operators_are_what_torch_wants_of_them():
    from paceline.kernels.loss import kernel, linear

    logits, targets = random(3, 9), some_targets(3, vocab=9)
    torch.library.opcheck(kernel._loss_operator.custom, (logits, targets, True))
    found = kernel._run_found(logits.detach(), targets, 0).unsqueeze(0)
    inputs = logits, targets, found, 0, True
    torch.library.opcheck(kernel._parallel_operator.custom, inputs)
    layer = random(3, 4), random(9, 4, seed=1), targets, 2, torch.float32
    torch.library.opcheck(linear._operator.custom, (*layer, True, True))


@with_kernels
@pytest.mark.parametrize("function", [cross_entropy, in_place, linear_cross_entropy])
def test_it_compiles_as_one_graph(function):
    inputs = [random(3, 9)]
    if function is linear_cross_entropy:
        inputs.append(random(9, 9, seed=1))
    targets = some_targets(3, vocab=9)

    def gradients(function):
        return torch.autograd.grad(2 * function(*inputs, targets), inputs)

    with kernels():
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for mine, right in zip(gradients(compiled), gradients(function), strict=True):
            assert torch.equal(mine, right)


def test_what_does_not_fit_is_refused():
    logits, targets = random(3, 9), some_targets(3, vocab=9)
    with pytest.raises(InputError, match="one id for each row"):
        cross_entropy(logits, targets[:2])
    with pytest.raises(InputError, match="one id for each row"):
        cross_entropy(logits, targets.double())
    with pytest.raises(InputError, match="that are a leaf"):
        cross_entropy(logits.view(3, 9), targets, inplace=True)
    with pytest.raises(InputError, match="transpose it"):
        linear_cross_entropy(logits, random(8, 5), targets)
    with pytest.raises(InputError, match="of one type"):
        linear_cross_entropy(logits, random(8, 9).detach().half(), targets)
    with pytest.raises(InputError, match="chunk_rows = 0"):
        linear_cross_entropy(logits, random(8, 9), targets, chunk_rows=0)
