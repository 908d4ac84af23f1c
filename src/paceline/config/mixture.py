"""Sources of a mixture, the weights by which they are read, and sets of text to evaluate on."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.dedup import Dedup
from paceline.config.frozen import MOST, Auto, Count, FrozenConfig
from paceline.config.row_filter import FilterText
from paceline.config.urls import SourceNames

Format = Literal["text", "jsonl", "parquet", "arrow", "webdataset", "mds", "megatron", "tokens"]
Weight = Annotated[float, Field(ge=0, le=MOST)]
Epochs = Annotated[float, Field(gt=0, le=MOST)]


class EvalSet(FrozenConfig):
    """Text that is evaluated on and never trained on; all of it may be read."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """Its loss is `loss.<name>` in evaluations."""
    source: SourceNames
    """As `data.source`."""
    format: Auto | Format = "auto"
    """As `data.format`."""
    text_field: str = "text"
    """As `data.text_field`."""
    filter: FilterText = None
    """As `data.filter`."""
    dedup: Dedup = Dedup()
    """As `data.dedup`, within this source."""


class Source(EvalSet):
    """A part of a mixture: text with a name, and how often it is read."""

    weight: Weight | None = None
    """Its part of the samples, relative to the others' weights; 0: none, until a stage says so.
    Left out by all: as large as the source is (see `epochs`, `data.temperature`)."""
    epochs: Epochs | None = None
    """In place of weights: how often it is read while one that says nothing is read once."""
    max_epochs: Epochs | None = None
    """When it was read so often, its part goes to the others."""


class Stage(FrozenConfig):
    """Weights from a step on, in place of those before."""

    from_step: Count
    """Steps that are done when it begins."""
    weights: dict[str, Weight]
    """By source; 0 for those that it doesn't name."""
