"""Follow: the newest good checkpoint of a run, taken while texts are made.

A thread looks for newer checkpoints and reads one beside the engine, which for that time needs
twice the memory of the weights. Only copying them into the network happens between two steps; texts
that are under way go on with the new weights, their keys and values computed anew.
"""

import threading
import time
import traceback
from collections.abc import Callable

from torch import Tensor

from paceline.config.errors import InputError
from paceline.observe.run import Run, complete_steps
from paceline.serve.metrics import Metrics
from paceline.serve.network import read_checkpoint
from paceline.serve.service import Service

LOOK_EVERY_S = 2.0
_PATIENCE_S = 5.0


class Follower:
    """Gives a service the newest weights of a run.

    Args:
        step: of the weights that it has.
        say: takes a sentence for a person.
    """

    def __init__(
        self, run: Run, service: Service, step: int, metrics: Metrics, say: Callable[[str], None]
    ) -> None:
        self._run, self._service, self._metrics, self._say = run, service, metrics, say
        self.step = step
        self._skipped: set[int] = set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run_on, name="follow", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; wait for a moment where it reads."""
        self._is_over.set()
        self._thread.join(_PATIENCE_S)

    def look(self) -> None:
        """Take the newest good checkpoint, where it is newer."""
        newer = self._newer()
        while newer and not self._is_over.is_set():
            begun_s = time.perf_counter()
            try:
                _, weights = read_checkpoint(self._run, self._service.engine.decoder, newer[-1])
            except (InputError, OSError) as error:
                if newer[-1] in self._newer():  # else the run has removed it meanwhile
                    self._skip(newer[-1], error)
                newer.pop()
                continue
            self._take(newer[-1], weights, time.perf_counter() - begun_s)
            return

    def _newer(self) -> list[int]:
        steps = complete_steps(self._run.checkpoint_folder)
        return [step for step in steps if step > self.step and step not in self._skipped]

    def _skip(self, step: int, error: Exception) -> None:
        self._skipped.add(step)
        self._metrics.damaged.inc()
        self._say(f"step {step} is skipped, step {self.step} is served on: {error}")

    def _take(self, step: int, weights: dict[str, Tensor], read_s: float) -> None:
        engine, begun_s = self._service.engine, time.perf_counter()

        def swap() -> float:
            began_s = time.perf_counter()
            engine.take_weights(weights)
            self.step = step
            return time.perf_counter() - began_s

        swap_s = self._service.between_steps(swap).result()
        self._metrics.swaps.inc()
        waited_s = time.perf_counter() - begun_s - swap_s
        self._say(
            f"step {step} is served from now on: read in {read_s:.2f} s, waited {waited_s:.2f} s "
            f"for a step, swapped in {swap_s:.2f} s"
        )

    def _run_on(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            try:
                self.look()
            except Exception as error:  # what is served goes on
                traceback.print_exception(error)
