"""Rounds of gradients without Flower: how one is told, and the steps that come of it."""

import numpy as np
import pytest

from paceline.config.job import read_job
from paceline.federate import gradients_process
from paceline.federate.client_round import main as train_alone
from paceline.federate.command import write_start
from paceline.federate.gradients import HALF, Scale, Telling, Understood, least_bits
from paceline.federate.grid import Form, centred, modulus_bits
from paceline.federate.rotation import Rotation
from paceline.federate.server_optimizer import JOB_FILE, ServerOptimizer
from paceline.federate.shared_file import GRADIENT, read_tensors, vector_of, write_tensors
from paceline.models.weights import write_weights
from paceline.train.this_machine import resolve_on_this_machine
from tests.federate.test_rounds import JOB
from tests.generate.networks import MODELS, built

COUNTS = (3000, 50, 9000, 7)
WIDTHS = (1e-3, 5.0, 0.1, 1e-8)
"""Of the numbers of each tensor's gradient."""
CLIENTS, BITS, SAMPLES = 6, 5, 8


@pytest.mark.parametrize("count", [1, 2, 7, 4096, 5000])
def test_a_turned_vector_has_its_length_and_turns_back(count):
    vector = np.random.default_rng(count).normal(size=count) * np.arange(count)
    rotation = Rotation(count, 3, 1.0)
    turned = rotation.turned(vector)
    assert np.linalg.norm(turned) == pytest.approx(np.linalg.norm(vector), rel=1e-12)
    assert rotation.turned_back(turned) == pytest.approx(vector, abs=1e-9 * count)
    again = Rotation(count, 4, 1.0).turned(vector)
    assert count < 3 or not np.allclose(turned, again)


def test_one_large_number_is_spread_over_all_of_its_block():
    vector = np.zeros(4096)
    vector[17] = 64.0
    assert np.abs(Rotation(4096, 0, 1.0).turned(vector)) == pytest.approx(np.ones(4096))


def test_a_share_of_a_turned_vector_is_a_fair_part_of_it():
    vector = np.zeros(8192)
    vector[:100] = 1.0
    rotation = Rotation(8192, 1, 0.25)
    part = rotation.turned_back(rotation.turned(vector))
    assert rotation.num_kept == 2048
    assert part @ part == pytest.approx(part @ vector)  # a projection
    assert part @ vector == pytest.approx(0.25 * 100, rel=0.3)


def gradients(stream):
    """One of each client: a common part, and noise."""
    common = np.concatenate(
        [np.linspace(-1, 1, n) * w for n, w in zip(COUNTS, WIDTHS, strict=True)]
    )
    widths = np.repeat(WIDTHS, COUNTS)
    return [(common + stream.normal(size=len(common)) * widths) * SAMPLES for _ in range(CLIENTS)]


def rounds_of(share, count=30):
    """Rounds of clients with these gradients: the scale, their gradients, what they told, and what
    is understood of the sum, as it comes out of masks."""
    stream, before = np.random.default_rng(0), None
    scale = Scale(np.zeros(len(COUNTS)), 1.0)
    for number in range(count + 1):
        telling, given = Telling(COUNTS, number, share), gradients(stream)
        told = [telling.told(each, SAMPLES, scale, n) for n, each in enumerate(given)]
        sums = np.sum(told, 0)
        sums[telling.num_head :] %= 2**BITS
        found = telling.understood(sums, range(CLIENTS), scale, BITS)
        yield telling, scale, given, told, found
        scale, before = found.next_scale(before, scale, BITS), found.sizes


def test_round_0_tells_sizes_alone():
    [(telling, _, _, told, found)] = rounds_of(1.0, 0)
    assert telling.num_told == 0
    assert all(len(values) == 1 + len(COUNTS) for values in told)
    assert not found.mean.any()
    expected = np.array(WIDTHS) * np.sqrt(SAMPLES) * np.sqrt(4 / 3)
    assert found.sizes == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_what_is_understood_is_the_mean_of_what_clients_told(share):
    """To rounding of fp64: no sum of so many left the modulus."""
    for telling, scale, _, told, found in list(rounds_of(share))[1:]:
        meant = sum(telling.meant(each, [n], scale) for n, each in enumerate(told))
        widths = np.repeat(WIDTHS, COUNTS)
        asked = meant / (CLIENTS * SAMPLES * widths)
        assert found.mean / widths == pytest.approx(asked, abs=1e-9)
        assert found.samples == CLIENTS * SAMPLES


def test_rounding_is_right_in_the_mean_and_as_large_as_the_grid_says():
    """Errors are evenly spread over a step, whatever the gradient is: of no correlation with it."""
    widths, errors = np.repeat(WIDTHS, COUNTS), []
    for _, scale, given, _, found in list(rounds_of(1.0))[1:]:
        assert 0.5 < scale.step / np.sqrt(SAMPLES) < 3  # of one client's numbers
        error = (found.mean * CLIENTS * SAMPLES - np.sum(given, 0)) / np.repeat(
            scale.divisors, COUNTS
        )
        expected = scale.step * np.sqrt(CLIENTS / 12)
        assert error.std() == pytest.approx(expected, rel=0.03)
        assert abs(np.corrcoef(error, np.sum(given, 0) / widths)[0, 1]) < 5 / np.sqrt(len(error))
        errors.append(error / expected)
    assert np.mean(errors, 0).std() == pytest.approx(1 / np.sqrt(30), rel=0.03)


def test_of_a_tensor_of_unknown_size_the_direction_is_told_first():
    """As of A of an adapter, whose gradient is zero until B isn't."""
    nodes, start = range(3), Scale(np.zeros(2), 1.0)
    first = np.concatenate([np.ones(10), np.zeros(10)])
    telling = Telling((10, 10), 0, 1.0)
    sizes = telling.understood(telling.told(first, 4, start, 0) * 3, nodes, start, 12)
    assert sizes.sizes == pytest.approx([0.5, 0.0])
    scale = sizes.next_scale(None, start, 12)
    again = Telling((10, 10), 1, 1.0)
    found = again.understood(sum(again.told(first, 4, scale, n) for n in nodes), nodes, scale, 12)
    assert found.mean[:10] == pytest.approx(np.full(10, 0.25), rel=0.1)
    assert not found.mean[10:].any()  # not even the grid's noise
    then = np.concatenate([np.ones(10), np.full(10, 2.0)])
    found = again.understood(sum(again.told(then, 4, scale, n) for n in nodes), nodes, scale, 12)
    assert found.sizes == pytest.approx([0.5, 1.0], rel=0.01)
    assert found.mean[:10] == pytest.approx(np.full(10, 0.25), rel=0.1)
    assert found.mean[10:] == pytest.approx(np.full(10, 0.25e-6), rel=0.2)
    assert found.next_scale(sizes.sizes, scale, 12).sizes == pytest.approx([0.5, 2.0], rel=0.01)


def test_of_a_gradient_far_larger_than_expected_no_more_is_told_than_four_times_that():
    scale = Scale(np.array([1.0]), 0.1)
    telling = Telling((64,), 1, 1.0)
    values = telling.told(np.full(64, 100.0), 4, scale, 0)
    meant = telling.meant(values, [0], scale)
    assert meant == pytest.approx(np.full(64, 2 * 4.0), abs=0.3)


def test_the_grid_grows_at_once_and_becomes_finer_slowly():
    scale, before = Scale(np.ones(1), 2.0), np.ones(1)
    for samples, step in ((16, 2.0), (64, 4.0), (4, np.sqrt(2.0))):  # 4 * sqrt(samples) / 8
        found = Understood(np.zeros(1), samples, np.ones(1), 1.0)
        assert found.next_scale(before, scale, 4).step == step


def test_masks_taken_off_later_leave_the_lowest_bits():
    """SecAgg+ adds modulo 2^wide; what was cut to fewer bits before is right modulo these."""
    stream, form = np.random.default_rng(5), Form(modulus_bits(HALF, CLIENTS), 3, BITS, 100)
    values = stream.integers(-2, 3, (CLIENTS, 100))
    masks = stream.integers(0, 2**form.wide_bits, (CLIENTS, 100))
    masks[-1] = -masks[:-1].sum(0)
    sent = [form.packed((v + m) % 2**form.wide_bits) for v, m in zip(values, masks, strict=True)]
    assert {len(raw) for raw in sent} == {-(-3 * form.wide_bits // 8) + -(-97 * BITS // 8)}
    sums = sum(form.unpacked(raw) for raw in sent)
    assert (centred(sums[3:], BITS) == values.sum(0)[3:]).all()
    assert (centred(sums[:3], form.wide_bits) == values.sum(0)[:3]).all()
    with pytest.raises(ValueError, match="bits"):
        form.unpacked(sent[0] + b"x")


def test_more_clients_need_more_bits():
    assert [least_bits(clients) for clients in (3, 8, 24, 1000)] == [3, 3, 4, 8]


@pytest.fixture
def computed():
    """Ends the process that computes gradients."""
    yield gradients_process
    gradients_process.end()


SGD = 'name = "sgd"\nmomentum = 0.0\nweight_decay = 0.01\nlr = 0.5'


@pytest.mark.parametrize("shares", ["adapters", "weights"])
def test_a_federation_of_one_is_a_run(tmp_path, monkeypatch, computed, shares):
    """Rounds of one client, told in 16 bits, against the same Job trained by itself.

    No B of the adapters is zero, or the first of A would be its direction alone.
    """
    monkeypatch.chdir(tmp_path)
    model = MODELS["grouped"].replace(vocab_size=258)
    write_weights(tmp_path / "base", model, built(model).float().state_dict())
    rows = [f"{n} one client has a text" for n in range(200)]
    (tmp_path / "0.txt").write_text("\n".join(rows))
    text = JOB.replace("eval_fraction = 0.1", 'eval_fraction = 0.1\nsource = "0.txt"')
    text = text.replace("steps = 1", "steps = 6\neval_every = 0").replace("lr = 1e-2", SGD)
    if shares == "weights":
        text = text.replace('method = "lora"\nrank = 4\n', "")
    (tmp_path / JOB_FILE).write_text(text)
    write_start(tmp_path, resolve_on_this_machine(read_job(tmp_path / JOB_FILE, [])).job)
    begun, stream = read_tensors(tmp_path / shares), np.random.default_rng(1)
    for name, each in begun.items():
        if name.endswith("lora_B.weight"):
            begun[name] = stream.normal(scale=0.1, size=each.shape).astype(np.float32)
    write_tensors(tmp_path / shares, begun)
    given = [f"finetune.adapters={tmp_path / shares}"] if shares == "adapters" else []
    train_alone(tmp_path / JOB_FILE, tmp_path / "alone", given)

    computed.keep_running(tmp_path)
    tensors = first = read_tensors(tmp_path / shares)
    counts = [each.size for each in tensors.values()]
    optimizer, before = ServerOptimizer(tmp_path, tensors), None
    scale = Scale(np.zeros(len(counts)), 1.0)
    for number in range(7):
        samples = computed.compute(max(number - 1, 0))
        telling = Telling(counts, number, 1.0)
        gradient = vector_of(read_tensors(tmp_path / GRADIENT), "all")
        values = telling.told(gradient, samples, scale, 7)
        found = telling.understood(values, [7], scale, 16)
        if number:
            tensors = optimizer.step(number - 1, found.mean)
            write_tensors(tmp_path / shares, tensors)
        scale, before = found.next_scale(before, scale, 16), found.sizes
    alone = vector_of(read_tensors(tmp_path / "alone"), "all")
    moved = alone - vector_of(first, "all")
    missed = alone - vector_of(tensors, "all")
    assert np.sqrt(np.mean(moved**2)) > 1e-3
    assert np.sqrt(np.mean(missed**2)) < 1e-3 * np.sqrt(np.mean(moved**2))
