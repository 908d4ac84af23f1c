"""Write docs/jobs.md, the page of every setting, from the nouns' own docstrings."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from paceline.config.comm import Comm, DpComm, EmbeddingComm, EpComm, FsdpComm, LocalUpdates, PpComm
from paceline.config.dedup import Dedup
from paceline.config.elastic import Elastic
from paceline.config.hardware import ClusterSpec
from paceline.config.heads import Heads
from paceline.config.job_sections import Checkpoint, CustomModel, Data, Observe, Train
from paceline.config.layers import Experts, LatentAttention, RopeScaling
from paceline.config.layout import LayoutSpec
from paceline.config.mamba import Mamba2
from paceline.config.mixture import EvalSet, Source, Stage
from paceline.config.model import Model
from paceline.config.optim import Optim, ParameterGroup
from paceline.config.prices import Prices
from paceline.config.recommender import Clicks, Dlrm, RowOptim
from paceline.config.stream import Stream
from paceline.config.vision import EfficientNet, Images, ResNet

INTRODUCTION = """# Every setting of a Job

A Job is a TOML file with the sections below and a `name`; the Run is `runs/<name>`. Any setting can
be changed on the command line, `--set optim.lr=3e-4`, and `paceline train --show` prints the
concrete Job. `"auto"` is resolved before the run starts, by rules whose reasons stand in the Run's
plan.json. This page is made by `docs/make_jobs_page.py` from the code.
"""
SECTIONS = {
    "model": Model,
    "model.experts": Experts,
    "model.latent": LatentAttention,
    "model.rope_scaling": RopeScaling,
    'model, with family = "custom"': CustomModel,
    'model, with family = "dlrm"': Dlrm,
    'model, with family = "heads"': Heads,
    'model, with family = "mamba2"': Mamba2,
    'model, with family = "resnet"': ResNet,
    'model, with family = "efficientnet" (to plan)': EfficientNet,
    "cluster": ClusterSpec,
    "cluster.prices": Prices,
    "layout": LayoutSpec,
    "comm": Comm,
    "comm.dp": DpComm,
    "comm.fsdp": FsdpComm,
    "comm.pp": PpComm,
    "comm.ep": EpComm,
    "comm.embeddings": EmbeddingComm,
    "comm.local": LocalUpdates,
    "data": Data,
    "data.sources": Source,
    "data.stages": Stage,
    "data.eval_sets": EvalSet,
    "data.stream": Stream,
    "data.dedup": Dedup,
    "data.clicks": Clicks,
    "data.images": Images,
    "optim": Optim,
    "[optim.groups]": ParameterGroup,
    "optim.rows": RowOptim,
    "train": Train,
    "checkpoint": Checkpoint,
    "observe": Observe,
    "elastic": Elastic,
}


def page() -> str:
    """The whole page as Markdown."""
    return INTRODUCTION + "".join(_section(name, noun) for name, noun in SECTIONS.items())


def _section(name: str, noun: type[BaseModel]) -> str:
    title, _, rest = name.partition(",")
    rows = "".join(
        f"| `{key}` | {_default(field)} | {_cell(field.description or '')} |\n"
        for key, field in noun.model_fields.items()
    )
    head = "| setting | default | meaning |\n|---|---|---|\n"
    return (
        f"\n## [{title}]{',' if rest else ''}{rest}\n\n{_cell(noun.__doc__ or '')}\n\n{head}{rows}"
    )


def _default(field: Any) -> str:
    if field.default_factory is not None or isinstance(field.default, BaseModel):
        return "see there"
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "none"
    value = field.default
    return f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    Path(__file__).with_name("jobs.md").write_text(page())
