"""A rank that is at work for longer than the others, step after step, says so itself, once."""

import pytest

from paceline.train.generations import LinkWatch


class _Link:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def tell(self, kind: str, **fields: str) -> None:
        if kind != "joined":
            self.told.append((kind, fields["text"]))

    def at(self, step: int) -> None:
        pass


@pytest.mark.parametrize(("own_s", "is_slow"), [(0.2, True), (0.14, False)])
def test_a_rank_that_is_slow_for_many_steps_says_so_once(own_s, is_slow):
    link = _Link()
    watch = LinkWatch(link)
    for _ in range(49):
        watch.compare([0.1, own_s, 0.1], 1)
    assert link.told == []
    for _ in range(60):
        watch.compare([0.1, own_s, 0.1], 1)
    assert len(link.told) == is_slow
    if is_slow:
        kind, text = link.told[0]
        assert kind == "slow"
        for part in ("rank 1", "0.2 s", "50 steps", "0.1 s"):
            assert part in text


def test_steps_of_an_earlier_generation_do_not_count():
    link = _Link()
    watch = LinkWatch(link)
    for _ in range(40):
        watch.compare([0.1, 0.1, 0.9], 2)
    watch.joined(40, None)
    for _ in range(40):
        watch.compare([0.1, 0.1, 0.9], 2)
    assert link.told == []
