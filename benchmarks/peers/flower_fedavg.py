"""Flower's own recipe for LoRA: FedAvg of both matrices of all adapters in fp32.

What FlowerTune's example does: a client trains all adapters and uploads them, the server averages
them by the clients' numbers of rows (`flwr.server.strategy.FedAvg`). With `secagg` the messages go
through Flower's SecAgg+ as its own example sets it up; the shares of keys are those of all clients,
so that it survives what ours has to. Training is the process that `paceline federate` starts, from
the same Job, so the recipes alone differ.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.client.numpy_client import NumPyClient
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.server_config import ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp

from paceline.federate.client_app import train_round
from paceline.federate.server_app import sent_bytes
from paceline.federate.shared_file import read_tensors, write_tensors
from paceline.observe.events import append_line


class _Client(NumPyClient):
    def __init__(self, folder: Path, cwd: str) -> None:
        self._folder, self._cwd = folder, cwd

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
        given = self._folder / "adapters"
        write_tensors(given, dict(zip(read_tensors(given), parameters, strict=True)))
        train_round(self._folder, self._cwd, int(config["round"]), "both")
        after = read_tensors(self._folder / f"round-{config['round']}")
        rows = len((self._folder / "data.jsonl").read_text().splitlines())
        return list(after.values()), rows, {}


def _client_of(context: Context) -> Any:
    stated = context.run_config
    folder = Path(str(stated["folder"])) / "clients" / str(context.node_config["client"])
    return _Client(folder, str(stated["cwd"])).to_client()


def _if_asked(message: Message, context: Context, call_next: Any) -> Message:
    if context.run_config["secagg"]:
        return secaggplus_mod(message, context, call_next)
    return call_next(message, context)


class _Strategy(FedAvg):
    """FedAvg that leaves the adapters of each round in the folder."""

    def __init__(self, stated: dict[str, Any]) -> None:
        self._folder = Path(stated["folder"]) / "adapters"
        self._names = list(read_tensors(self._folder))
        first = ndarrays_to_parameters(list(read_tensors(self._folder).values()))
        super().__init__(
            fraction_evaluate=0.0, min_available_clients=int(stated["clients"]),
            on_fit_config_fn=lambda number: {"round": number}, initial_parameters=first,
        )  # fmt: skip
        self.answered = 0

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        self.answered = len(results)
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        if parameters is not None:
            tensors = parameters_to_ndarrays(parameters)
            write_tensors(
                self._folder,
                {
                    name: each.astype("float32")
                    for name, each in zip(self._names, tensors, strict=True)
                },
            )
        return parameters, metrics


class _Counting:
    """A Grid that counts what clients sent."""

    def __init__(self, grid: Grid) -> None:
        self._grid, self.upload_bytes = grid, 0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        self.upload_bytes += sum(sent_bytes(each) for each in replies if not each.has_error())
        return replies


client = ClientApp(client_fn=_client_of, mods=[_if_asked])
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds; each leaves a line in rounds.jsonl."""
    stated = dict(context.run_config)
    strategy = _Strategy(stated)
    fit = DefaultWorkflow().fit_workflow
    if stated["secagg"]:
        fit = SecAggPlusWorkflow(1.0, 0.5, max_weight=float(stated["rows"]))
    number = 0

    def counted(grid: Grid, context: Context) -> None:
        nonlocal number
        number += 1
        counting, began = _Counting(grid), time.monotonic()
        fit(counting, context)
        line = {
            "round": number, "answered": strategy.answered, "upload_bytes": counting.upload_bytes,
            "seconds": round(time.monotonic() - began, 3),
        }  # fmt: skip
        append_line(Path(stated["folder"]) / "rounds.jsonl", json.dumps(line).encode() + b"\n")

    config = ServerConfig(num_rounds=int(stated["rounds"]))
    legacy = LegacyContext(context=context, config=config, strategy=strategy)
    DefaultWorkflow(fit_workflow=counted)(grid, legacy)
