"""Failure: what a rank that fails leaves for whoever started it.

It is a file of JSON that the launcher names, written at the moment of the error: what is closed
afterwards may wait for other ranks. A person is shown the part of the traceback that is theirs; the
whole of it goes to the rank's log.

Not here: who else is missing when a collective fails (`elastic.peer_failure`), and what the
launcher does about it (`train.launch`).
"""

import dis
import json
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist

from paceline.comm.rendezvous import exit_rank, ranks_from_env
from paceline.config.errors import InputError, RunError, StoppedInTimeError

FILE = "PACELINE_FAILURE_FILE"
"""The variable that names the file."""

_OURS = Path(__file__).parents[1]
_TORCHS = Path(torch.__file__).parent
_STANDARD = Path(sysconfig.get_path("stdlib"))
_RAISE = dis.opmap["RAISE_VARARGS"]


class LostPeerError(RunError):
    """A rank failed only because another one was gone or late."""


class StateLostError(LostPeerError):
    """With other ranks the last state of the run was lost, and no process has its first one."""


@dataclass(frozen=True)
class Failure:
    """A rank's own account of its end."""

    kind: Literal["input", "run", "lost", "program"]
    """Wrong input; the ranks agreed that the run can't go on; another rank is missing; an error."""
    text: str
    """A sentence; of an error, its traceback."""
    time: float
    """Unix time, by which the first of several is known."""

    @property
    def is_own(self) -> bool:
        """Whether it is more than another rank's failure."""
        return self.kind != "lost"

    @staticmethod
    def of(error: BaseException) -> "Failure":
        """What there is to say of an exception."""
        now = time.time()
        kinds = {InputError: "input", LostPeerError: "lost", RunError: "run"}
        for known, kind in kinds.items():
            if isinstance(error, known):
                return Failure(kind, str(error), now)  # type: ignore[arg-type]
        return Failure("program", user_traceback(error), now)

    @staticmethod
    def read(file: Path) -> "Failure | None":
        """What a rank left, None where it left nothing."""
        with suppress(FileNotFoundError):
            return Failure(**json.loads(file.read_text()))
        return None

    def write(self, file: Path) -> None:
        """Leave it, whole or not at all; a process has one failure, its first."""
        if not file.exists():
            draft = file.with_suffix(".draft")
            draft.write_text(json.dumps(asdict(self)))
            draft.replace(file)


@contextmanager
def report_at_once() -> Iterator[None]:
    """Leave an error of this rank's own to its launcher, if it has one, before anything closes."""
    try:
        yield
    except BaseException as error:
        if not is_lost_peer(error) and not isinstance(error, StoppedInTimeError):
            report(error)
        raise


def report(error: BaseException) -> None:
    """Leave it to the launcher, if there is one, and the whole traceback in the log."""
    file = os.environ.get(FILE)
    if file is None or Path(file).exists():
        return
    traceback.print_exception(error)
    Failure.of(error).write(Path(file))


def is_lost_peer(error: BaseException) -> bool:
    """Whether a rank failed only because another one was gone: by what the backend says, unless a
    person's code raises it."""
    if not isinstance(error, RuntimeError) or _is_raised_elsewhere(error.__traceback__):
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)


def _is_raised_elsewhere(trace: TracebackType | None) -> bool:
    """Whether it comes from a `raise` that is neither Paceline's nor torch's.

    A call into torch's C++ has no frame of its own, but it is no `raise` either.
    """
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    is_raise = code.co_code[trace.tb_lasti] == _RAISE
    return is_raise and not _is_in(code.co_filename, (_OURS, _TORCHS))


def user_traceback(error: BaseException) -> str:
    """An error's traceback as a person should see it: where their own code failed, that alone."""
    whole = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = whole
    while each is not None:
        each.stack = traceback.StackSummary.from_list(_theirs(each.stack))
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return "".join(whole.format()).rstrip("\n")


def install_plain_excepthook() -> None:
    """From now on, what nobody catches in this program ends it as it ends the command line: the two
    exceptions that are for a person by their text alone, others by the part that is theirs.

    A rank that a launcher gave ends at once: at the interpreter's end it would wait for the others.
    """
    sys.excepthook = _say_plainly


def _say_plainly(
    _kind: type[BaseException], error: BaseException, _trace: TracebackType | None
) -> None:
    if isinstance(error, InputError):
        text = f"paceline: {error}"
    else:
        text = str(error) if isinstance(error, RunError) else user_traceback(error)
    # Where there is a process group, torch calls this with a standard error that it prints later.
    print(text, file=sys.__stderr__, flush=True)
    code = 2 if isinstance(error, InputError) else 1
    if ranks_from_env("cpu") is not None:
        exit_rank(code)
    sys.exit(code)


def _theirs(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """A person's frames behind the last of Paceline's, and what the last of them called; all frames
    where none is a person's."""
    frames = list(stack)
    ours = [at for at, frame in enumerate(frames) if _is_in(frame.filename, (_OURS,))]
    behind = frames[ours[-1] + 1 :] if ours else frames
    own = [at for at, frame in enumerate(behind) if _is_a_persons(frame.filename)]
    if not own:
        return frames
    return [behind[at] for at in own] + behind[own[-1] + 1 :]


def _is_a_persons(file: str) -> bool:
    """Whether it is neither Paceline's nor the standard library's nor an installed package's."""
    return not (
        file.startswith("<frozen ")
        or "site-packages" in Path(file).parts
        or _is_in(file, (_OURS, _TORCHS, _STANDARD))
    )


def _is_in(file: str, folders: Iterable[Path]) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in folders)
