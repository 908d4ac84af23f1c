"""`paceline search --on SITE`: trials that are launched come to what trials in this process do."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w

from paceline.config.job import to_raw
from paceline.launch.records import launches_of
from tests.command_line import paceline
from tests.launch.beds import slurm_laboratory
from tests.search.test_search import HERE, told, write_space

pytest.importorskip("optuna")


@pytest.fixture
def slurm() -> Iterator[None]:
    with slurm_laboratory():
        yield


def searched(folder: Path, *arguments: str) -> dict[str, object]:
    done = paceline("search", "space.toml", "--json", *arguments, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def compared(folder: Path, site: str) -> None:
    """Both have the same trials with the same losses, and each rung is a launch."""
    write_space(folder)
    (folder / "paceline-sites.toml").write_text(site)
    here = searched(folder, "--out", "here")
    there = searched(folder, "--out", "there", "--on", "queue")
    assert told(there) == told(here)
    assert there["refused"] == here["refused"]
    for trial in there["trials"]:
        launches = launches_of(folder / "there" / "trials" / f"{trial['number']:04}")
        assert 1 <= len(launches) <= len(trial["rungs"])  # one that was faster needs no other
        assert all(one.observe().state not in ("queued", "running") for one in launches)
    assert told(searched(folder, "--out", "there", "--on", "queue")) == told(here)
    refused = paceline("search", "space.toml", "--out", "there", folder=folder)
    assert refused.returncode == 2
    assert "on.site = queue, which is here now" in refused.stderr


def test_trials_on_this_machines_queue(tmp_path):
    compared(tmp_path, '[queue]\nengine = "local"\n')


def test_trials_on_slurm(tmp_path, slurm):
    (tmp_path / "node.toml").write_text(tomli_w.dumps(to_raw(HERE)))
    kind = f'{{cluster = "{tmp_path}/node.toml", num_nodes = 2}}'
    compared(
        tmp_path,
        f'[queue]\nengine = "slurm"\npartition = "main"\nnode_types.cpu = {kind}\n',
    )


def test_a_site_that_is_not_there_is_one_sentence(tmp_path):
    write_space(tmp_path)
    done = paceline("search", "space.toml", "--on", "nowhere", folder=tmp_path)
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    assert not (tmp_path / "searches").exists()
