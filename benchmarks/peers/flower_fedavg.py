"""Flower's own recipe for LoRA: FedAvg of both matrices of all adapters in fp32.

What FlowerTune's example does: a client makes some steps of AdamW on all adapters and uploads them,
the server averages them by the clients' numbers of rows (`flwr.server.strategy.FedAvg`); the
learning rate falls by a cosine over the rounds. With `secagg` the messages go through Flower's
SecAgg+ as its own example sets it up; the shares of keys are those of all clients, so that it
survives what ours has to. Gradients come of the process that `paceline federate` has them from, so
the recipes alone differ.
"""

import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
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

from paceline.config.job import read_job
from paceline.federate import training_process
from paceline.federate.server_app import sent_bytes
from paceline.federate.server_optimizer import JOB_FILE
from paceline.federate.shared_file import FOUND, read_tensors, write_tensors
from paceline.observe.events import append_line
from paceline.train.learning_rates import learning_rate


class _Client(NumPyClient):
    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
        given = self._folder / "adapters"
        names = list(read_tensors(given))
        trained = [each.astype(np.float64) for each in parameters]
        adamw = _AdamW(trained, config["lr"])
        for step in range(self._steps):
            write_tensors(given, _by_name(names, trained))
            samples = training_process.compute((int(config["round"]) - 1) * self._steps + step)
            found = read_tensors(self._folder / FOUND).values()
            adamw.step([each.astype(np.float64) / samples for each in found])
        rows = len((self._folder / "data.jsonl").read_text().splitlines())
        return list(_by_name(names, trained).values()), rows, {}


class _AdamW:
    """With Paceline's defaults, with which all others train (https://arxiv.org/abs/1711.05101); in
    NumPy, since each message is answered by a process that would import torch first."""

    def __init__(self, trained: list[Any], lr: float) -> None:
        self._trained, self._lr, self._done = trained, lr, 0
        self._means = [(np.zeros_like(each), np.zeros_like(each)) for each in trained]

    def step(self, gradients: list[Any]) -> None:
        """Clip to a norm of 1, and step in place."""
        self._done += 1
        norm = math.sqrt(sum(float(np.square(each).sum()) for each in gradients))
        firsts, seconds = 1 - 0.9**self._done, 1 - 0.95**self._done
        for p, gradient, (m, v) in zip(self._trained, gradients, self._means, strict=True):
            clipped = gradient * min(1.0, 1.0 / (norm + 1e-6))
            m += 0.1 * (clipped - m)
            v += 0.05 * (np.square(clipped) - v)
            p -= self._lr * (0.1 * p + m / firsts / (np.sqrt(v / seconds) + 1e-8))


def _by_name(names: list[str], trained: list[Any]) -> dict[str, Any]:
    return {name: each.astype(np.float32) for name, each in zip(names, trained, strict=True)}


def _client_of(context: Context) -> Any:
    stated = context.run_config
    folder = Path(str(stated["folder"])) / "clients" / str(context.node_config["client"])
    return _Client(folder, int(stated["steps"])).to_client()


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
            on_fit_config_fn=self._config, initial_parameters=first,
        )  # fmt: skip
        self._optim = read_job(Path(stated["folder"]) / JOB_FILE, []).optim
        self._rounds = int(stated["rounds"])
        self.answered = 0

    def _config(self, number: int) -> dict[str, Any]:
        return {"round": number, "lr": learning_rate(self._optim, number - 1, self._rounds)}

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
