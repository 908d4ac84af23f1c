"""Rounds without Flower: how gradients and changes are told, and what comes of them."""

import numpy as np
import pytest

from paceline.config.job import read_job
from paceline.federate import lattice, training_process
from paceline.federate.adapter_pairs import Reduction, adapters_of
from paceline.federate.command import write_start
from paceline.federate.grid import HALF, Form, centred, modulus_bits
from paceline.federate.lattice import DIMENSION, SECOND_MOMENT, STEP, nearest
from paceline.federate.rotation import Rotation
from paceline.federate.scale import Scale, Understood, least_bits, line_of
from paceline.federate.server_optimizer import JOB_FILE, ServerOptimizer
from paceline.federate.shared_file import FOUND, plus, read_tensors, vector_of, write_tensors
from paceline.federate.telling import Telling
from paceline.models.weights import write_weights
from paceline.observe.run import Run
from paceline.train.command import train_job
from paceline.train.export import export, export_adapters
from paceline.train.this_machine import resolve_on_this_machine
from tests.federate.test_rounds import JOB
from tests.generate.networks import MODELS, built

COUNTS = (3000, 50, 9000, 7)
TENSORS = {str(n): np.zeros(count, np.float32) for n, count in enumerate(COUNTS)}
WIDTHS = (1e-3, 5.0, 0.1, 1e-8)
"""Of the numbers of each tensor's gradient."""
CLIENTS, BITS, SAMPLES = 6, 6, 8


@pytest.fixture(scope="module")
def points():
    """Of all space, evenly."""
    return np.random.default_rng(1).uniform(-8, 8, (20_000, DIMENSION))


def test_rounding_to_the_lattice_errs_as_its_table_says(points):
    """And no point beside the one that was found is nearer: of its 4,320 neighbours, 500 drawn."""
    found = nearest(points)
    error = points - found
    assert np.square(error).mean() / STEP**2 == pytest.approx(SECOND_MOMENT, rel=2e-3)
    beside = nearest(np.random.default_rng(2).normal(size=(20_000, DIMENSION)))
    beside = np.unique(beside[np.isclose(np.square(beside).sum(1), 8.0)], axis=0)
    assert len(beside) > 500
    distance = np.square(error).sum(1)
    for other in beside[:500]:
        assert (np.square(error - other).sum(1) >= distance - 1e-9).all()


def test_sums_of_coordinates_are_those_of_sums(points):
    """Modulo as well: what a client adds of a multiple of the lattice is lost with it."""
    first, second = nearest(points[:1000]), nearest(points[1000:2000])
    assert (lattice.points_of(lattice.coordinates(first)) == first).all()
    any_point = lattice.points_of(np.random.default_rng(3).integers(-9, 9, (1000, DIMENSION)))
    assert (nearest(any_point) == any_point).all()
    sums = (lattice.coordinates(first) + lattice.coordinates(second)) % 2**BITS
    found = lattice.points_of(sums) - (first + second)
    assert (nearest(found / 2**BITS) * 2**BITS == found).all()


def test_dithers_are_spread_evenly_over_what_is_rounded_to_a_point():
    """So that the error has no direction: as of points anywhere."""
    error = lattice.dithers(np.random.default_rng(0), 20_000)
    error -= nearest(error)
    expected = np.eye(DIMENSION) * SECOND_MOMENT * STEP**2
    assert np.cov(error.T) == pytest.approx(expected, abs=0.01)


def adapter(inputs, outputs, rank, seed):
    """A network's adapters: one of full rank, and one as it begins."""
    stream = np.random.default_rng(seed)
    shapes = {"lora_A.weight": (rank, inputs), "lora_B.weight": (outputs, rank)}
    found = {f"{of}.{name}": stream.normal(size=shapes[name]) for of in "xy" for name in shapes}
    found["y.lora_B.weight"] *= 0
    return {name: each.astype(np.float32) for name, each in found.items()}


def gradient_of(tensors, seed):
    """As the gradient of the product gives those of both matrices."""
    stream, found = np.random.default_rng(seed), []
    for of in "xy":
        a, b = (tensors[f"{of}.lora_{name}.weight"].astype(float) for name in "AB")
        product = stream.normal(size=(len(b), a.shape[1]))
        found += [(b.T @ product).reshape(-1), (product @ a.T).reshape(-1)]
    return found


@pytest.mark.parametrize(("inputs", "outputs", "rank"), [(20, 12, 4), (6, 9, 6), (5, 9, 6)])
def test_gradients_of_adapters_are_told_without_what_follows(inputs, outputs, rank):
    """With their lengths and angles; nothing of A while B is zero."""
    tensors, sizes = adapter(inputs, outputs, rank, 0), np.array([2.0, 0.1, 1.0, 3.0])
    matrices = [each.astype(float) for each in tensors.values()]
    reduction = Reduction(matrices, adapters_of(tensors), sizes)
    saved = rank * inputs + (rank**2 if rank <= inputs else 0)
    assert reduction.count == sum(each.size for each in tensors.values()) - saved
    given = [
        np.concatenate([g / s for g, s in zip(gradient_of(tensors, seed), sizes, strict=True)])
        for seed in (1, 2)
    ]
    told = [reduction.reduced(each) for each in given]
    assert told[0] @ told[1] == pytest.approx(given[0] @ given[1])
    for one, other in zip(told, given, strict=True):
        assert one @ one == pytest.approx(other @ other)
        assert reduction.restored(one) == pytest.approx(other, abs=1e-10)
    some = np.random.default_rng(3).normal(size=reduction.count)
    assert reduction.reduced(reduction.restored(some)) == pytest.approx(some)


def test_how_gradients_are_turned_does_not_hang_on_the_last_digits_of_a_decomposition():
    """Another machine's singular vectors are others, and of either direction."""
    tensors = adapter(20, 12, 4, 0)
    scale = scale_of(tensors, [2.0, 0.1, 1.0, 3.0])
    mark = Telling(tensors, 1, scale, 1.0, 4).mark
    near = {name: each * np.float32(1 + 1e-6) for name, each in tensors.items()}
    assert Telling(near, 1, scale, 1.0, 4).mark == pytest.approx(mark, abs=1e-3)
    tensors["x.lora_A.weight"][0] *= -1
    assert abs(Telling(tensors, 1, scale, 1.0, 4).mark - mark) > 0.1
    assert abs(Telling(near, 2, scale, 1.0, 4).mark - mark) > 0.1
    Telling(near, 1, scale, 1.0, 4).must_have(mark)
    with pytest.raises(ValueError, match="would not understand"):
        Telling(tensors, 1, scale, 1.0, 4).must_have(mark)


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


def scale_of(tensors, sizes, square=1.0):
    """One that knows nothing of lines."""
    return Scale.at_first(tensors)._replace(sizes=np.array(sizes), square=square)


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
    scale = Scale.at_first(TENSORS)
    for number in range(count + 1):
        telling, given = Telling(TENSORS, number, scale, share, BITS), gradients(stream)
        told = [telling.told(each, SAMPLES, n) for n, each in enumerate(given)]
        sums = np.sum([each.values for each in told], 0)
        sums[telling.num_head :] %= 2**BITS
        found = telling.understood(sums, range(CLIENTS))
        yield telling, scale, given, told, found
        scale, before = found.next_scale(TENSORS, before, scale), found.sizes


def test_round_0_tells_sizes_alone():
    [(telling, _, _, told, found)] = rounds_of(1.0, 0)
    assert telling.num_told == 0
    assert all(len(each.values) == 1 + len(COUNTS) for each in told)
    assert not found.mean.any()
    expected = np.array(WIDTHS) * np.sqrt(SAMPLES) * np.sqrt(4 / 3)
    assert found.sizes == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_what_is_understood_is_the_mean_of_what_clients_told(share):
    """To rounding of fp64: no sum of so many left the modulus."""
    for _, _, _, told, found in list(rounds_of(share))[1:]:
        meant = sum(each.meant for each in told)
        widths = np.repeat(WIDTHS, COUNTS)
        asked = meant / (CLIENTS * SAMPLES * widths)
        assert found.mean / widths == pytest.approx(asked, abs=1e-9)
        assert found.samples == CLIENTS * SAMPLES


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_of_a_sum_that_leaves_the_modulus_as_much_is_known_as_can_be(share):
    tensors, stream = {"0": np.zeros((2, 4096), np.float32)}, np.random.default_rng(0)
    telling = Telling(tensors, 1, scale_of(tensors, [1.0], square=0.2), share, BITS)
    told = [telling.told(stream.normal(size=8192), 1, n) for n in range(CLIENTS)]
    total = sum(each.meant for each in told)
    found = telling.understood(sum(each.values for each in told), range(CLIENTS))
    assert np.abs(found.mean * CLIENTS - total).max() > 1
    assert found.mean * CLIENTS == pytest.approx(telling.as_known(total), abs=1e-9)


def test_rounding_is_right_in_the_mean_and_as_large_as_the_lattice_says():
    """Errors are evenly spread, whatever the gradient is: of no correlation with it."""
    widths, errors = np.repeat(WIDTHS, COUNTS), []
    for telling, scale, given, _, found in list(rounds_of(1.0))[1:]:
        step = telling.step
        assert 0.2 < step / np.sqrt(SAMPLES) < 2  # of one client's numbers
        error = found.mean * CLIENTS * SAMPLES - np.sum(given, 0)
        error /= np.repeat(scale.sizes, COUNTS)
        expected = step * np.sqrt(CLIENTS * SECOND_MOMENT)
        assert error.std() == pytest.approx(expected, rel=0.03)
        assert abs(np.corrcoef(error, np.sum(given, 0) / widths)[0, 1]) < 5 / np.sqrt(len(error))
        errors.append(error / expected)
    assert np.mean(errors, 0).std() == pytest.approx(1 / np.sqrt(30), rel=0.03)


def two(last):
    """A gradient of two tensors: ones, and some number."""
    return np.concatenate([np.ones(10), np.full(10, last)])


PAIR = {"0": np.zeros(10, np.float32), "1": np.zeros(10, np.float32)}


def test_of_a_tensor_of_unknown_size_the_direction_is_told_first():
    nodes, start = range(3), Scale.at_first(PAIR)
    telling = Telling(PAIR, 0, start, 1.0, 12)
    sizes = telling.understood(telling.told(two(0.0), 4, 0).values * 3, nodes)
    assert sizes.sizes == pytest.approx([0.5, 0.0])
    scale = sizes.next_scale(PAIR, None, start)
    again = Telling(PAIR, 1, scale, 1.0, 12)
    found = again.understood(sum(again.told(two(0.0), 4, n).values for n in nodes), nodes)
    assert found.mean[:10] == pytest.approx(np.full(10, 0.25), rel=0.1)
    assert not found.mean[10:].any()  # not even rounding's noise
    found = again.understood(sum(again.told(two(2.0), 4, n).values for n in nodes), nodes)
    assert found.sizes == pytest.approx([0.5, 1.0], rel=0.01)
    assert found.mean[:10] == pytest.approx(np.full(10, 0.25), rel=0.1)
    assert found.mean[10:] == pytest.approx(np.full(10, 0.25e-6), rel=0.2)
    assert found.next_scale(PAIR, sizes.sizes, scale).sizes == pytest.approx([0.5, 2.0], rel=0.01)


def test_the_first_gradient_of_a_of_an_adapter_is_expected_as_b_says():
    """After a step of B along its own gradient, which is far from any direction."""
    begun, stream = adapter(200, 120, 4, 0), np.random.default_rng(1)
    product = stream.normal(size=(120, 3)) @ stream.normal(size=(3, 200))
    of_b = product @ begun["y.lora_A.weight"].T
    mean = np.concatenate([np.zeros(each.size) for each in begun.values()])
    mean[-of_b.size :] = of_b.reshape(-1)
    stepped = {**begun, "y.lora_B.weight": (-0.01 * of_b).astype(np.float32)}
    sizes = np.array([1.0, 1.0, 0.0, 5.0])
    found = Understood(mean, 16, sizes, 16.0, 1.0)
    scale = found.next_scale(stepped, sizes, Scale.at_first(begun))
    of_a = stepped["y.lora_B.weight"].T @ product
    assert scale.sizes[2] == pytest.approx(5.0 * of_a.std() / of_b.std(), rel=0.3)


def test_of_a_gradient_far_larger_than_expected_no_more_is_told_than_four_times_that():
    tensors = {"0": np.zeros(64, np.float32)}
    telling = Telling(tensors, 1, scale_of(tensors, [1.0]), 1.0, 12)
    meant = telling.told(np.full(64, 100.0), 4, 0).meant
    assert meant == pytest.approx(np.full(64, 2 * 4.0), abs=0.3)


def test_the_sum_is_expected_larger_at_once_and_smaller_slowly():
    scale = Scale(np.ones(1), np.ones(1), 32.0, 16)
    for samples, alike, square in (
        (16, 1.0, np.sqrt(16 * 32.0)),
        (64, 1.0, 64.0),
        (4, 1.0, np.sqrt(16 * 32.0)),  # as if 16 had answered
        (4, 3.0, 80.0),  # of whom gradients of 4 say that those of 16 are alike: 1 + 2 * 2
    ):
        found = Understood(np.ones(1), samples, np.ones(1), float(samples), alike)
        after = found.next_scale({"0": np.zeros(1, np.float32)}, np.ones(1), scale)
        assert after.square == pytest.approx(square)


def test_changes_are_weighed_by_samples_however_unlike_these_are():
    """A client with a thousand times the samples of others changes a thousand times as much."""
    tensors, stream = {"0": np.zeros((2, 4096), np.float32)}, np.random.default_rng(0)
    samples = [2, 3, 2000]
    scale, before = Scale.at_first(tensors), None
    for number in range(12):
        telling = Telling(tensors, number, scale, 1.0, 12, is_change=True)
        changes = stream.normal(size=(3, 8192))
        given = zip(changes, samples, range(3), strict=True)
        told = [telling.told(each * weight, weight, node) for each, weight, node in given]
        found = telling.understood(sum(each.values for each in told), range(3))
        scale, before = found.next_scale(tensors, before, scale), found.sizes
        assert found.samples == 2005
        assert found.sizes == pytest.approx([1.0], rel=0.02)
    expected = np.average(changes, axis=0, weights=samples)
    assert found.mean == pytest.approx(expected, abs=0.02)


def test_lines_are_columns_of_a_and_rows_of_other_matrices():
    shapes = {"x.lora_A.weight": (2, 3), "x.lora_B.weight": (2, 2), "y": (2,), "z": (2, 1, 2)}
    found = line_of({name: np.zeros(shape) for name, shape in shapes.items()})
    assert found.tolist() == [0, 1, 2, 0, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]


def test_small_rows_are_told_finer():
    """Errors are as the numbers of a row are, once some rounds have shown these."""
    tensors = {"y": np.zeros(300, np.float32), "z": np.zeros((5, 3000), np.float32)}
    stream, before, scale = np.random.default_rng(0), None, Scale.at_first(tensors)
    rows = np.array([0.01, 1.0, 1.0, 1.0, 3.0])
    errors = []
    for number in range(20):
        parts = [np.ones(each.size) for each in tensors.values()]
        parts[-1] = (stream.normal(size=(5, 3000)) * rows[:, None]).reshape(-1)
        telling = Telling(tensors, number, scale, 1.0, 8)
        values = [telling.told(np.concatenate(parts), 1, node).values for node in range(3)]
        found = telling.understood(sum(values), range(3))
        scale, before = found.next_scale(tensors, before, scale), found.sizes
        errors.append((found.mean - np.concatenate(parts))[-15000:].reshape(5, -1).std(1))
    assert errors[1] == pytest.approx(np.full(5, errors[1].mean()), rel=0.1)
    expected = np.sqrt(np.square(rows) / np.mean(np.square(rows)) + 0.1)
    assert errors[-1] / errors[-1][1] == pytest.approx(expected / expected[1], rel=0.1)


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
    assert [least_bits(clients) for clients in (3, 8, 24, 1000)] == [2, 3, 4, 7]


@pytest.fixture
def computed():
    """Ends the process that trains."""
    yield training_process
    training_process.end()


# A larger rate makes gradients grow more than fourfold in a step, of which no more is told.
SGD = 'name = "sgd"\nmomentum = 0.0\nweight_decay = 0.01\nlr = 0.2'


def write_job(folder, shares, optim, steps):
    """A client's folder: a Job, its data, and what is shared."""
    model = MODELS["grouped"].replace(vocab_size=258)
    write_weights(folder / "base", model, built(model).float().state_dict())
    rows = [f"{n} one client has a text" for n in range(200)]
    (folder / "0.txt").write_text("\n".join(rows))
    text = JOB.replace("eval_fraction = 0.1", 'eval_fraction = 0.1\nsource = "0.txt"')
    text = text.replace("steps = 1", f"steps = {steps}\neval_every = 0").replace("lr = 1e-2", optim)
    if shares == "weights":
        text = text.replace('method = "lora"\nrank = 4\n', "")
    (folder / JOB_FILE).write_text(text)
    write_start(folder, resolve_on_this_machine(read_job(folder / JOB_FILE, [])).job)


def trained_alone(folder, shares, factors="both"):
    """What a run of the Job comes to, from what is shared: (n,)."""
    run, given = Run(folder / "run"), []
    if shares == "adapters":
        given = [f"finetune.adapters={folder / shares}", f"finetune.factors={factors}"]
    train_job(read_job(folder / JOB_FILE, given), run, fresh=True, fits_cluster=False)
    (export_adapters if shares == "adapters" else export)(run, folder / "alone")
    return vector_of(read_tensors(folder / "alone"), "all")


def changes_of(process, folder, shares, numbers, factor="all"):
    """What rounds of three steps come to, each from where the one before it came to."""
    for number in numbers:
        assert process.compute(number, 3, factor) == 4  # samples
        yield vector_of(read_tensors(folder / FOUND), "all") / 4
        if number:
            tensors = read_tensors(folder / shares)
            found = plus(tensors, "all", vector_of(read_tensors(folder / FOUND), "all") / 4)
            write_tensors(folder / shares, found)


@pytest.mark.parametrize(
    ("shares", "factor", "factors"),
    [("adapters", "all", "both"), ("adapters", "b", "b"), ("weights", "all", "both")],
)
def test_changes_of_rounds_are_a_run_of_all_their_steps(
    tmp_path, monkeypatch, computed, shares, factor, factors
):
    """With the data, the optimizer's state and the schedule of its learning rate. Of one client."""
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path, shares, "lr = 1e-2\nwarmup_steps = 2\nschedule = 'cosine'", 6)
    first = vector_of(read_tensors(tmp_path / shares), "all")
    alone = trained_alone(tmp_path, shares, factors) - first
    computed.keep_running(tmp_path)
    sizes, *rounds = changes_of(computed, tmp_path, shares, (0, 1, 2), factor)
    assert (sizes == rounds[0]).all()
    assert np.abs(alone).max() > 1e-3
    assert np.abs(sum(rounds) - alone).max() < 1e-6


def test_a_round_that_is_asked_for_once_more_counts_once(tmp_path, monkeypatch, computed):
    """By a process that was started anew, too, and after rounds in which it had no part."""
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path, "adapters", "lr = 1e-2", 27)
    found = []
    for _ in range(2):
        computed.keep_running(tmp_path)
        for number in (2, 5, 9):
            assert computed.compute(number, 3) == 4
            found.append(vector_of(read_tensors(tmp_path / FOUND), "all"))
            kept = {file.name for file in tmp_path.glob("optimizer-*")}
            assert f"optimizer-{number}.safetensors" in kept
            assert len(kept) <= 2 + len(found) // 3
        computed.end()
    for once, again in zip(found[:3], found[3:], strict=True):
        assert np.abs(once).max() > 1e-2
        assert (once == again).all()


@pytest.mark.parametrize("shares", ["adapters", "weights"])
def test_a_federation_of_one_is_a_run(tmp_path, monkeypatch, computed, shares):
    """Rounds of one client, told in 16 bits, against the same Job trained by itself."""
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path, shares, SGD, 6)
    alone = trained_alone(tmp_path, shares)
    computed.keep_running(tmp_path)
    tensors = first = read_tensors(tmp_path / shares)
    optimizer, before = ServerOptimizer(tmp_path, tensors), None
    scale = Scale.at_first(tensors)
    for number in range(7):
        samples = computed.compute(max(number - 1, 0))
        telling = Telling(tensors, number, scale, 1.0, 16)
        gradient = vector_of(read_tensors(tmp_path / FOUND), "all")
        found = telling.understood(telling.told(gradient, samples, 7).values, [7])
        if number:
            tensors = optimizer.step(number - 1, found.mean)
            write_tensors(tmp_path / shares, tensors)
        scale, before = found.next_scale(tensors, before, scale), found.sizes
    moved = alone - vector_of(first, "all")
    missed = alone - vector_of(tensors, "all")
    assert np.sqrt(np.mean(moved**2)) > 1e-3
    assert np.sqrt(np.mean(missed**2)) < 1e-3 * np.sqrt(np.mean(moved**2))
