"""The client's end: Flower's ClientApp, which asks a process to train (`training_process`).

Around Flower's SecAgg+ (`secaggplus_mod`) stands `_pack`: of the masked numbers, which Flower sends
as 8 bytes each, it leaves the bits that they have.
"""

from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from flwr.compat.client.numpy_client import NumPyClient

from paceline.federate import training_process
from paceline.federate.grid import Floats, Ints, on_grid
from paceline.federate.privacy import on_grid_within
from paceline.federate.rounds import Factor, bits_of, form_of, with_size
from paceline.federate.scale import Scale
from paceline.federate.shared_file import (
    FOUND,
    Tensors,
    read_tensors,
    trained_names,
    vector_of,
    write_tensors,
)
from paceline.federate.telling import Telling


class _Client(NumPyClient):
    """One that has its part of the data in a folder."""

    def __init__(self, folder: Path, stated: dict[str, Any], node: int) -> None:
        self._folder, self._stated, self._node = folder, stated, node

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
        """Take what is shared, and tell what this client makes of it: whole numbers, (m,)."""
        given = self._folder / str(self._stated["shares"])
        names = read_tensors(given, trained_names(Path(self._stated["folder"])))
        before = dict(zip(names, parameters, strict=True))
        write_tensors(given, before)
        told = self._change if self._stated["tells"] == "changes" else self._told
        return [told(before, int(config["round"]), config).astype(np.float64)], 1, {}

    def _change(self, before: Tensors, number: int, config: dict[str, Any]) -> Ints:
        """What some steps come to, with its size unless there is privacy.

        What is left out stays here until the same is told again.
        """
        factor: Factor = config["factor"]
        samples = training_process.compute(number, int(self._stated["steps"]), factor)
        change = vector_of(read_tensors(self._folder / FOUND, before), factor) / samples
        kept = self._folder / f"error-{factor}.npy"
        if kept.exists():
            change += np.load(kept)
        _must_be_finite(change, number)
        limit, stream = config["limit"], np.random.default_rng()
        bits, clip = bits_of(self._stated, number), float(self._stated["clip"])
        if clip:
            values, error = on_grid_within(change, limit, bits, clip, stream)
        else:
            values, error = on_grid(with_size(change, limit), limit, bits, stream)
        np.save(kept, error[: len(change)])
        return values

    def _told(self, before: Tensors, number: int, config: dict[str, Any]) -> Ints:
        """A gradient, or what some steps come to; round 0 tells its sizes alone."""
        num_steps = int(self._stated["steps"]) if self._stated["tells"] == "fedavg" else 0
        samples = training_process.compute(number, num_steps)
        found = vector_of(read_tensors(self._folder / FOUND, before), "all")
        _must_be_finite(found, number)
        scale = Scale.of_json(config["scale"])
        telling = Telling.of_round(self._stated, before, number, scale)
        telling.must_have(config["mark"])
        told = telling.told(found, samples, self._node)
        np.save(self._folder / "told.npy", told.meant)
        return told.values


def _must_be_finite(found: Floats, number: int) -> None:
    if not np.isfinite(found).all():
        raise ValueError(f"round {number} came to numbers that are not finite")


def _pack(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    reply = call_next(message, context)
    records = reply.content.config_records if reply.has_content() else {}
    if Key.MASKED_PARAMETERS in (answer := records.get(RECORD_KEY_CONFIGS, {})):
        values = np.concatenate([bytes_to_ndarray(raw) for raw in answer[Key.MASKED_PARAMETERS]])
        number = int(message.content.config_records["fitins.config"]["round"])
        form = form_of(context.run_config, number, len(values))
        answer[Key.MASKED_PARAMETERS] = [form.packed(values)]
    return reply


def _client_of(context: Context) -> Any:
    folder = Path(str(context.run_config["folder"])) / "clients"
    folder = folder / str(context.node_config["client"])
    client = _Client(folder, dict(context.run_config), context.node_id)
    return client.to_client()


app = ClientApp(client_fn=_client_of, mods=[_pack, secaggplus_mod])
