"""A few rounds of drawn requests; `python -m benchmarks.serve.fuzz` does as many as one likes."""

from collections import Counter

import pytest

from tests.generate.fuzzed import run_round


@pytest.mark.parametrize("part", range(3))
def test_drawn_requests_get_what_each_alone_gets(part, tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    counts = Counter()
    for number in range(4):
        counts += run_round(f"suite/{part}/{number}", 20, tmp_path)
    assert counts["requests, all"] == 80
    assert counts["tokens"] > 200
    assert not list(tmp_path.iterdir())
