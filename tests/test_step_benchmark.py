"""benchmarks/step.py: its Jobs are Jobs, and its figures are the Run's."""

import pytest
import tomli_w

from benchmarks import step
from paceline.config.hardware import Cluster, device
from paceline.config.job import read_job
from paceline.plan.search.choose import plan_job

LINES = [
    {
        "step": number, "step_time_s": seconds, "tokens_per_s": 8 / seconds, "memory_bytes": number,
        "profiled": number == 6, "terms": {"matmul": 0.5, "host_gap": 0.1 * number},
    }
    for number, seconds in enumerate((9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 50.0), 1)
]  # fmt: skip


def test_figures_are_of_warm_steps_and_terms_of_profiled_ones():
    figures = step.figures_of([*LINES, {"eval": 1}], {"layouts": [{"step_s": 1.5}]})
    assert figures["step_s"] == 2.0
    assert figures["tokens_per_s"] == 4.0
    assert figures["memory_bytes"] == 7
    assert figures["terms"] == pytest.approx({"matmul": 0.5, "host_gap": 0.6})
    assert figures["predicted_s"] == 1.5
    assert step.figures_of(LINES, {"layouts": []})["predicted_s"] is None


@pytest.mark.parametrize("variant", step.ON_CUDA, ids=str)
@pytest.mark.parametrize("name", ["1b", "3b"])
def test_every_variant_can_be_planned_for_one_h200(name, variant, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps(step.job_of(name, variant, 16)))
    cluster = Cluster(device=device("H200"), num_nodes=1, devices_per_node=1)
    plan = plan_job(read_job(path), cluster)
    assert plan.job.layout.kernels == variant.kernels
    assert plan.ranked[0].memory[0].total_bytes < 141e9


def test_mfu_counts_attention_whole_and_by_half():
    run = step.figures_of(LINES, {"layouts": []})
    row = step._row("1b", step.ON_CUDA[0], [run, run], device("H200"))
    assert 0 < row["mfu"]["half"] < row["mfu"]["full"]
    text = step._page([row], {
        "cores": 1, "device": "a", "load_average_before": [0.0], "date": "", "commit": "",
        "versions": {"torch": ""}, "command": "",
    })  # fmt: skip
    assert "| 1b | bf16 reference eager | 4 |" in text
    assert "| host_gap | matmul |" in text
