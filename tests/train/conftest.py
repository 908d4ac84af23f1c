"""Settings for the tests of training."""

import pytest


@pytest.fixture
def as_if_alone(monkeypatch):
    """No launcher's ranks around a run in this process."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
