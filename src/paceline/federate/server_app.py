"""The server's end: Flower's ServerApp, which asks for changes and learns their sum.

SecAgg+ is Flower's. `_Unpacking` gives it the masked numbers in the form that it knows, and counts
what clients sent. `_Rounds` is its workflow, for which whoever is gone before keys are shared has
never been there; left as it is, it would ask others for their shares and end the round.
"""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.common import (
    FitIns,
    FitRes,
    ndarray_to_bytes,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.server_config import ServerConfig
from flwr.server.strategy import Strategy
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from paceline.federate.grid import half_of, modulus_bits, unpacked
from paceline.federate.privacy import epsilon_of, noisy_mean
from paceline.federate.rounds import TOLD, Factor, factor_of, limit_of_norm, next_limit
from paceline.federate.shared_file import (
    plus,
    read_tensors,
    trained_names,
    vector_of,
    write_tensors,
)
from paceline.observe.events import append_line
from paceline.train.stopping import exit_with_parent

app = ServerApp()


class _Changes(Strategy):
    """Sums changes of what is shared, which are the global parameters."""

    def __init__(self, stated: dict[str, Any]) -> None:
        self._stated = stated
        self._shared = Path(stated["folder"]) / stated["shares"]
        self._clip, self._noise = float(stated["clip"]), float(stated["noise"])
        factors = {factor_of(number, stated["shares"]) for number in (1, 2)}
        self._limits: dict[Factor, float] = dict.fromkeys(factors, float(stated["limit"]))
        self.tensors = read_tensors(self._shared, trained_names(self._shared.parent))
        if self._clip:
            self._limits = {
                each: limit_of_norm(self._clip, len(vector_of(self.tensors, each)))
                for each in self._limits
            }
        self.asked = self.answered = self.num_summed = 0
        self.is_summed = False

    def initialize_parameters(self, client_manager: Any) -> Any:
        """What the folder has."""
        return ndarrays_to_parameters(list(self.tensors.values()))

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        """Whom to ask, and what.

        The first round waits until everybody is there.
        """
        if server_round == 1:
            client_manager.wait_for(int(self._stated["clients"]), self._stated["timeout"])
        number = min(int(self._stated["taking-part"]), client_manager.num_available())
        self.asked, self.answered, self.is_summed = number, 0, False
        if number < 3:
            return []
        factor = factor_of(server_round, self._stated["shares"])
        config = {"round": server_round, "factor": factor, "limit": self._limits[factor]}
        clients = client_manager.sample(number)
        return [(client, FitIns(parameters, config)) for client in clients]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[Any, FitRes]], failures: Any
    ) -> Any:
        """Add the mean change; each result holds it, and nobody's own."""
        self.answered = len(results)
        if self.answered < self._stated["least"] * self.asked:
            return None, {}
        factor = factor_of(server_round, self._stated["shares"])
        limit = self._limits[factor]
        [mean] = parameters_to_ndarrays(results[0][1].parameters)
        mean = mean * (limit / half_of(int(self._stated["bits"])))
        if self._clip:
            stream = np.random.default_rng()
            mean = noisy_mean(mean, self.answered, self._noise, self._clip, stream)
        else:
            mean, sizes = mean[:-TOLD], mean[-TOLD:]
            self._limits[factor] = next_limit(limit, float(sizes.mean()))
        self.tensors = plus(self.tensors, factor, mean)
        write_tensors(self._shared, self.tensors)
        self.is_summed = True
        self.num_summed += 1
        return ndarrays_to_parameters(list(self.tensors.values())), {}

    def size_of(self, factor: Factor) -> int:
        """Numbers of a change."""
        return len(vector_of(self.tensors, factor))

    def told_of(self, factor: Factor) -> int:
        """Numbers that a client tells."""
        return self.size_of(factor) + (0 if self._clip else TOLD)

    def privacy(self) -> dict[str, float]:
        """What the rounds so far tell of a client at most; nothing without noise."""
        if not self._clip:
            return {}
        delta = float(self._stated["delta"])
        found = epsilon_of(self._noise, delta, self.num_summed)
        return {"clip": self._clip, "noise": self._noise, "epsilon": found, "delta": delta}

    def limit_of(self, factor: Factor) -> float:
        """The range of the next change."""
        return self._limits[factor]

    def evaluate(self, server_round: int, parameters: Any) -> None:
        """Nothing: clients hold the data."""

    def configure_evaluate(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        """Nobody is asked."""
        return []

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
        """Nobody was asked."""
        return None, {}


class _Rounds(SecAggPlusWorkflow):
    def setup_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        return super().setup_stage(grid, context, state) and _forget_gone(state)

    def share_keys_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        return super().share_keys_stage(grid, context, state) and _forget_gone(state)


def _forget_gone(state: Any) -> bool:
    state.sampled_node_ids = set(state.active_node_ids)
    state.nid_to_neighbours = {
        node: neighbours & state.active_node_ids
        for node, neighbours in state.nid_to_neighbours.items()
    }
    return True


def sent_bytes(message: Message) -> int:
    """Bytes of a message as Flower sends it: all objects that it consists of."""
    return sum(len(each.deflate()) for each in get_all_nested_objects(message).values())


class _Unpacking:
    """A Grid whose replies hold masked numbers as arrays.

    Args:
        grid: Flower's.
        bits: of a masked number.
        count: of them, without the factor that Flower puts before them.
    """

    def __init__(self, grid: Grid, bits: int, count: int) -> None:
        self._grid, self._bits, self._count = grid, bits, count
        self.upload_bytes = 0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """As `Grid.send_and_receive`; a reply of another length counts as none."""
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        return [reply for reply in replies if reply.has_error() or self._unpack(reply)]

    def _unpack(self, reply: Message) -> bool:
        self.upload_bytes += sent_bytes(reply)
        answer = reply.content.config_records[RECORD_KEY_CONFIGS]
        if Key.MASKED_PARAMETERS in answer:
            try:
                [raw] = answer[Key.MASKED_PARAMETERS]
                values = unpacked(raw, self._bits, 1 + self._count)
            except (TypeError, ValueError):
                return False
            parts = [ndarray_to_bytes(each) for each in (values[:1], values[1:])]
            answer[Key.MASKED_PARAMETERS] = parts
        return True


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds; each leaves a line in rounds.jsonl."""
    exit_with_parent(os.getppid())  # Flower's own would ask a lost SuperLink for minutes
    stated = dict(context.run_config)
    strategy = _Changes(stated)
    bits, taking_part = int(stated["bits"]), int(stated["taking-part"])
    masked_bits = modulus_bits(bits, taking_part)
    number = 0

    def fit(grid: Grid, context: Context) -> None:
        nonlocal number
        number += 1
        factor, began = factor_of(number, stated["shares"]), time.monotonic()
        limit = strategy.limit_of(factor)
        unpacking = _Unpacking(grid, masked_bits, strategy.told_of(factor))
        _Rounds(
            1.0, float(stated["least"]),
            max_weight=1.0,
            # A value is moved to 0 ... 2 * half and neither scaled nor rounded: it is on the grid.
            clipping_range=float(half_of(bits)), quantization_range=2 * half_of(bits),
            modulus_range=2**masked_bits, timeout=float(stated["timeout"]),
        )(unpacking, context)  # fmt: skip
        line = {
            "round": number,
            "factor": factor,
            "limit": limit,
            "asked": strategy.asked,
            "answered": strategy.answered,
            "is_summed": strategy.is_summed,
            "numbers": strategy.size_of(factor),
            "upload_bytes": unpacking.upload_bytes,
            "seconds": round(time.monotonic() - began, 3),
            **strategy.privacy(),
        }
        append_line(Path(stated["folder"]) / "rounds.jsonl", json.dumps(line).encode() + b"\n")

    config = ServerConfig(num_rounds=int(stated["rounds"]))
    legacy = LegacyContext(context=context, config=config, strategy=strategy)
    DefaultWorkflow(fit_workflow=fit)(grid, legacy)
