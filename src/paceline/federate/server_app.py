"""The server's end: Flower's ServerApp, which asks for changes and learns their sum.

SecAgg+ is Flower's. `_Unpacking` gives it the masked numbers in the form that it knows, and counts
what clients sent. `_Workflow` is the order of a round, for which whoever is gone before keys are
shared has never been there; left as it is, it would ask others for their shares and end the round.
"""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.common import ndarray_to_bytes
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.server_config import ServerConfig
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from paceline.federate.grid import Form
from paceline.federate.rounds import form_of, half_told
from paceline.federate.strategies import STRATEGIES
from paceline.observe.events import append_line
from paceline.train.stopping import exit_with_parent

app = ServerApp()


class _Workflow(SecAggPlusWorkflow):
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
        form: of a client's numbers, of which the first is the factor that Flower puts before them.
    """

    def __init__(self, grid: Grid, form: Form) -> None:
        self._grid, self._form = grid, form
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
                values = self._form.unpacked(raw)
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
    strategy = STRATEGIES[stated["tells"]](stated)
    strategy.take_up()
    number = strategy.first

    def fit(grid: Grid, context: Context) -> None:
        nonlocal number
        began, half, told = time.monotonic(), half_told(stated), strategy.line(number)
        form = form_of(stated, number, 1 + strategy.count(number))
        unpacking = _Unpacking(grid, form)
        _Workflow(
            1.0, float(stated["least"]),
            max_weight=1.0,
            # A value is moved to 0 ... 2 * half and neither scaled nor rounded: it is on the grid.
            clipping_range=float(half), quantization_range=2 * half,
            modulus_range=2**form.wide_bits, timeout=float(stated["timeout"]),
        )(unpacking, context)  # fmt: skip
        line = {
            "round": number,
            **told,
            "asked": strategy.asked,
            "answered": strategy.answered,
            "is_summed": strategy.is_summed,
            "upload_bytes": unpacking.upload_bytes,
            "seconds": round(time.monotonic() - began, 3),
            **strategy.privacy(),
        }
        strategy.keep(line)
        append_line(Path(stated["folder"]) / "rounds.jsonl", json.dumps(line).encode() + b"\n")
        number += 1

    config = ServerConfig(num_rounds=int(stated["rounds"]) + 1 - number)
    legacy = LegacyContext(context=context, config=config, strategy=strategy)
    DefaultWorkflow(fit_workflow=fit)(grid, legacy)
