"""What tests of the planner's outputs share: a small Job on eight A100, and its answer."""

from functools import lru_cache
from typing import Any

from paceline.config.figure import Figure
from paceline.config.hardware import Cluster, device
from paceline.config.job import JobOnCluster, JobSpec
from paceline.config.prices import Prices
from paceline.plan.answer.answer import Answer
from paceline.plan.answer.find import answer

SMALL: dict[str, Any] = {
    "name": "small",
    "model": {
        "family": "decoder",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "ffn_size": 5632,
        "num_layers": 8,
        "num_heads": 16,
        "max_seq_len": 2048,
    },
    "train": {"steps": 1000, "global_batch": 64, "seq_len": 2048},
}
IMAGES: dict[str, Any] = {
    "name": "images",
    "model": {"family": "resnet"},
    "train": {"steps": 1000, "global_batch": 512},
}


def eight(name: str = "A100-80", **changes: Any) -> Cluster:
    """A node of eight devices of the catalogue."""
    return Cluster(device=device(name).replace(**changes), devices_per_node=8, num_nodes=1)


def cramped() -> Cluster:
    """Eight devices whose memory is too small for the small Job."""
    return eight(memory_bytes=Figure(value=1.5e9, origin="assumed", source="a test"))


def job(
    raw: dict[str, Any] | None = None, on: Cluster | None = None, **sections: Any
) -> JobOnCluster:
    """A Job on eight A100, with other sections where they are given."""
    return JobSpec.parse({**(raw or SMALL), **sections}).on(on or eight())


@lru_cache
def small_answer() -> Answer:
    """Of the small Job, once for all tests."""
    prices = Prices.parse({"usd_per_device_hour": 2.0, "usd_per_gb_month": 0.02})
    return answer(job(on=eight().replace(prices=prices)))
