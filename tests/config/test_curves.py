"""Curves as data and the catalogue's files of them (pure; one process that imports).

The rates that are read off them are tested in `tests/plan/test_rates.py`.
"""

import json
import subprocess
import sys
from importlib import resources

import numpy as np
import pytest

from paceline.config.catalogue.curves import MEASURED, RELATIVES, catalogue_curves
from paceline.config.curves import AttentionCurve, MatmulCurve, MemoryCurve
from paceline.config.errors import InputError
from paceline.config.hardware import CATALOGUE

FOLDER = resources.files("paceline.config.catalogue")


def test_a_curve_has_as_many_values_as_sizes():
    sizes = {"m": (1, 2), "n": (4,), "k": (8, 16)}
    MatmulCurve.parse({**sizes, "share": (0.1, 0.2, 0.3, 0.4), "source": "here"})
    with pytest.raises(InputError, match="a curve over 4 sizes has 3 values; give as many"):
        MatmulCurve.parse({**sizes, "share": (0.1, 0.2, 0.3), "source": "here"})
    with pytest.raises(InputError, match="all above 0"):
        MemoryCurve.parse({"bytes": (1, 2), "seconds": (1e-6, 0), "source": "here"})


def test_sizes_increase():
    sizes = {"head_dim": (64,), "forward": (0.5, 0.5), "backward": (0.5, 0.5), "source": "here"}
    with pytest.raises(InputError, match="must be positive and increasing; sort them"):
        AttentionCurve.parse({"seq_len": (2048, 1024), **sizes})


def test_importing_the_hardware_reads_no_file_of_curves():
    program = (
        "import sys; opened = []\n"
        "sys.addaudithook(lambda event, given: event == 'open' and opened.append(str(given[0])))\n"
        "import paceline.config.hardware, paceline.plan.rates\n"
        "files = [path for path in opened if path.endswith('.json')]\n"
        "sys.exit(f'opened {files}' if files else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_device_with_a_peak_has_curves_of_its_own_or_of_a_relative():
    assert set(MEASURED) | set(RELATIVES) <= set(CATALOGUE)
    assert not set(MEASURED) & set(RELATIVES)
    assert all(catalogue_curves(name) is not None for name in CATALOGUE)
    assert all(relative.name in MEASURED for relative in RELATIVES.values())
    assert catalogue_curves("not a device") is None


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_a_file_is_small_and_says_where_it_is_from(name):
    text = FOLDER.joinpath(f"{name}.json").read_text("utf-8")
    assert len(text) <= 60_000
    origin = json.loads(text)["origin"]
    assert origin["package"].startswith("aiconfigurator-core ")
    assert "Apache-2.0" in origin["licence"]


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_measured_curves_are_physical(name):
    curves = catalogue_curves(name).curves
    assert set(curves.matmul) >= {"bf16"} | ({"fp8"} - ({"fp8"} if name == "A100-80" else set()))
    for precision, curve in curves.matmul.items():
        peak = CATALOGUE[name].peak_flops[precision].value
        sizes = [np.array(axis) for axis in (curve.m, curve.n, curve.k)]
        share = np.array(curve.share).reshape([len(axis) for axis in sizes])
        seconds = 2 * np.einsum("i,j,k->ijk", *sizes) / (share * peak)
        # Files keep three digits, so that a tie may look like a step down of half a per cent.
        assert all((np.diff(np.log(seconds), axis=axis) >= -0.01).all() for axis in range(3))
        assert 1e-6 < seconds.min() < 20e-6
        # Published best shapes: 0.87 (A100), 0.80 (H100), 0.78 (B200) of the peak, in bf16.
        assert {"bf16": 0.7, "fp8": 0.55, "fp4": 0.35}[precision] < share.max() <= 1.0
        assert curve.source.startswith("measured: tables of ")


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_attention_curves_are_physical_and_say_what_is_assumed(name):
    known = catalogue_curves(name).curves.attention
    for backend, curve in known.items():
        forward, backward = np.array(curve.forward), np.array(curve.backward)
        assert ((backward > 0) & (backward <= forward) & (forward < 0.8)).all()
        by_length = forward.reshape(len(curve.seq_len), -1)
        assert (np.diff(by_length, axis=0) >= 0).all()
        assert "assumed" in curve.source
        if backend == "flash3":
            older = known["flash"]
            slower = np.array(older.forward).reshape(len(older.seq_len), -1)
            assert (
                slower[:, older.head_dim.index(128)] < by_length[:, curve.head_dim.index(128)]
            ).all()
    # FlashAttention-2's paper: up to 73 % of an A100; on Hopper 35 % (FlashAttention-3's paper).
    longest = known["flash"].forward[-3]
    assert {"A100-80": 0.55, "H100-SXM": 0.3}.get(name, 0.1) < longest < 0.73


def test_a_relative_gives_its_shares_by_name_and_with_a_reason():
    borrowed = catalogue_curves("V100")
    assert borrowed.curves is catalogue_curves("A100-80").curves
    assert borrowed.assumed == "assumed: 1 x the shares of A100-80, the next generation"
    assert catalogue_curves("A100-80").assumed == ""


def test_a_device_that_is_no_gpu_has_no_tiles_of_one():
    curves = catalogue_curves("TPUv5p").curves
    assert curves.num_processors is None
    assert curves.matmul["bf16"].tile is None
    assert catalogue_curves("A100-80").curves.matmul["bf16"].tile == (128, 256)
