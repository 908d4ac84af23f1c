"""The main job: the loop and what it needs (data, optimizer, checkpoints, launching).

This package is also the function `paceline.train(job, model=..., loss=..., data=...)`: the verb and
the room have one name, and a submodule always wins over an attribute of its parent, so the module
itself is made callable.
"""

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from paceline.train.api import train

        return train(*arguments, **settings)


sys.modules[__name__].__class__ = _CallableModule
