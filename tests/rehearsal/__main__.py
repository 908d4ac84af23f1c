"""Run the cases, one JSON object a line: {"case", "error", "kernels", "streams", "seconds"}.

python -m tests.rehearsal FOLDER [CASE ...]     the C++ half is built in FOLDER
"""

import json
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.rehearsal.device import build, load, pretend


def main(folder: Path, names: list[str]) -> int:
    """Print a line for each case; 1 where one failed."""
    log = load(build(folder))
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.rehearsal.cases import CASES, FAULTS
    from tests.rehearsal.streams import Watch

    pretend()
    failed = False
    for name, case in {**CASES, **{name: case for name, (case, _) in FAULTS.items()}}.items():
        if names and name not in names:
            continue
        began, error = time.monotonic(), None
        fake, watch = FakeTensorMode(allow_non_fake_inputs=True), Watch(log, case.answer)
        try:
            with _group(case.num_ranks), _threads_under(fake, watch), fake, watch:
                case.run()
        except BaseException:
            error, failed = traceback.format_exc(), True
        told = {"case": name, "error": error, "kernels": watch.num_kernels}
        told |= {"streams": len(watch.streams), "seconds": round(time.monotonic() - began, 1)}
        print(json.dumps(told), flush=True)
    return int(failed)


@contextmanager
def _group(num_ranks: int) -> Iterator[None]:
    """A process group of one process that answers for all: nothing is sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if num_ranks == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _threads_under(fake: Any, watch: Any) -> Iterator[None]:
    """The queue of collectives has a thread of its own; modes are each thread's."""
    run = threading.Thread.run

    def under_modes(thread: threading.Thread) -> None:
        with fake, watch:
            run(thread)

    threading.Thread.run = under_modes  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
