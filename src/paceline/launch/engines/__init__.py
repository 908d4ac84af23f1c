"""Engines, one module each, by the name that a site gives them; loaded when they are asked for."""

from importlib import import_module

from paceline.config.site import EngineName
from paceline.launch.contract import Engine


def engine_named(name: EngineName) -> Engine:
    """The engine of a name: `engine()` of its module."""
    made: Engine = import_module(f"{__name__}.{name}").engine()
    return made
