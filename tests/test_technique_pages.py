"""The pages on local updates and overlap: their tables are the generator's, its formulas hold."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("made", ROOT / "docs/make_network_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_made_from_what_was_measured(made):
    for page, text in made.pages().items():
        assert page.read_text() == text, "run: python docs/make_network_pages.py"


def test_links_of_the_pages_lead_somewhere(made):
    for page in made.pages():
        targets = [part.split(")")[0] for part in page.read_text().split("](")[1:]]
        assert targets
        assert all((page.parent / target).exists() for target in targets)


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
