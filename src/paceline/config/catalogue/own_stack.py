"""Our own runtime before it was measured: constants and error from stacks like it on GPUs.

The file is made by `tools/derive_own_stack.py` from published steps of torchtitan and torchao.
"""

import functools
import json
from importlib import resources
from typing import Any

from paceline.config.stack import Stack


def own_stack(kind: str) -> Stack:
    """Our runtime on devices of this kind. CPUs are measured where they are used (`bench`).

    Devices that are no GPUs are assumed to be no better known: its pace on them is that on GPUs.
    """
    if kind == "cpu":
        return Stack()
    found = _derived()
    return Stack(constants=found["constants"], origin=found["origin"])


def error_of(stack: Stack) -> float | None:
    """How far four of five steps of each source were from the prediction by the other sources', as
    a share; None where the constants are others.
    """
    found = _derived()
    return float(found["error"]) if stack.origin == found["origin"] else None


@functools.cache
def _derived() -> Any:
    file = resources.files("paceline.config.catalogue").joinpath("own_stack.json")
    return json.loads(file.read_text())
