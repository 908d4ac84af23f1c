"""What clients and server compute for themselves, without Flower and without ranks."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.federate import Federate, read_federate
from paceline.config.job import read_job
from paceline.federate.command import federate_command
from paceline.federate.grid import half_of, modulus_bits, on_grid, packed, unpacked
from paceline.federate.rounds import TOLD, bits_of, factor_of, next_limit, with_size
from paceline.federate.split import clients_of_rows
from paceline.federate.state import STATE_FILE, State, read_state, write_state

SOURCES = np.repeat([0, 1, 2], [400, 200, 100])


def stream(seed=0):
    return np.random.default_rng(seed)


def counts(split, alpha=0.5, clients=5):
    """Rows of each source that each client has: (sources, clients)."""
    found = clients_of_rows(SOURCES, clients, split, alpha, seed=1)
    assert found.shape == SOURCES.shape
    return np.stack([np.bincount(found[n == SOURCES], minlength=clients) for n in range(3)])


def test_parts_are_alike_or_not_as_asked():
    assert (counts("even") == [[80], [40], [20]]).all()
    by_source = counts("source")
    assert (by_source == np.pad(np.diag([400, 200, 100]), ((0, 0), (0, 2)))).all()
    skewed, alike = counts("dirichlet", 0.1), counts("dirichlet", 1e5)
    assert (skewed.sum(1) == [400, 200, 100]).all()
    assert skewed[0].max() > 200
    assert np.abs(alike - counts("even")).max() <= 2


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_grid_is_right_in_the_mean_and_what_it_misses_is_kept(bits):
    change = stream().normal(size=500)
    total, error = np.zeros(500), np.zeros(500)
    step = 2.0 / half_of(bits)
    for _ in range(400):
        values, error = on_grid(change + error, 8.0, bits, stream(3))
        assert np.abs(values).max() <= half_of(bits)
        total += values * (4 * step)
    # What was told differs from what was asked for by the last error alone.
    assert total + error == pytest.approx(400 * change, abs=1e-9)
    assert np.abs(error).max() <= 4 * step
    drawn = [on_grid(change, 8.0, bits, stream(n)).values * 4 * step for n in range(400)]
    assert np.abs(np.mean(drawn, 0) - change).max() < 5 * 4 * step / 2 / np.sqrt(400)


def test_a_number_beyond_the_range_is_told_later():
    values, error = on_grid(np.array([5.0, -5.0, 0.0]), 1.0, 4, stream())
    assert values.tolist() == [7, -7, 0]
    assert error == pytest.approx([4, -4, 0])


@pytest.mark.parametrize("bits", [1, 5, 7, 8, 13])
@pytest.mark.parametrize("count", [0, 1, 9, 1000])
def test_packed_numbers_come_back_and_take_their_bits(bits, count):
    values = stream().integers(0, 2**bits, count)
    raw = packed(values, bits)
    assert len(raw) == -(-count * bits // 8)
    assert (unpacked(raw, bits, count) == values).all()
    with pytest.raises(ValueError, match=f"are not {count} numbers"):
        unpacked(raw + b"x", bits, count)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("clients", [3, 8, 100])
def test_sums_of_all_clients_stay_below_the_modulus(bits, clients):
    most = clients * 2 * half_of(bits)
    found = modulus_bits(half_of(bits), clients)
    assert 2 ** (found - 1) <= most < 2**found


def test_the_mean_of_products_is_the_product_of_the_mean_in_every_round():
    draw = stream().normal
    a, b = draw(size=(3, 10)), np.zeros((12, 3))
    for number in range(1, 5):
        changes = draw(size=(8, *(b if factor_of(number) == "b" else a).shape))
        if factor_of(number) == "b":
            products, b = [(b + each) @ a for each in changes], b + changes.mean(0)
        else:
            products, a = [b @ (a + each) for each in changes], a + changes.mean(0)
        assert np.mean(products, 0) == pytest.approx(b @ a, abs=1e-12)
    assert [factor_of(number) for number in range(1, 5)] == ["b", "a", "b", "a"]


def test_the_range_follows_the_size_that_is_told_in_the_sum():
    change = 0.01 * stream().normal(size=10_000)
    limit = 1.0
    for number in range(6):
        told = with_size(change, limit)
        assert len(told) == 10_000 + TOLD
        values, _ = on_grid(told, limit, 4, stream(number))
        limit = next_limit(limit, values[-TOLD:].mean() * limit / half_of(4))
    assert limit == pytest.approx(0.03, rel=0.3)
    assert with_size(change * 1e6, limit)[-1] == limit


PRIVACY = "[federate.privacy]\nepsilon = 1\nclip = 1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[federate]\njob = 'a'\nclients = 2", "federate.clients"),
        ("[federate]\njob = 'a'\nbits = 1", "federate.bits"),
        ("[federate]\njob = 'a'\nclient = 8", "did you mean clients"),
        ("[federate]\njob = 'a'\nalpha = 2.0", "alpha has no effect"),
        ("[federate]\njob = 'a'\ntold = 0.5", "told has no effect"),
        ("[federate]\njob = 'a'\nbits = [4, 3]", "2 values for parts of 10 rounds"),
        ("[federate]\njob = 'a'\ntells = 'gradients'\nrounds = 1\nbits = [4, 3]", "of 1 rounds"),
        ("[federate]\njob = 'a'\ntells = 'gradients'\nbits = [4, 20]", "federate.bits.1 = 20"),
        ("[federate]\njob = 'a'\ntells = 'gradients'\nbits = []", "a list of at least 1"),
        ("[federate]\njob = 'a'\ntells = 'gradients'\nsteps = 3", "steps is not for"),
        (f"[federate]\njob = 'a'\ntells = 'gradients'\n{PRIVACY}", 'not for tells = "gradients"'),
        (f"[federate]\njob = 'a'\ntells = 'fedavg'\n{PRIVACY}", 'not for tells = "fedavg"'),
        ("[federate]\njob = 'a'\n[train]\nsteps = 1", r"has \[train\]"),
        ("job = 3", "one table"),
    ],
)
def test_a_wrong_table_is_refused_in_a_sentence(tmp_path, text, words):
    file = tmp_path / "f.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        read_federate(file)


@pytest.mark.parametrize(("tells", "steps"), [("changes", 200), ("fedavg", 200), ("gradients", 10)])
def test_the_schedule_of_the_learning_rate_spans_all_rounds(tmp_path, tells, steps):
    file = tmp_path / "f.toml"
    file.write_text(f"[federate]\njob = 'a'\ntells = '{tells}'\nrounds = 10")
    assert read_federate(file).steps_of_job == steps


def test_bits_of_rounds_are_of_equal_parts_one_after_the_other():
    stated = {"bits": "6 4 3", "rounds": 7}
    assert [bits_of(stated, number) for number in range(9)] == [6, 6, 6, 6, 4, 4, 3, 3, 3]
    assert {bits_of({"bits": "4", "rounds": 7}, number) for number in range(9)} == {4}


def test_the_state_of_a_server_comes_back_in_the_order_of_names(tmp_path):
    assert read_state(tmp_path) is None
    shared = {f"{name}.weight": np.full(2, at, np.float32) for at, name in enumerate("zay")}
    line, own = {"round": 3, "is_summed": True}, {"0.step": torch.tensor(3.0)}
    write_state(tmp_path, State.of(line, {"limits": {"a": 0.5}}, shared, own))
    found = read_state(tmp_path)
    assert (found.round, found.line, found.settings) == (3, line, {"limits": {"a": 0.5}})
    assert list(found.shared) == ["a.weight", "y.weight", "z.weight"]
    assert all((each == shared[name]).all() for name, each in found.shared.items())
    assert found.own == own


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: raw[:-3], "is damaged"),
        (lambda raw: b"", "is damaged"),
        (lambda raw: raw.replace(b'round\\": 3', b'round\\": x'), "not valid JSON"),
        (lambda raw: raw.replace(b'round\\": 3', b'rounds\\":3'), "'round'"),
        (lambda raw: raw.replace(b'round\\": 3', b'round\\":[]'), "no number"),
    ],
)
def test_a_damaged_state_is_one_sentence(tmp_path, damage, words):
    write_state(tmp_path, State.of({"round": 3}, {}, {"a": np.ones(2, np.float32)}, {}))
    file = tmp_path / STATE_FILE
    before = file.read_bytes()
    file.write_bytes(damage(before))
    assert file.read_bytes() != before
    with pytest.raises(InputError, match=words) as caught:
        read_state(tmp_path)
    assert "put back a copy" in str(caught.value)


def test_a_state_of_another_version_is_not_gone_on_with(tmp_path):
    write_state(tmp_path, State.of({"round": 3}, {}, {"a": np.ones(2, np.float32)}, {}))
    file = tmp_path / STATE_FILE
    file.write_bytes(file.read_bytes().replace(b'"form":"2"', b'"form":"1"'))
    with pytest.raises(InputError, match=r"another version of Paceline.*give another --out"):
        read_state(tmp_path)


def test_at_least_three_take_part():
    assert Federate(job="a", clients=20, share=0.1).taking_part == 3
    assert Federate(job="a", clients=8).taking_part == 8


@pytest.mark.skipif(find_spec("flwr") is not None, reason="Flower is installed")
def test_a_sentence_says_that_flower_is_missing(tmp_path):
    with pytest.raises(InputError, match=r"pip install \"paceline\[federate\]\""):
        federate_command(tmp_path / "clients.toml", [], None, read_job)
