"""Settings for every test."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import settings

from tests.ranks import keep_one_thread

# Kernels are tested with torch's deterministic mode on, which cuBLAS needs to be told beforehand.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if not torch.cuda.is_available():
    # Before anything imports Triton: then its kernels run on the CPU, in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No test waits for this machine's speed to be measured, or depends on what it was, unasked.
os.environ.setdefault("PACELINE_MEASURE", "off")

keep_one_thread()

# How long an example takes depends on what else the machine does.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")

# Unix time after which no test begins: what a slow machine has no time for in CI is skipped.
UNTIL = float(os.environ.get("PACELINE_TESTS_UNTIL", "inf"))

# Two workers share the files. First those of rooms whose tests are many and short: they are half of
# all, so a slow machine misses few. Then the longest, so that neither worker has long to do when
# the other is through; and files that need `networks_alone` apart, so that none waits for another
# one. Then what is most missed where time is short.
SHORT = (
    "config",
    "render",
    "observe",
    "explain",
    "doctor",
    "published",
    "kernels",
    "models",
    "plan",
    "test_damaged_files",
    "test_names",
    "test_private_torch",
)
LONGEST = (
    "test_combinations",
    "test_netlab_cut",
    "test_security_hosts",
    "test_rehearsal",
    "test_documents",
    "test_netlab_workers",
    "test_resume",
    "test_faults",
    "test_tp",
    "test_reshard",
    "test_security",
    "test_trainer",
    "test_compressed_shards",
    "test_compressed_replicas",
    "test_export",
    "test_resnet",
    "test_dlrm",
    "test_bad_input",
)
MOST_MISSED = ("train", "parallel", "comm", "elastic")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files."""
    place = {name: at for at, name in enumerate((*SHORT, *LONGEST, *MOST_MISSED))}

    def key(item: pytest.Item) -> int:
        return min(place.get(name, len(place)) for name in (item.path.stem, item.path.parent.name))

    items.sort(key=key)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin no test after the time."""
    if time.time() > UNTIL:
        pytest.skip("no time was left for it on this machine (PACELINE_TESTS_UNTIL)")


@pytest.fixture(autouse=True)
def environment_put_back() -> Iterator[None]:
    """What a test leaves in the environment would reach the programs that later tests start."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="module")
def networks_alone() -> Iterator[None]:
    """Networks of namespaces are the machine's: with several workers, modules take turns."""
    with FileLock(Path(tempfile.gettempdir()) / "paceline-tests-networks.lock"):
        yield


@pytest.fixture(scope="session")
def browser(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Opens a page, headless, with more options of chromium's, and what follows its address."""
    names = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
    binary = next(filter(None, map(shutil.which, names)), None)
    if binary is None:
        pytest.skip("no chromium or chrome on this machine")
    profile = tmp_path_factory.mktemp("browser")
    quiet = "--disable-quic --no-first-run --disable-background-networking --disable-sync"
    flags = f"--headless --no-sandbox --disable-gpu --disable-component-update {quiet}".split()

    def open_page(page: Path, *options: str, query: str = "") -> subprocess.CompletedProcess[str]:
        command = [binary, *flags, f"--user-data-dir={profile}", "--enable-logging=stderr"]
        command += ["--window-size=1280,2400", "--virtual-time-budget=5000", *options]
        return subprocess.run(
            [*command, page.as_uri() + query],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )

    return open_page
