"""Durations as a person writes them."""

import pytest

from paceline.config.duration import seconds_of
from paceline.config.errors import InputError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("15 min", 900), ("90s", 90), ("1.5 h", 5400), ("2 hours", 7200), ("30 days", 2_592_000)],
)
def test_times_are_read(text, seconds):
    assert seconds_of("--budget", text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0 min", "15", "-3 s", "10 weeks", "٣ s", "9" * 99])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(InputError, match=r"--older-than .* is no time"):
        seconds_of("--older-than", text)
