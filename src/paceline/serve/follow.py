"""Follow: the newest good checkpoint of a run, taken while texts are made.

A thread looks for newer checkpoints, verifies one and reads it through, layer by layer, beside the
engine: so what is damaged is refused while the old weights serve. Between two steps it is read once
more, into the network, from files that stay open meanwhile: a layer is in memory beside the
weights, and no pass sees some old and some new ones. Texts that are under way go on with the new
weights, their keys and values computed anew.
"""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from paceline.config.errors import InputError
from paceline.observe.run import Run, complete_steps
from paceline.serve.metrics import Metrics
from paceline.serve.network import in_layers, weights_for
from paceline.serve.service import Service
from paceline.train.kept_weights import KeptWeights

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
            with ExitStack() as files:
                try:
                    kept = weights_for(self._service.engine.decoder, self._run, newer[-1])
                    files.enter_context(kept.held())
                    deque(in_layers(kept), maxlen=0)
                except (InputError, OSError) as error:
                    if newer[-1] in self._newer():  # else the run has removed it meanwhile
                        self._skip(newer[-1], error)
                    newer.pop()
                    continue
                self._take(kept, time.perf_counter() - begun_s)
                return

    def _newer(self) -> list[int]:
        steps = complete_steps(self._run.checkpoint_folder)
        return [step for step in steps if step > self.step and step not in self._skipped]

    def _skip(self, step: int, error: Exception) -> None:
        self._skipped.add(step)
        self._metrics.damaged.inc()
        self._say(f"step {step} is skipped, step {self.step} is served on: {error}")

    def _take(self, kept: KeptWeights, read_s: float) -> None:
        engine, begun_s = self._service.engine, time.perf_counter()

        def swap() -> float:
            began_s = time.perf_counter()
            engine.take_weights(in_layers(kept))
            self.step = kept.step
            return time.perf_counter() - began_s

        swap_s = self._service.between_steps(swap).result()
        self._metrics.swaps.inc()
        waited_s = time.perf_counter() - begun_s - swap_s
        self._say(
            f"step {kept.step} is served from now on: verified in {read_s:.2f} s, waited "
            f"{waited_s:.2f} s for a step, swapped in {swap_s:.2f} s"
        )

    def _run_on(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            try:
                self.look()
            except Exception as error:  # what is served goes on
                traceback.print_exception(error)
