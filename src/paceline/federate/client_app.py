"""The client's end: Flower's ClientApp, which asks a process of its own to train.

Around Flower's SecAgg+ (`secaggplus_mod`) stands `_pack`: of the masked numbers, which Flower sends
as 8 bytes each, it leaves the bits that they have.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from flwr.compat.client.numpy_client import NumPyClient

from paceline.federate.grid import Floats, OnGrid, modulus_bits, on_grid, packed
from paceline.federate.privacy import on_grid_within
from paceline.federate.rounds import Factor, Shares, with_size
from paceline.federate.shared_file import (
    WEIGHTS_FILE,
    read_tensors,
    trained_names,
    vector_of,
    write_tensors,
)


class _Client(NumPyClient):
    """One that has its part of the data in a folder."""

    def __init__(self, folder: Path, stated: dict[str, Any]) -> None:
        self._folder, self._stated = folder, stated

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
        """Train, and give the change on the grid: (n + TOLD,), with privacy (n,).

        The error of what is told stays here until the same is trained again.
        """
        factor: Factor = config["factor"]
        shares: Shares = self._stated["shares"]
        given = self._folder / shares
        names = read_tensors(given, trained_names(Path(self._stated["folder"])))
        before = dict(zip(names, parameters, strict=True))
        write_tensors(given, before)
        train_round(self._folder, self._stated["cwd"], int(config["round"]), factor, shares)
        after = read_tensors(self._folder / f"round-{config['round']}", before)
        for older in self._folder.glob(f"round-*/{WEIGHTS_FILE}"):  # whole networks: one is enough
            if older.parent.name != f"round-{config['round']}":
                older.unlink()
        kept = self._folder / f"error-{factor}.npy"
        change = vector_of(after, factor) - vector_of(before, factor)
        if kept.exists():
            change += np.load(kept)
        if not np.isfinite(change).all():
            raise ValueError(f"round {config['round']} came to numbers that are not finite")
        values, error = self._told(change, config["limit"], np.random.default_rng())
        np.save(kept, error[: len(change)])
        return [values.astype(np.float64)], 1, {}

    def _told(self, change: Floats, limit: float, stream: np.random.Generator) -> OnGrid:
        bits, clip = int(self._stated["bits"]), float(self._stated["clip"])
        if clip:
            return on_grid_within(change, limit, bits, clip, stream)
        return on_grid(with_size(change, limit), limit, bits, stream)


def train_round(
    folder: Path,
    cwd: str,
    number: int,
    factors: Factor | Literal["both"],
    shares: Shares = "adapters",
) -> None:
    """Train in a process of its own, from `folder`/`shares` to `folder`/round-<number>.

    Args:
        folder: the client's own.
        cwd: what its Job's paths are relative to.
        number: of the round.
        factors: which matrices of adapters are trained.
        shares: what the folder has.

    Raises:
        CalledProcessError: training failed; log.txt says why.
    """
    given = [f"train.weights={folder / shares}"]
    if shares == "adapters":
        given = [f"finetune.adapters={folder / shares}", f"finetune.factors={factors}"]
    settings = [*given, f"train.seed={number}"]
    command = [sys.executable, "-m", "paceline.federate.client_round"]
    with (folder / "log.txt").open("ab") as log:
        subprocess.run(
            [*command, str(folder / "job.toml"), str(folder / f"round-{number}"), *settings],
            cwd=cwd, stdout=log, stderr=subprocess.STDOUT, check=True,
        )  # fmt: skip


def _pack(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    reply = call_next(message, context)
    records = reply.content.config_records if reply.has_content() else {}
    if Key.MASKED_PARAMETERS in (answer := records.get(RECORD_KEY_CONFIGS, {})):
        parts = [bytes_to_ndarray(raw) for raw in answer[Key.MASKED_PARAMETERS]]
        stated = context.run_config
        bits = modulus_bits(int(stated["bits"]), int(stated["taking-part"]))
        answer[Key.MASKED_PARAMETERS] = [packed(np.concatenate(parts), bits)]
    return reply


def _client_of(context: Context) -> Any:
    folder = Path(str(context.run_config["folder"])) / "clients"
    client = _Client(folder / str(context.node_config["client"]), dict(context.run_config))
    return client.to_client()


app = ClientApp(client_fn=_client_of, mods=[_pack, secaggplus_mod])
