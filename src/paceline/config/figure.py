"""Figure: one number that knows where it comes from."""

from typing import Literal

from pydantic import Field

from paceline.config.frozen import FrozenConfig

Origin = Literal["measured", "cited", "assumed"]


class Figure(FrozenConfig):
    """One number and where it comes from."""

    value: float = Field(ge=0, le=1e30)
    origin: Origin
    source: str
    """The document, or for a measured number where, when and by which command."""
