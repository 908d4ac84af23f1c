"""Recommenders: DLRM's Task on the synthetic click log, the AUC it reaches, its weights for others.

Dense layers are the module, and data-parallel as any other; rows of tables come from `Tables`, by
server or by all-to-all as the Job says. The loss is the mean binary cross-entropy. Held-out samples
are made beside it as many as `train.eval_batches` asks for, and their AUC stands beside the best
that is possible on them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from paceline.comm.rendezvous import Ranks
from paceline.config.job import Job, JobSpec, to_raw
from paceline.config.recommender import Dlrm
from paceline.models.weights import write_state
from paceline.recommender.click_log import auc, samples
from paceline.recommender.dlrm import DlrmNetwork, original_state
from paceline.recommender.parameter_server.all_to_all import AllToAllTables
from paceline.recommender.parameter_server.consistent_hash import Numbering, RowPlacement
from paceline.recommender.parameter_server.serve import ServerSettings
from paceline.recommender.parameter_server.snapshot import whole_tables
from paceline.recommender.parameter_server.start import start_servers
from paceline.recommender.parameter_server.tables import ServedTables, ServerPlan, Tables
from paceline.train.data.build import Progress
from paceline.train.family import Trained, TrainFamily
from paceline.train.synthetic import synthetic_eval_steps, synthetic_steps
from paceline.train.task import Task


class ClickMicroBatch(NamedTuple):
    """A micro-batch on this rank's device, but for what only the host reads."""

    dense: Tensor
    """(batch, num_dense)"""
    ids: Tensor
    """(batch, tables), on the host"""
    clicked: Tensor
    """(batch,), 0 or 1"""
    probability: Tensor
    """(batch,), on the host"""


class Recommenders(TrainFamily[Dlrm]):
    """See `TrainFamily`."""

    def read_inputs(
        self, model: Dlrm, job: Job, progress: Progress, say: Callable[[str], None]
    ) -> str:
        """Nothing is read; what the log is made from is its name."""
        return _data_key(job)

    def task(self, model: Dlrm, job: Job, ranks: Ranks) -> Task:
        """The Job's own recommender on its own log."""
        tables = tables_of(model, job, ranks)
        make, seen = partial(_micro_batch, model, job, ranks), ClickScores()
        with torch.device("meta"):
            module = DlrmNetwork(model)
        return Task(
            module=module,
            loss=partial(_loss, tables, seen),
            steps_from=lambda first: synthetic_steps(job, ranks, make, first),
            eval_steps=lambda: synthetic_eval_steps(job, ranks, make),
            unit=model.unit,
            train_flops_per_unit=model.train_flops_per_sample,
            data_key=_data_key(job),
            fill=partial(_fill, job.train.seed),
            facts={"num_params": model.num_params, "data": {"source": _data_key(job)}},
            tables=tables,
            eval_figures=partial(seen.figures, ranks),
        )

    def eval_figures(self, model: Dlrm, job: JobSpec) -> list[str]:
        """See `ClickScores`."""
        return ["eval_loss", "eval_auc", "eval_best_auc"]

    def export(self, model: Dlrm, trained: Trained, folder: Path, dtype: torch.dtype) -> None:
        """Dense layers and tables under the names of DLRM's own code, shapes in config.json."""
        kept = whole_tables(trained.run.path / "tables", trained.step, Numbering(model.tables))
        weights = original_state(trained.weights, [torch.from_numpy(rows) for rows in kept])
        write_state(folder, weights, dtype, to_raw(model))


def _data_key(job: Job) -> str:
    """Names the log by what it is made from."""
    clicks = job.data.clicks
    return f"clicks power={clicks.power:g} signal={clicks.signal:g} bias={clicks.bias:g}"


def tables_of(model: Dlrm, job: Job, ranks: Ranks) -> Tables:
    """The tables as the Job lays them out: not opened yet."""
    embeddings = job.comm.embeddings
    if embeddings.by == "all_to_all":
        return AllToAllTables(
            Numbering(model.tables),
            model.dim,
            job.train.seed,
            job.optim.rows,
            ranks.rank,
            ranks.world_size,
            ranks.device,
        )
    serving = ServerPlan(
        RowPlacement(model.tables, embeddings.servers),
        model.dim,
        ranks.world_size,
        ranks.rank,
        {"synchronous": 0, "stale": embeddings.staleness, "asynchronous": None}[embeddings.mode],
        embeddings.cache_rows,
        embeddings.staleness,
        job.comm.timeout_s,
    )
    return ServedTables(
        serving, partial(start_servers, _settings(model, job, ranks), ranks), ranks.device
    )


def _settings(model: Dlrm, job: Job, ranks: Ranks) -> ServerSettings:
    embeddings = job.comm.embeddings
    return ServerSettings(
        server=0,
        num_servers=embeddings.servers,
        num_workers=ranks.world_size,
        tables=model.tables,
        dim=model.dim,
        seed=job.train.seed,
        optim=job.optim.rows.model_dump(),
        lag={"synchronous": 0, "stale": embeddings.staleness, "asynchronous": None}[
            embeddings.mode
        ],
        checkpoint_every=embeddings.checkpoint_every,
        folder="",
        run_checkpoints="",
        host="",
        timeout_s=job.comm.timeout_s,
        key="",
    )


def _fill(seed: int, module: nn.Module) -> None:
    assert isinstance(module, DlrmNetwork)
    module.init_weights(torch.Generator().manual_seed(seed))


def _loss(tables: Tables, seen: "ClickScores", module: nn.Module, batch: ClickMicroBatch) -> Tensor:
    logits = module(batch.dense, tables.rows(batch.ids)).float()
    if not module.training:
        seen.add(logits, batch)
    return binary_cross_entropy_with_logits(logits, batch.clicked)


def _micro_batch(model: Dlrm, job: Job, ranks: Ranks, indices: np.ndarray) -> ClickMicroBatch:
    made = samples(model, job.data.clicks, job.train.seed, indices)
    return ClickMicroBatch(
        torch.from_numpy(made.dense).to(ranks.device),
        torch.from_numpy(made.ids),
        torch.from_numpy(made.clicked).to(ranks.device),
        torch.from_numpy(made.probability),
    )


@dataclass
class ClickScores:
    """What an evaluation has scored on this rank."""

    parts: list[Tensor] = field(default_factory=list)
    """Each (3, batch): score, click, true probability."""

    def add(self, logits: Tensor, batch: ClickMicroBatch) -> None:
        """Note a micro-batch of held-out samples."""
        columns = (logits.detach(), batch.clicked, batch.probability)
        self.parts.append(torch.stack([column.cpu() for column in columns]))

    def figures(self, ranks: Ranks) -> dict[str, float]:
        """AUC of all ranks' samples, and that of their true probabilities; then forget them."""
        mine, self.parts = torch.cat(self.parts, dim=1), []
        everyone = [mine]
        if ranks.world_size > 1:
            everyone = [torch.empty_like(mine) for _ in range(ranks.world_size)]
            dist.all_gather(everyone, mine)
        score, clicked, probability = torch.cat(everyone, dim=1).double().numpy()
        reached, best = auc(score, clicked), auc(probability, clicked)
        if reached is None or best is None:
            return {}
        return {"eval_auc": reached, "eval_best_auc": best}
