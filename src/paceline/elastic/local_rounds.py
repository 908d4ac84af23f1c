"""Local updates: workers that step each for itself and meet in rounds.

A worker is a replica of the whole network: one rank, or several that share it (fsdp, tp, cp)
and sum gradients in every step, as a run of them alone does. Between two rounds nothing passes
between workers. What a worker has changed since the last round (start - now) is its outer gradient.
In a round the mean of the workers' outer gradients goes through an outer optimizer, and all go on
from the result:

- local SGD (https://arxiv.org/abs/1805.09767) steps by the outer gradient itself, which gives the
  mean of the workers' parameters;
- DiLoCo (https://arxiv.org/abs/2311.08105) steps by Nesterov's momentum on it;
- streaming (https://arxiv.org/abs/2501.18512) cuts the network into fragments, each every `every`
  steps but at different ones; a fragment is on its way for `overlap_steps` while the workers step
  on, and what arrives is mixed with what they have by then.

The inner optimizer's state stays with its worker, always. Outer gradients may travel in the form of
a codec, with error feedback; all workers decode the same payloads, so what they share has the same
bits everywhere. The last step of a run is a round of everything: then all workers are equal.

A rank averages what it holds with the ranks at its place in the other workers: no whole tensor is
put together. Together a worker's ranks send 2(N-1)/N of the coded parameters every `every` steps,
an all-reduce of gradients at every step as much.

Not here: when a step is skipped, which is each worker's own business, the numbers of steps
(`train.results`), and how those who are left after a loss go on (`train.run_checkpoints`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from paceline.comm.collectives import Collectives
from paceline.comm.compress.compressors import compressor_of
from paceline.comm.compress.feedback import BufferPart, ErrorFeedback
from paceline.comm.compress.means import (
    CompressedMean,
    UncompressedRest,
    buffer_part,
    exact_bytes,
    exact_mean,
    mean_of_parts,
)
from paceline.comm.local_part import local_part
from paceline.comm.mesh import WorkerGroups, num_shards
from paceline.comm.queue import CollectiveQueue, Job
from paceline.config.comm import LocalUpdates, codec
from paceline.config.errors import InputError
from paceline.parallel.blocks import blocks_of
from paceline.parallel.replicas import (
    ROUNDS_SECTION,
    Replicas,
    State,
    errors_to_load,
    tensors_to_load,
)

# Of what a worker has, where a fragment arrives late; the rest is what arrives. Assumed: the mean.
_MIXING = 0.5


@dataclass(frozen=True)
class RoundSchedule:
    """After which steps fragments leave and arrive."""

    every: int
    num_fragments: int
    overlap_steps: int

    @staticmethod
    def of(local: LocalUpdates) -> "RoundSchedule":
        """Of a Job's local updates."""
        return RoundSchedule(local.round_steps, local.fragments, local.late_steps)

    def is_sent(self, fragment: int, done: int) -> bool:
        """Whether a fragment's outer gradient leaves after `done` steps."""
        return done > 0 and (done - fragment * self.every // self.num_fragments) % self.every == 0

    def is_taken(self, fragment: int, done: int) -> bool:
        """Whether it has to have arrived by then."""
        return self.is_sent(fragment, done - self.overlap_steps)

    def is_round(self, done: int) -> bool:
        """Whether the workers meet: once in `every` steps, however many fragments there are."""
        return done % self.every == 0


@dataclass(eq=False)
class _Fragment:
    """Parameters that travel together, what this rank holds of them: flat buffers (n,) of their
    type."""

    number: int
    parameters: dict[str, nn.Parameter]
    parts: tuple[BufferPart, ...]
    start: Tensor
    """What the workers last agreed on."""
    momentum: Tensor
    outer: Tensor
    """Outer gradient: this worker's when it leaves, the mean when it has arrived."""
    mean: CompressedMean | None
    """None where nothing in it is compressed."""
    is_under_way: bool = False

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of one of the buffers: (its values,)."""
        return list(flat.split([part.num_values for part in self.parts]))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter's part, in the shape of what this rank holds."""
        pieces = zip(self.parts, self.pieces(flat), strict=True)
        return {part.name: piece.view(part.shape) for part, piece in pieces}

    def read(self, flat: Tensor) -> None:
        """Copy the parameters as they are into a buffer."""
        torch.cat(_flat(self.parameters), out=flat)

    def leave(self) -> None:
        """Make `outer` what this worker has changed since they last agreed."""
        self.read(self.outer)
        torch.sub(self.start, self.outer, out=self.outer)


class LocalRounds(Replicas):
    """The rounds of one rank of a worker; all of them call alike after every step.

    Args:
        compress_from: tensors with fewer values travel exactly.
        groups: of this rank.
        num_steps: of the run; the last one is followed by a round of everything.

    Raises:
        InputError: there are more fragments than layers.
    """

    section = ROUNDS_SECTION
    steps_alone = True

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[nn.Parameter, str],
        local: LocalUpdates,
        compress_from: int,
        groups: WorkerGroups,
        num_steps: int,
    ) -> None:
        group, self.together, self._across = groups.in_rounds, groups.inside, groups.across
        self._local, self._compress_from, self._num_steps = local, compress_from, num_steps
        self.timetable = RoundSchedule.of(local)
        rank, self.num_workers = (0, 1) if group is None else (group.rank(), group.size())
        self._compressor = None if group is None else compressor_of(codec(local.compress), group)
        self._collectives = None if group is None else Collectives(group, "backend")
        self._feedback = ErrorFeedback(rank, self.num_workers)
        is_diloco = local.method != "local_sgd"
        self._lr = local.outer_lr if is_diloco else 1.0
        self._beta = local.outer_momentum if is_diloco else 0.0
        if group is not None:
            _take_first(module, group)
        cut = fragments_of(module, names, local.fragments)
        self._parameters = {name: p for parameters in cut for name, p in parameters.items()}
        self._fragments = [self._fragment(number, each) for number, each in enumerate(cut)]
        self._queue = CollectiveQueue(self._fragments[0].start.device)
        self.sent_bytes = 0
        """What this rank sent after the last step."""

    def describe(self) -> str:
        """Who meets when, a sentence for a person."""
        local = self._local
        ranks = "" if self.together is None else f" of {self.together.size()} ranks"
        parts = f", in {local.fragments} fragments" if local.fragments > 1 else ""
        late = f", {local.overlap_steps} steps on their way" if local.overlap_steps else ""
        form = "exactly" if self._compressor is None else f"as {local.compress}"
        if self.num_workers == 1:
            return (
                f"1 worker{ranks} is left ({local.method}): its outer step is every {local.every} "
                "steps."
            )
        return (
            f"{self.num_workers} workers{ranks} step each for itself ({local.method}); what they "
            f"changed travels {form} every {local.every} steps{parts}{late}."
        )

    def after_step(self, done: int) -> None:
        """Send and take what is due after `done` steps of the run.

        Raises:
            Exception: what went wrong in an exchange, with its traceback.
        """
        with torch.no_grad(), record_function("paceline.round"):
            self._meet_if_due(done)

    def _meet_if_due(self, done: int) -> None:
        self.sent_bytes = 0
        if done == self._num_steps:
            self._take(self._under_way(), _MIXING)
            self._send(self._fragments)
            self._take(self._fragments, 0.0)
            return
        table = self.timetable
        leaving = [f for f in self._fragments if table.is_sent(f.number, done)]
        due = [f for f in self._under_way() if f in leaving or table.is_taken(f.number, done)]
        self._take(due, _MIXING)
        self._send(leaving)
        if not table.overlap_steps:
            self._take(leaving, 0.0)

    def is_round(self, done: int) -> bool:
        """Whether the workers meet: every so many steps, and after the last one."""
        return self.timetable.is_round(done) or done == self._num_steps

    def sum_in_step(self, values: Tensor) -> tuple[Tensor, int]:
        """Of this worker's ranks."""
        return _sum_in(self.together, values)

    def sum_in_round(self, values: Tensor) -> tuple[Tensor, int]:
        """Of the ranks at this place in all workers."""
        return _sum_in(self._across, values)

    def sent(self) -> dict[str, float]:
        """What this rank sent after the last step, in bytes."""
        return {"dp.bytes": self.sent_bytes}

    def _under_way(self) -> list[_Fragment]:
        return [fragment for fragment in self._fragments if fragment.is_under_way]

    def _send(self, fragments: Sequence[_Fragment]) -> None:
        for fragment in fragments:
            assert not fragment.is_under_way, "a fragment arrives before it leaves again"
            fragment.leave()
            fragment.is_under_way = True
            self._queue.submit(self._average(fragment))
            self.sent_bytes += self._bytes(fragment)
        if fragments:
            self._queue.flush()

    def _average(self, fragment: _Fragment) -> Job:
        """Replace this worker's outer gradient by the mean of all."""
        if self._collectives is None:
            return
        if fragment.mean is None:
            yield from exact_mean(fragment.outer, self._collectives)
            return
        rest = UncompressedRest(self._collectives)
        pairs = zip(fragment.parts, fragment.pieces(fragment.outer), strict=True)
        rest.take([piece for part, piece in pairs if not part.is_compressed])
        errors = self._feedback.span(fragment.parts, fragment.outer)
        yield from fragment.mean.average(fragment.outer, errors)
        yield from rest.average()
        rest.put_back()

    def _bytes(self, fragment: _Fragment) -> int:
        exact = sum(part.num_values for part in fragment.parts if not part.is_compressed)
        coded = 0 if fragment.mean is None else fragment.mean.sent_bytes
        return coded + exact_bytes(exact * fragment.outer.element_size(), self.num_workers)

    def _take(self, fragments: Sequence[_Fragment], mixing: float) -> None:
        """Wait for the means, do the outer step and go on from what it gives.

        Args:
            mixing: how much of what the worker has stays, 0: nothing.
        """
        if not fragments:
            return
        self._queue.wait()
        for fragment in fragments:
            fragment.is_under_way = False
            outer_step(fragment.start, fragment.momentum, fragment.outer, self._lr, self._beta)
            shared = fragment.named(fragment.start)
            for name, parameter in fragment.parameters.items():
                own = local_part(parameter.detach())
                kept = own * mixing if mixing else 0.0  # it need not be finite
                own.copy_(shared[name] * (1 - mixing) + kept)

    def _fragment(self, number: int, parameters: dict[str, nn.Parameter]) -> _Fragment:
        # What more of a worker's ranks hold than hold the rest is coded by none of them: beside the
        # rank's own values, each would round it otherwise.
        most = max(map(num_shards, self._parameters.values()))
        parts = tuple(
            buffer_part(
                name,
                p,
                local_part(p).shape,
                self._compressor if num_shards(p) == most else None,
                self._compress_from,
            )
            for name, p in parameters.items()
        )
        start = torch.cat(_flat(parameters))
        mean = mean_of_parts(self._compressor, parts, start)
        momentum, outer = torch.zeros_like(start), torch.empty_like(start)
        return _Fragment(number, parameters, parts, start, momentum, outer, mean)

    def state(self) -> State:
        """What a checkpoint keeps, besides each worker's own: what they share, what is on its way.

        {"start" | "momentum" | "arriving": {name: tensor}, "error": {worker: {name: tensor}}}, each
        laid out over this worker's ranks as its parameter is.
        """
        self._queue.wait()
        state: State = {"start": {}, "momentum": {}, "arriving": {}}
        for fragment in self._fragments:
            state["start"] |= self._laid_out(fragment.named(fragment.start))
            state["momentum"] |= self._laid_out(fragment.named(fragment.momentum))
            if fragment.is_under_way:
                state["arriving"] |= self._laid_out(fragment.named(fragment.outer))
        errors = self._feedback.state().items()
        return {**state, "error": {worker: self._laid_out(owed) for worker, owed in errors}}

    def _laid_out(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank holds, by name of the parameter, as a part of the whole."""
        return {name: _like(self._parameters[name], values) for name, values in held.items()}

    def targets(self, saved: Iterable[str], _room: Callable[[str], Tensor]) -> State:
        """As in `Replicas`; paths are of the form "start.layer.weight", "error.0.layer.weight"."""
        rooms = {}
        for path in saved:
            kind, name = path.split(".", 1)
            name = name.partition(".")[2] if kind == "error" else name
            if name in self._parameters:
                rooms[path] = torch.empty_like(self._parameters[name].detach())
        room, takes_over = rooms.__getitem__, self._feedback.takes_over
        kinds = ("start", "momentum", "arriving")
        return {
            "error": errors_to_load("error", rooms, takes_over, room),
            **{kind: tensors_to_load(kind, rooms, room) for kind in kinds},
        }

    def load(self, state: State) -> None:
        """Go on with what `targets` gave, now filled; without any, from the parameters as they are.

        What was on its way is taken when it is due.
        """
        self._queue.wait()
        errors = state["error"].items()
        self._feedback.load({worker: _held(owed) for worker, owed in errors})
        for fragment in self._fragments:
            fragment.read(fragment.start)
            fragment.momentum.zero_()
            _fill(fragment.named(fragment.start), state["start"])
            _fill(fragment.named(fragment.momentum), state["momentum"])
            arriving = [name for name in fragment.parameters if name in state["arriving"]]
            fragment.is_under_way = len(arriving) == len(fragment.parameters)
            _fill(fragment.named(fragment.outer), state["arriving"])


def outer_step(start: Tensor, momentum: Tensor, outer: Tensor, lr: float, beta: float) -> None:
    """Nesterov's step of the outer optimizer, in place; all (n,).

    Args:
        start: what is stepped. momentum: of earlier rounds. outer: the mean outer gradient.
        lr: of the outer optimizer. beta: its momentum.
    """
    momentum.mul_(beta).add_(outer)
    start.sub_(outer, alpha=lr).sub_(momentum, alpha=lr * beta)


def fragments_of(
    module: nn.Module, names: Mapping[nn.Parameter, str], num_fragments: int
) -> list[dict[str, nn.Parameter]]:
    """Which parameters travel together: every `num_fragments`-th layer, so that depths mix.

    What comes before a layer in the module goes with that one, what comes after all with the last.

    Raises:
        InputError: there are fewer layers than fragments.
    """
    blocks = [placed.block for placed in blocks_of(module)]
    if len(blocks) < num_fragments:
        raise InputError(
            f"comm.local.fragments = {num_fragments} but the network has {len(blocks)} layers to "
            "share out: lower it."
        )
    layer_of = {p: number for number, block in enumerate(blocks) for p in block.parameters()}
    fragments: list[dict[str, nn.Parameter]] = [{} for _ in range(num_fragments)]
    trained = [(parameter, name) for parameter, name in names.items() if parameter.requires_grad]
    layers = [layer_of.get(parameter) for parameter, _ in trained]
    for place, (parameter, name) in enumerate(trained):
        following = (layer for layer in layers[place:] if layer is not None)
        fragments[next(following, len(blocks) - 1) % num_fragments][name] = parameter
    return fragments


def _flat(parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """What this rank holds of each: (n,)."""
    return [local_part(parameter.detach()).reshape(-1) for parameter in parameters.values()]


def _like(parameter: nn.Parameter, held: Tensor) -> Tensor:
    """What this rank holds of a tensor that is laid out as a parameter is."""
    if not isinstance(parameter, DTensor):
        return held.view(parameter.shape)
    local = held.view(parameter.to_local().shape)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _held(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `_like` was given, flat."""
    return {name: local_part(tensor).reshape(-1) for name, tensor in tensors.items()}


def _fill(targets: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        if name in saved:
            target.copy_(local_part(saved[name]))


def _sum_in(group: dist.ProcessGroup | None, values: Tensor) -> tuple[Tensor, int]:
    if group is None:
        return values, 1
    dist.all_reduce(values, group=group)
    return values, group.size()


@torch.no_grad()
def _take_first(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Begin equal: with the parameters and buffers of the first worker, as DDP does."""
    for tensor in module.state_dict().values():
        if isinstance(tensor, Tensor):
            dist.broadcast(local_part(tensor), group=group, group_src=0)
