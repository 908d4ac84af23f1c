"""What the tests of recovery from memory run: a rank's part, before a loss and after it."""

import pickle
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from paceline.comm.local_part import local_part
from paceline.comm.rendezvous import Ranks
from paceline.config.frozen import Auto
from paceline.observe.profile import ProfiledWindows
from paceline.observe.run import Run
from paceline.train.best_evaluation import BestEvaluation
from paceline.train.checkpoint.buddies import Buddies
from paceline.train.checkpoint.checkpointer import Checkpointer
from paceline.train.checkpoint.held import HeldState, Piece
from paceline.train.checkpoint.leaves import leaves
from paceline.train.checkpoint.loading import load
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.checkpoint.memory import recover
from paceline.train.families import task_of
from paceline.train.metrics_buffer import MetricsBuffer
from paceline.train.run_checkpoints import RunCheckpoints
from paceline.train.run_context import RunContext
from paceline.train.start import identity
from paceline.train.trainer import Trainer
from tests.train.reshard_cases import StopAfter, job_of

STEPS = 2
"""Before the loss."""
COPY_S = 0.05


class Before(NamedTuple):
    """A run up to its loss, in a folder of its own."""

    folder: Path
    settings: tuple[str, ...]
    per_node: int
    ema: float | None = None


class After(NamedTuple):
    """How the run goes on."""

    before: Before
    settings: tuple[str, ...]
    held: list[bytes]
    """Of each rank, pickled `HeldState`s; a rank past the end is new."""


def checkpoints_of(
    run: Before, rank: int, num_ranks: int, settings: Sequence[str]
) -> tuple[RunCheckpoints, Trainer]:
    """A rank with its checkpoints, ready to begin."""
    job = job_of(run.folder, num_ranks, ("elastic.min_nodes=1", *settings))
    mine = Ranks(rank, num_ranks, rank % run.per_node, run.per_node)
    task = task_of(job, mine)
    task = replace(task, loop_options=replace(task.loop_options, ema=run.ema))
    trainer = Trainer.of(job, mine, task)
    context = RunContext(
        run=Run(run.folder),
        checkpointer=Checkpointer(Run(run.folder).checkpoint_folder, keep_last=2, say=_silent),
        windows_from=lambda first: ProfiledWindows(run.folder / "trace", rank, 0, first_step=first),
        stop=StopAfter(STEPS),
        metrics_buffer=MetricsBuffer(lambda line: None, 0, 5),
        identity=identity(job, task.data_key),
        best=BestEvaluation(job),
    )
    return RunCheckpoints(trainer, context), trainer


def _silent(sentence: str) -> None:
    pass


def step(trainer: Trainer, checkpoints: RunCheckpoints, done: int) -> None:
    """One step, as the loop does it."""
    checkpoints.save_if_due(done)
    batches = next(trainer.task.steps_from(done * trainer.job.train.global_batch))
    trainer.step(done, batches)()


def local_tensors(trainer: Trainer, checkpoints: RunCheckpoints) -> dict[str, Any]:
    """Path -> this rank's part of what a checkpoint would keep."""
    state = {k: v for k, v in checkpoints._state().items() if k != "rng"}
    return {
        path: (leaf.value.to_local() if hasattr(leaf.value, "to_local") else leaf.value)
        for path, leaf in leaves(state).items()
    }


def train_before(rank: int, num_ranks: int, runs: Sequence[Before]) -> list[bytes]:
    """Train each run, save it on the disk, and return what this rank has in memory of it."""
    return [pickle.dumps(_train_one(run, rank, num_ranks)) for run in runs]


def _train_one(run: Before, rank: int, num_ranks: int) -> list[HeldState]:
    checkpoints, trainer = checkpoints_of(run, rank, num_ranks, run.settings)
    done = checkpoints.begin(generation=1)
    assert done == 0
    for index in range(STEPS):
        step(trainer, checkpoints, index)
    checkpoints.save_if_due(STEPS)
    checkpoints.finish(STEPS)
    if "layout.pp=2" not in run.settings:  # whose other stages would wait
        _break_off(trainer)
    return [alone(one) for one in checkpoints.held()]


def lose_in_a_round(rank: int, num_ranks: int, run: Before) -> tuple[list[int], int]:
    """Workers of local updates lose the last rank when rank 1 hasn't ended the second round.

    Returns:
        of which rounds this rank had copies, and from which one all went on.
    """
    checkpoints, trainer = checkpoints_of(run, rank, num_ranks, run.settings)
    checkpoints.begin(generation=1)
    for done in range(STEPS):
        batches = next(trainer.task.steps_from(done * trainer.job.train.global_batch))
        trainer.step(done, batches)
        trainer.agreement.meet(done + 1)
        checkpoints.keep_round(done + 1)
    held = checkpoints.held()
    left = {1: held[:-1], num_ranks - 1: []}.get(rank, held)
    then, _ = checkpoints_of(run, rank, num_ranks, run.settings)
    then.begin(left, generation=2)
    assert then.recovered is not None, "all begin anew"
    return [one.step for one in held], then.recovered.step


def alone(held: HeldState) -> HeldState:
    """With tensors that share no memory: pickled as they are, each would take all of it along."""
    return replace(held, pieces=[p._replace(tensor=p.tensor.clone()) for p in held.pieces])


def _break_off(trainer: Trainer) -> None:
    """Begin a step that ends within its forward pass, on all ranks."""
    left = 4

    def fail(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise ConnectionError

    hooks = [m.register_forward_pre_hook(fail) for m in trainer.module.modules()]
    with suppress(ConnectionError):
        trainer.step(STEPS, next(trainer.task.steps_from(0)))
    assert left == 0
    for hook in hooks:
        hook.remove()


def flipped(held: HeldState, path: str) -> HeldState:
    """With one bit of a tensor's pieces turned."""
    pieces = []
    for piece in held.pieces:
        if piece.row.path == path:
            tensor = piece.tensor.clone()
            tensor.reshape(-1).view(torch.uint8)[0] ^= 4
            piece = Piece(piece.row, tensor, piece.checksum)
        pieces.append(piece)
    return replace(held, pieces=pieces)


def go_on(rank: int, num_ranks: int, cases: Sequence[After]) -> list[tuple[Any, ...]]:
    """Go on from memory; then from the disk, and compare: (step, source, bytes, differences)."""
    return [_compare(case, rank, num_ranks) for case in cases]


def _compare(case: After, rank: int, num_ranks: int) -> tuple[Any, ...]:
    held = pickle.loads(case.held[rank]) if rank < len(case.held) else []
    checkpoints, trainer = checkpoints_of(case.before, rank, num_ranks, case.settings)
    done = checkpoints.begin(held, generation=2)
    recovered = checkpoints.recovered
    mine = local_tensors(trainer, checkpoints)
    facts = checkpoints._facts(done)
    rest, other = checkpoints_of(case.before, rank, num_ranks, case.settings)
    assert rest.begin() == STEPS
    theirs = local_tensors(other, rest)
    differing = sorted(mine.keys() ^ theirs.keys())
    for path in mine.keys() & theirs.keys():
        same = (
            torch.equal(mine[path], theirs[path])
            if isinstance(mine[path], torch.Tensor)
            else mine[path] == theirs[path]
        )
        if not same:
            differing.append(path)
    if facts != rest._facts(STEPS):
        differing.append("facts")
    if recovered is None:
        return None, None, 0, differing
    return recovered.step, recovered.source, recovered.bytes, differing


# Copies of a small state, on three nodes of one rank.


class Small:
    """One sharded tensor and one that each rank has; both are filled with the step."""

    def __init__(self, rank: int, num_ranks: int, every: Auto | int = 1) -> None:
        mesh = init_device_mesh("cpu", (num_ranks,))
        whole = torch.zeros(2 * num_ranks, 2)
        self.state = {
            "model": {"w": distribute_tensor(whole, mesh, [Shard(0)]), "b": torch.zeros(5)}
        }
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
        self.buddies = Buddies(Ranks(rank, num_ranks, 0, 1), group, every)

    def live(self, step: int) -> HeldState:
        for tensor in self.state["model"].values():
            local_part(tensor).fill_(step)
        return HeldState.live(step, self.state, {"step": step}, history=((1, 0),))

    def recovered(self, held: Sequence[HeldState]) -> tuple[int, str] | None:
        """Step and source of what is put together, if it is what it was."""
        ranks = LockstepRanks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
        self.live(0)
        disk = Path("there is none")
        found = recover(lambda f: load(f, self.state, ranks) and None, held, ranks, 2, disk)
        if found is None:
            return None
        for tensor in self.state["model"].values():
            assert set(local_part(tensor).reshape(-1).tolist()) == {float(found.step)}
        return found.step, found.source


def copy_and_lose(rank: int, num_ranks: int) -> dict[str, Any]:
    """Three steps with copies, and what is recovered after losses of several kinds."""
    small = Small(rank, num_ranks)
    for index in (1, 2, 3):
        small.buddies.renew(small.live(index))
    small.buddies.finish()
    held = small.buddies.offers()
    seen: dict[str, Any] = {
        "held": sorted((one.kind, one.step) for one in held),
        "sent": small.buddies.sent_bytes,
        "whole": small.buddies.last_whole,
    }

    def damaged(kind: str, at: int) -> list[HeldState]:
        is_it = rank == at
        return [
            flipped(one, "model.w") if is_it and one.kind == kind and one.step == 3 else one
            for one in held
        ]

    lost = [] if rank == 1 else held
    seen["one lost"] = small.recovered(lost)
    seen["its copy is damaged"] = small.recovered([] if rank == 1 else damaged("buddy", 2))
    seen["its own copy is damaged"] = small.recovered(damaged("own", 1))
    seen["two lost"] = small.recovered(held if rank == 0 else [])
    # A newer live state of one rank, and live states of the others at the copies' step.
    apart = [small.live(4 if rank == 0 else 3), *held]
    apart[0] = alone(apart[0])
    seen["one step apart"] = small.recovered(apart)
    # What one rank did after the step from which the others went on is another run's.
    own = [one for one in held if one.kind == "own"]
    anew = [replace(one, history=((1, 0), (2, 2))) if one.step == 3 else one for one in own]
    seen["parted"] = small.recovered(own if rank == 0 else anew)
    seen["nothing"] = small.recovered([])
    if rank != 1:  # it is lost before it copies the fourth step
        small.buddies.renew(small.live(4))
        small.buddies.finish()
    dist.barrier()
    after = small.buddies.offers()
    seen["interrupted"] = small.recovered([] if rank == 1 else after)
    seen["stays broken"] = small.buddies.renew(small.live(5)) if rank != 1 else 0.0
    return seen


def choose_intervals(rank: int, num_ranks: int) -> dict[str, tuple[int, float]]:
    """What costs 0.05 s in each copy -> the interval that is chosen, and the longest time from one
    copy to the next, which makes up a step here."""
    chosen = {}
    exchange = Buddies._exchange_copies

    def busy(buddies: Buddies, place: Any) -> bool:
        until = time.thread_time() + COPY_S
        while time.thread_time() < until:
            pass
        return exchange(buddies, place)

    for what in ("preparing", "the thread"):
        small = Small(rank, num_ranks, "auto")
        Buddies._exchange_copies = busy if what == "the thread" else exchange  # type: ignore[method-assign]
        began, longest_s = time.perf_counter(), 0.0
        for index in range(1, 6):
            time.sleep(COPY_S)  # a step
            prepared_s = COPY_S if what == "preparing" else 0.0
            time.sleep(prepared_s)
            small.buddies.renew(small.live(index), prepared_s)
            small.buddies.finish()
            longest_s, began = max(longest_s, time.perf_counter() - began), time.perf_counter()
        chosen[what] = small.buddies.every, longest_s
    return chosen
