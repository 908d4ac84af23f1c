"""What goes wrong inside a rank at a phase of the run: `entry` puts it there, one time in a run.

A fault is asked for by a variable. The process that has the asked rank at the asked phase makes a
file of that moment, so nobody else does it again, and breaks. What a rank can't do to its agent or
its link it leaves to whoever measures: it waits at its place until that is done.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.elastic.generation import Generation
from paceline.elastic.link import RankLink
from paceline.train.agreement import Agreement
from paceline.train.passes import Passes
from paceline.train.run_checkpoints import RunCheckpoints
from paceline.train.step_lines import StepLines
from paceline.train.trainer import Trainer

FAULT = "ELASTIC_FAULT"
"""The variable that holds an `Asked` as JSON."""
PHASES = (
    *("start", "step", "data", "forward", "backward", "collective"),
    *("evaluation", "checkpoint", "reshard", "shutdown"),
)
_MESSAGE = "the tokeniser ate it"
_ACT_LIMIT_S = 30.0
_OUT_OF_MEMORY = 137  # the exit code that a shell gives for what the kernel's OOM killer ended
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Asked:
    """A fault, and where."""

    kind: str
    """One of KINDS."""
    rank: int
    phase: str
    """One of PHASES."""
    step: int
    """At the first such phase from this step on; no matter at start, reshard and shutdown."""
    folder: str
    """Where the moment is noted, and a FIFO stands for a dead disk."""

    def text(self) -> str:
        """For the variable."""
        return json.dumps(asdict(self))

    @property
    def happened(self) -> Path:
        """Holds the moment by CLOCK_MONOTONIC; there from the fault on."""
        return Path(self.folder) / "happened"

    @property
    def acted(self) -> Path:
        """Made by whoever measures, when it has done its part."""
        return Path(self.folder) / "acted"


def _kill(_asked: Asked) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_asked: Asked) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _loop(_asked: Asked) -> None:
    while True:
        pass


def _other_collective(_asked: Asked) -> None:
    """Ask all ranks for what they don't expect."""
    dist.all_gather_single(torch.empty(dist.get_world_size()), torch.zeros(1))


def _dead_disk(asked: Asked) -> None:
    """Read what never comes: as from a disk that is dead, in a system call."""
    fifo = Path(asked.folder) / "disk"
    os.mkfifo(fifo)
    fifo.read_bytes()


def _exception(_asked: Asked) -> None:
    raise ValueError(_MESSAGE)


def _exit(_asked: Asked) -> None:
    os._exit(_OUT_OF_MEMORY)


def _full_disk(asked: Asked) -> None:
    """Take all that is left where the Run is."""
    with (Path(asked.folder) / "runs" / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"\0" * _CHUNK_BYTES)
        except OSError:  # no space is left
            return


def _wait_for_act(asked: Asked) -> None:
    deadline = time.monotonic() + _ACT_LIMIT_S
    while not asked.acted.exists() and time.monotonic() < deadline:
        time.sleep(0.001)


KINDS: dict[str, Callable[[Asked], None]] = {
    "kill -9": _kill,
    "SIGSTOP": _stop,
    "endless loop": _loop,
    "other collective": _other_collective,
    "dead disk": _dead_disk,
    "exception": _exception,
    "exit 137": _exit,
    "full disk": _full_disk,
    "agent kill -9": _wait_for_act,
    "agent SIGSTOP": _wait_for_act,
    "link cut": _wait_for_act,
}
"""Kind -> what the rank does."""


def put_in(text: str) -> None:
    """Let this process, if it gets the asked rank, break at the asked phase."""
    asked = Asked(**json.loads(text))
    place = _Place(asked)
    _PUT_IN[asked.phase](place)
    next_generation = RankLink.next_generation

    def entered(link: RankLink) -> tuple[Generation, int, int] | None:
        given = next_generation(link)
        if given is not None:
            place.rank, place.generation = given[1], given[0].number
            if asked.phase == ("start" if place.generation == 1 else "reshard"):
                place.break_now()
        return given

    RankLink.next_generation = entered


@dataclass
class _Place:
    """Where this process is."""

    asked: Asked
    rank: int = -1
    generation: int = 0
    step: int = 0
    """Steps done."""

    def break_now(self) -> None:
        """If this is the asked rank and step, and no process has done it yet."""
        asked = self.asked
        is_early = self.step < asked.step and asked.phase not in ("start", "reshard", "shutdown")
        if self.rank != asked.rank or is_early:
            return
        draft = asked.happened.with_suffix(f".{os.getpid()}")
        draft.write_text(repr(time.monotonic()))
        try:
            os.link(draft, asked.happened)  # whole, and only one can
        except FileExistsError:
            return
        finally:
            draft.unlink()  # or the next draft of this process were written into what is linked
        KINDS[asked.kind](asked)


def _before(owner: type, name: str) -> Callable[[_Place], None]:
    def put(place: _Place) -> None:
        original = getattr(owner, name)

        def broken(*arguments: Any, **told: Any) -> Any:
            place.break_now()
            return original(*arguments, **told)

        setattr(owner, name, broken)

    return put


def _in_step(place: _Place) -> None:
    _count_steps(place)
    step = Trainer.step

    def broken(trainer: Trainer, index: int, *others: Any, **told: Any) -> Any:
        place.break_now()
        return step(trainer, index, *others, **told)

    Trainer.step = broken


def _in_data(place: _Place) -> None:
    _count_steps(place)
    data_wait = StepLines.data_wait

    @contextmanager
    def broken(lines: StepLines) -> Iterator[None]:
        with data_wait(lines):
            place.break_now()
            yield

    StepLines.data_wait = broken


def _in_backward(place: _Place) -> None:
    _count_steps(place)
    step = Trainer.step
    hooked: set[int] = set()

    def broken(gradient: torch.Tensor) -> torch.Tensor:
        place.break_now()
        return gradient

    def watched(trainer: Trainer, index: int, *others: Any, **told: Any) -> Any:
        if id(trainer) not in hooked:
            hooked.add(id(trainer))
            list(trainer.module.parameters())[-1].register_hook(broken)
        return step(trainer, index, *others, **told)

    Trainer.step = watched


def _counted(owner: type, name: str) -> Callable[[_Place], None]:
    def put(place: _Place) -> None:
        _count_steps(place)
        _before(owner, name)(place)

    return put


def _count_steps(place: _Place) -> None:
    step = Trainer.step

    def counted(trainer: Trainer, index: int, *others: Any, **told: Any) -> Any:
        place.step = index
        result = step(trainer, index, *others, **told)
        place.step = index + 1
        return result

    Trainer.step = counted


def _nowhere_else(_place: _Place) -> None:
    """The entry into a generation is the phase."""


_PUT_IN: dict[str, Callable[[_Place], None]] = {
    "start": _nowhere_else,
    "reshard": _nowhere_else,
    "step": _in_step,
    "data": _in_data,
    "forward": _counted(Passes, "forward_backward"),
    "backward": _in_backward,
    "collective": _counted(Agreement, "in_step"),
    "evaluation": _counted(Trainer, "evaluate"),
    "checkpoint": _counted(RunCheckpoints, "save"),
    "shutdown": _before(RunCheckpoints, "finish"),
}
