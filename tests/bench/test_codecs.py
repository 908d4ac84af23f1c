"""Rates of codecs: curves with a clock that knows (pure), and what the command writes of them."""

from pathlib import Path

import pytest
from torch import Tensor

from paceline.bench import codecs, command, measure
from paceline.bench.clock import RankTimer
from paceline.bench.command import bench_command
from paceline.bench.measure import BenchResult
from paceline.bench.rank_pool import TellProgress
from paceline.comm.rendezvous import Ranks
from paceline.config.job import read_cluster, read_job
from tests.bench.test_device import TINY, Knowing

SIZES = (300, 70_000)


def test_every_codec_has_a_whole_curve():
    said: list[str] = []
    curves = codecs.measure_codecs(Knowing(Ranks()), SIZES, "a test", said.append)
    assert tuple(curves) == tuple(said) == codecs.NAMES
    for curve in curves.values():
        assert curve.values == SIZES
        assert curve.encode == curve.decode == (1e-3, 1e-3)
        assert curve.source == "a test"


def test_what_is_timed_is_what_a_reduction_does(monkeypatch: pytest.MonkeyPatch):
    done = []

    class Watched:
        def num_bytes(self, num_values: int) -> int:
            return num_values

        def encode(self, values: Tensor, payload: Tensor) -> None:
            """So that there is something to decode."""

        def encode_with_error(self, values: Tensor, error: Tensor, payload: Tensor) -> None:
            done.append(("encode", len(values), len(error), len(payload)))

        def decode(self, payload: Tensor, values: Tensor, *, add: bool) -> None:
            done.append(("decode", len(values), add, len(payload)))

    monkeypatch.setattr(codecs, "codec_of", lambda _codec: Watched())
    monkeypatch.setattr(codecs, "NAMES", ("int8",))
    codecs.measure_codecs(Knowing(Ranks()), (1 << 20,), "a test", lambda _name: None)
    assert done == [("encode", 1 << 20, 1 << 20, 1 << 20), ("decode", 1 << 20, True, 1 << 20)]


def test_codecs_complete_a_cluster_and_stay_when_the_device_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def here(_num_ranks: int, _kind: str, work: object, hear: TellProgress) -> BenchResult:
        return work(Ranks(), hear)  # type: ignore[operator]

    monkeypatch.setattr(command, "run_on_ranks", here)
    monkeypatch.setattr(codecs, "sizes_of", lambda _kind, quick: SIZES)
    monkeypatch.setattr(measure, "grid_of", lambda _kind, quick: TINY)
    monkeypatch.setattr(
        measure.BenchRequest, "clock", lambda self, ranks: RankTimer(ranks, 1e-4, 1)
    )
    out = tmp_path / "cluster.toml"
    bench_command(out, num_ranks=1, quick=True, only=["codecs"])
    device = read_cluster(out).device
    assert read_job(None, [f"cluster.file={out}"]).cluster.device == device
    assert device.curves is None  # a catalogue's curves are not hidden by these
    assert all(0 < seconds < 10 for seconds in device.codecs["int8"].encode)
    assert "paceline" in device.codecs["int8"].source or "torch" in device.codecs["int8"].source
    assert "codec topk:0.01" in capsys.readouterr().out
    bench_command(out, num_ranks=1, quick=True, only=["device"])
    again = read_cluster(out).device
    assert again.curves is not None
    assert again.codecs == device.codecs
