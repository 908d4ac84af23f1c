"""What the server has between rounds, in a file: a federation that was stopped goes on with it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.files import parse_json, to_disk
from paceline.federate.shared_file import Tensors

STATE_FILE = "server.safetensors"
_SHARED = "shared/"  # begins the names of what all share; other tensors are the server's own
_PLAIN = TypeAdapter(dict[str, Any])
_FORM = "2"
"""Of settings: another one where what strategies keep in them changes."""


class State(NamedTuple):
    """After a round."""

    line: dict[str, Any]
    """Of rounds.jsonl."""
    settings: dict[str, Any]
    """Plain data, of the strategy."""
    tensors: dict[str, Tensor]
    """What is shared, and the strategy's own."""

    @classmethod
    def of(
        cls,
        line: dict[str, Any],
        settings: dict[str, Any],
        shared: Tensors,
        own: Mapping[str, Tensor],
    ) -> "State":
        """Of its parts."""
        named = {f"{_SHARED}{name}": torch.from_numpy(each) for name, each in shared.items()}
        return cls(line, settings, {**named, **own})

    @property
    def shared(self) -> Tensors:
        """What all share."""
        return {
            name.removeprefix(_SHARED): each.numpy()
            for name, each in self.tensors.items()
            if name.startswith(_SHARED)
        }

    @property
    def own(self) -> dict[str, Tensor]:
        """The strategy's."""
        return {name: each for name, each in self.tensors.items() if not name.startswith(_SHARED)}

    @property
    def round(self) -> int:
        """Number of the round."""
        found: int = self.line["round"]
        return found


def write_state(folder: Path, state: State) -> None:
    """Replace the state of a federation, at once."""
    file = folder / STATE_FILE
    partial = file.with_name(f".{file.name}")
    told = {
        "form": _FORM,
        "line": json.dumps(state.line),
        "settings": json.dumps(state.settings),
    }
    save_file({name: each.contiguous() for name, each in state.tensors.items()}, partial, told)
    to_disk(partial)
    partial.replace(file)


def read_state(folder: Path) -> State | None:
    """The state that a federation has; None: no round is over.

    Raises:
        InputError: the file is damaged, or of another version of Paceline.
    """
    file = folder / STATE_FILE
    if not file.exists():
        return None
    try:
        with safe_open(file, "pt") as opened:
            told = opened.metadata() or {}
            # In the order of their names, as `read_tensors` has them.
            tensors = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
        if "line" in told and told.get("form") != _FORM:
            raise InputError(
                f"{file} is of another version of Paceline, and this one can't go on with its "
                "rounds: give another --out."
            )
        line, settings = (parse_json(told[name], _PLAIN) for name in ("line", "settings"))
        if not isinstance(line["round"], int):
            raise ValueError(f"round {line['round']!r} is no number")
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise InputError(
            f"{file} is damaged ({error}): put back a copy, or remove {folder} to start over."
        ) from None
    return State(line, settings, tensors)
