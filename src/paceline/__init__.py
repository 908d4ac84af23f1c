"""Paceline trains PyTorch models on many devices, and accounts for every millisecond and byte.

    import paceline
    run = paceline.train(job, model=my_module, loss=my_loss, data=my_dataset)

Names are loaded when they are first used, so that importing the package costs nothing.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from paceline.config.errors import InputError as InputError
    from paceline.config.job import Job as Job
    from paceline.config.job import JobSpec as JobSpec
    from paceline.config.layout import Layout as Layout
    from paceline.config.layout import LayoutSpec as LayoutSpec
    from paceline.observe.run import Run as Run
    from paceline.train.api import train as train
    from paceline.train.export import load as load

_HOMES = {
    "InputError": "paceline.config.errors",
    "Job": "paceline.config.job",
    "JobSpec": "paceline.config.job",
    "Layout": "paceline.config.layout",
    "LayoutSpec": "paceline.config.layout",
    "Run": "paceline.observe.run",
    "load": "paceline.train.export",
    "train": "paceline.train.api",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("paceline")
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
