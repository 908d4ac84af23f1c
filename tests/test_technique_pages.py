"""Pages on the network and on kernels: their tables are the generators', the formulas hold."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


GENERATORS = ("make_network_pages", "make_compression_page", "make_kernels_page")


@pytest.fixture
def generators(monkeypatch):
    """The modules, which find what they share beside them."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return {name: importlib.import_module(name) for name in GENERATORS}


@pytest.fixture
def made(generators):
    return generators["make_network_pages"]


@pytest.mark.parametrize("name", GENERATORS)
def test_the_pages_are_made_from_what_was_measured(name, generators):
    for page, text in generators[name].pages().items():
        assert page.read_text() == text, f"run: python docs/{name}.py"


def test_a_rate_keeps_the_share_it_was_asked_for(made):
    for meeting in made.MEETINGS:
        assert made.efficiency(meeting, made.rate_for(meeting, 0.95)) == pytest.approx(0.95)


def test_what_was_not_measured_is_said(made):
    assert made.NOT_YET in made.local_times_table([])
    cell = {"num_hosts": 2, "rate_bits_per_s": 1e7}
    row = {"way": "diloco", "form": "int4, every 150", "step_s": [1.0], "sent_bytes": 4.2e4}
    table = made.local_times_table([{**cell, "rows": [{**row, "efficiency": 0.96}]}])
    assert "| diloco, int4, every 150 | 2 | 10 Mbit/s | 1.000 | 0.042 | 96.0% |" in table
    assert made.overlap_table([]) == made.NOT_YET
