"""Every setting of a Job has an effect, or is refused in one sentence because it would have none.

Which settings are read is watched: the nouns tell who asks for which field while a Run is trained.
What plans and refuses may read anything; what counts is whether the rooms that execute do.
"""

import sys
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from paceline.config.errors import InputError
from paceline.config.frozen import FrozenConfig
from paceline.config.huggingface import from_hf
from paceline.config.job import Job, decided, read_job, to_toml
from paceline.config.layers import RopeScaling
from paceline.machine.discovery import this_machine
from paceline.observe.run import Run
from paceline.plan.resolve import resolve
from paceline.train.command import train_job
from tests.config.test_experts import QWEN_1_5_MOE
from tests.small_job import work_in, write_small_job

DLRM = """
name = "effects"
[model]
family = "dlrm"
tables = [50, 20]
dim = 4
num_dense = 3
[cluster]
devices_per_node = 1
[data]
source = "clicks"
[train]
steps = 4
global_batch = 8
"""
EXECUTE = (
    *("train", "elastic", "recommender", "parallel", "models", "comm", "machine", "kernels"),
    "observe",
)
"""Rooms that do what a Job says."""
# What the tiny Runs don't come to: settings that are read by name (`getattr`), in a process of its
# own, or only by the planner, whose answer they change.
ELSEWHERE = {
    "name": "names the Run's folder",
    "cluster": "checked against the machine, and what is planned",
    "model.family": "which network",
    "comm.timeout_s": "given to process groups, of which one rank has none",
    "comm.priority": "refused on a CPU",
    "checkpoint.keep_every": "asked for when a checkpoint is removed",
    "layout": "resolved and checked as a whole, see tests/config/test_feasible.py",
}


def leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, type[BaseModel]]]:
    """Dotted name, value and owner of every setting."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, type(section)


def others(owner: type[BaseModel], name: str, value: Any) -> list[Any]:
    """Other values of the setting, some of which are legal."""
    kinds = get_args(owner.model_fields[name].annotation)
    words = [word for word in kinds if isinstance(word, str)]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2, value / 2, value // 2 if isinstance(value, int) else value]
    if isinstance(value, tuple) and value and isinstance(value[0], float):
        return [[0.5 * each for each in value]]
    if value is None:
        return [3, "text.txt", {}]
    return [word for word in words if word != value] + ["other", "int8", True, 2]


def changed(job_file, name: str, value: Any) -> Job:
    return read_job(job_file, [f"{name}={_toml(value)}"])


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


_SECTIONS = ("model", "elastic", "finetune", "job_sections", "stream")
PROPERTIES = tuple(f"paceline.config.{name}" for name in _SECTIONS)


@pytest.mark.parametrize("family", ["decoder", "dlrm"])
def test_every_setting_is_read_by_what_executes_or_refused(tmp_path, monkeypatch, family):
    work_in(tmp_path, monkeypatch)
    job_file = write_small_job(tmp_path)
    if family == "dlrm":
        job_file.write_text(DLRM)
    job = read_job(job_file)
    read: set[tuple[str, str]] = set()
    plain = BaseModel.__getattribute__

    def watched(self: FrozenConfig, name: str) -> Any:
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") in (*PROPERTIES, __name__):
            frame = frame.f_back  # a property of what is read: who asks for that?
        room = frame.f_globals.get("__name__", "").split(".")
        if room[0] == "paceline" and len(room) > 1 and room[1] in EXECUTE:
            read.add((type(self).__name__, name))
        return plain(self, name)

    monkeypatch.setattr(FrozenConfig, "__getattribute__", watched, raising=False)
    train_job(job, Run(tmp_path / "runs" / job.name), fresh=False)
    monkeypatch.undo()
    silent = []
    for name, value, owner in leaves(job):
        if (owner.__name__, name.split(".")[-1]) in read:
            continue
        if any(name == each or name.startswith(f"{each}.") for each in ELSEWHERE):
            continue
        for other in others(owner, name.split(".")[-1], value):
            try:
                meant = changed(job_file, name, other)
                resolve(meant, this_machine().replace(devices_per_node=1))
            except InputError:
                continue
            if meant != job:
                silent.append(f"{name} = {other!r}")
    assert not silent, silent


@pytest.mark.parametrize(
    ("setting", "beside"),
    [
        ("comm.warmup_steps=3", ()),
        ("comm.warmup_steps=3", ("comm.local.method=diloco",)),
        ("comm.compress_from=9", ()),
        ("optim.rows.lr=0.1", ()),
        ("data.clicks.power=2", ()),
        ("observe.profile_steps=3", ()),
        ("observe.prometheus_host=0.0.0.0", ()),
        ("optim.final_lr_ratio=0.5", ("optim.schedule=constant",)),
        ("comm.fsdp.algorithm=ring", ("layout.fsdp=1", "layout.dp=2")),
    ],
)
def test_a_setting_alone_that_would_do_nothing_is_refused(tmp_path, setting, beside):
    job_file = write_small_job(tmp_path)
    machine = this_machine().replace(devices_per_node=2)
    with pytest.raises(InputError, match=rf"{setting.split('=')[0].split('.')[1]}.* has no effect"):
        resolve(read_job(job_file, ["cluster.devices_per_node=2", *beside, setting]), machine)


def test_what_the_planner_leaves_unused_reads_again(tmp_path):
    """A form that "auto" doesn't choose takes its exact steps along, in the Run's job.toml too."""
    job_file = write_small_job(tmp_path)
    asked = read_job(job_file, ["comm.dp.compress=auto", "comm.warmup_steps=3"])
    plan = resolve(asked, this_machine().replace(devices_per_node=1))
    assert plan.job.comm.dp.compress == "none"
    job_file.write_text(to_toml(plan.job))
    assert decided(read_job(job_file)) == plan.job


def test_growth_of_yarn_that_nothing_comes_of_is_refused():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_seq_len": 32}
    for more in ({"mscale": 0.7}, {"mscale": 0.7, "mscale_all_dim": 1.0, "attention_factor": 2.0}):
        with pytest.raises(InputError, match=r"mscale = 0\.7 has no effect"):
            RopeScaling.parse({**yarn, **more})
    assert RopeScaling.parse({**yarn, "mscale": 0.7, "mscale_all_dim": 1.0}).magnitude != 1.0


def test_a_loss_that_transformers_would_add_is_refused():
    with pytest.raises(InputError, match="output_router_logits = true"):
        from_hf({**QWEN_1_5_MOE, "output_router_logits": True})
    assert from_hf({**QWEN_1_5_MOE, "output_router_logits": False}).experts is not None
