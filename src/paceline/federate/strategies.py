"""What the server asks clients for in a round, and what it does with the sum."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.common import FitIns, FitRes, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import Strategy
from torch import Tensor

from paceline.config.job import read_job
from paceline.federate.grid import Floats
from paceline.federate.privacy import epsilon_of, noisy_mean
from paceline.federate.rounds import (
    TOLD,
    Factor,
    bits_of,
    factor_of,
    half_told,
    limit_of_norm,
    next_limit,
)
from paceline.federate.scale import Scale
from paceline.federate.server_optimizer import JOB_FILE, ServerOptimizer
from paceline.federate.shared_file import (
    Tensors,
    plus,
    read_tensors,
    trained_names,
    vector_of,
    write_tensors,
)
from paceline.federate.state import State, read_state, write_state
from paceline.federate.telling import Telling
from paceline.train.learning_rates import learning_rate


class Rounds(Strategy):
    """Rounds of whatever clients tell; the global parameters are what is shared.

    Args:
        stated: what both ends are told.
    """

    first = 1
    """Number of the next round."""

    def __init__(self, stated: dict[str, Any]) -> None:
        self.stated = stated
        self._shared = Path(stated["folder"]) / stated["shares"]
        self.tensors = read_tensors(self._shared, trained_names(self._shared.parent))
        self.taking_part = int(stated["taking-part"])
        self.asked, self.is_summed = 0, False
        self._nodes: list[int] = []

    @property
    def answered(self) -> int:
        """Clients that the sum of the round is of."""
        return len(self._nodes)

    @abstractmethod
    def count(self, number: int) -> int:
        """Numbers that a client tells in a round."""

    @abstractmethod
    def config(self, number: int) -> dict[str, Any]:
        """What clients must know of a round."""

    @abstractmethod
    def take(self, number: int, mean: Floats) -> None:
        """Change what is shared by the mean of what clients told."""

    @abstractmethod
    def line(self, number: int) -> dict[str, Any]:
        """What the line of a round says of what is told, before it is."""

    @abstractmethod
    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What it needs besides what is shared to go on: plain data and tensors."""

    @abstractmethod
    def go_on(self, settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take what `state` gave."""

    def keep(self, line: dict[str, Any]) -> None:
        """Write all of that after a round, and what is shared."""
        settings, own = self.state()
        write_state(self._shared.parent, State.of(line, settings, self.tensors, own))
        write_tensors(self._shared, self.tensors)

    def take_up(self) -> None:
        """Go on after the last round that was kept, if one was."""
        if (state := read_state(self._shared.parent)) is not None:
            self.first, self.tensors = state.round + 1, state.shared
            self.go_on(state.settings, state.own)

    def privacy(self) -> dict[str, float]:
        """What the rounds so far tell of a client at most; nothing where none is asked for."""
        return {}

    def initialize_parameters(self, client_manager: Any) -> Any:
        """What the folder has."""
        return self._parameters()

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        """Whom to ask, and what.

        The first round waits until everybody is there.
        """
        if server_round == 1:
            client_manager.wait_for(int(self.stated["clients"]), self.stated["timeout"])
        self.asked = min(self.taking_part, client_manager.num_available())
        self._nodes, self.is_summed = [], False
        if self.asked < 3:
            return []
        number = server_round - 1 + self.first
        asked = FitIns(parameters, {"round": number, **self.config(number)})
        return [(client, asked) for client in client_manager.sample(self.asked)]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[Any, FitRes]], failures: Any
    ) -> Any:
        """Take the mean; each result holds it, and nobody's own."""
        self._nodes = [int(client.cid) for client, _ in results]
        if self.answered < self.stated["least"] * self.asked:
            return None, {}
        [mean] = parameters_to_ndarrays(results[0][1].parameters)
        self.take(server_round - 1 + self.first, mean)
        self.is_summed = True
        return self._parameters(), {}

    def evaluate(self, server_round: int, parameters: Any) -> None:
        """Nothing: clients hold the data."""

    def configure_evaluate(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        """Nobody is asked."""
        return []

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
        """Nobody was asked."""
        return None, {}

    def _parameters(self) -> Any:
        return ndarrays_to_parameters(list(self.tensors.values()))


class Changes(Rounds):
    """Clients train for themselves; the mean of their changes is added."""

    def __init__(self, stated: dict[str, Any]) -> None:
        super().__init__(stated)
        self._clip, self._noise = float(stated["clip"]), float(stated["noise"])
        factors = {factor_of(number, stated["shares"]) for number in (1, 2)}
        self._limits: dict[Factor, float] = dict.fromkeys(factors, float(stated["limit"]))
        if self._clip:
            self._limits = {
                each: limit_of_norm(self._clip, len(vector_of(self.tensors, each)))
                for each in self._limits
            }
        self._num_summed = 0

    def count(self, number: int) -> int:
        """A change, and unless there is privacy its size."""
        return self._size(number) + (0 if self._clip else TOLD)

    def config(self, number: int) -> dict[str, Any]:
        """What is trained, and the range of the change."""
        factor = self._factor(number)
        return {"factor": factor, "limit": self._limits[factor]}

    def take(self, number: int, mean: Floats) -> None:
        """Add the mean, with the noise that was asked for; the next range follows from it."""
        factor = self._factor(number)
        limit = self._limits[factor]
        mean = mean * (limit / half_told(self.stated))
        if self._clip:
            stream = np.random.default_rng()
            mean = noisy_mean(mean, self.answered, self._noise, self._clip, stream)
        else:
            mean, sizes = mean[:-TOLD], mean[-TOLD:]
            self._limits[factor] = next_limit(limit, float(sizes.mean()))
        self.tensors = plus(self.tensors, factor, mean)
        self._num_summed += 1

    def line(self, number: int) -> dict[str, Any]:
        """Matrix and range."""
        return {**self.config(number), "numbers": self._size(number)}

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Ranges, and the rounds that count for privacy."""
        return {"limits": self._limits, "num_summed": self._num_summed}, {}

    def go_on(self, settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """See `state`."""
        self._limits, self._num_summed = settings["limits"], settings["num_summed"]

    def privacy(self) -> dict[str, float]:
        """See `Rounds`."""
        if not self._clip:
            return {}
        delta = float(self.stated["delta"])
        found = epsilon_of(self._noise, delta, self._num_summed)
        return {"clip": self._clip, "noise": self._noise, "epsilon": found, "delta": delta}

    def _factor(self, number: int) -> Factor:
        return factor_of(number, self.stated["shares"])

    def _size(self, number: int) -> int:
        return len(vector_of(self.tensors, self._factor(number)))


class LatticeRounds(Rounds):
    """Clients tell what they found by a lattice (`telling`), weighed by samples."""

    first = 0
    factor: Literal["all", "gradient"]

    def __init__(self, stated: dict[str, Any]) -> None:
        super().__init__(stated)
        self._scale = Scale.at_first(self.tensors)
        self._sizes: Floats | None = None

    def count(self, number: int) -> int:
        """A head, and unless it is round 0 what was found."""
        telling = self._telling(number)
        return telling.num_head + telling.num_told

    def config(self, number: int) -> dict[str, Any]:
        """How it is told."""
        return {"scale": self._scale.as_json(), "mark": self._telling(number).mark}

    def take(self, number: int, mean: Floats) -> None:
        """Change what is shared, but for the round that tells sizes alone."""
        sums = np.rint(mean * self.answered).astype(np.int64)
        found = self._telling(number).understood(sums, self._nodes)
        if number:
            self.tensors = self.after(number, found.mean)
        grown, scale = self.growth(number), found.next_scale(self.tensors, self._sizes, self._scale)
        self._scale = scale._replace(sizes=scale.sizes * grown)
        self._sizes = found.sizes * grown

    def growth(self, number: int) -> float:
        """How much larger the next round's numbers will be, as far as that is known."""
        return 1.0

    @abstractmethod
    def after(self, number: int, mean: Floats) -> Tensors:
        """What is shared after a round.

        Args:
            mean: (n,) of what clients found.
        """

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The next scale, and what it follows from."""
        sizes = None if self._sizes is None else self._sizes.tolist()
        return {"scale": self._scale.as_json(), "sizes": sizes}, {}

    def go_on(self, settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """See `state`."""
        sizes, self._scale = settings["sizes"], Scale.of_json(settings["scale"])
        self._sizes = None if sizes is None else np.array(sizes, np.float64)

    def line(self, number: int) -> dict[str, Any]:
        """The lattice's step, and bits of a number."""
        telling, bits = self._telling(number), bits_of(self.stated, number)
        told = {"factor": self.factor, "step": telling.step, "bits": bits}
        return {**told, "numbers": telling.num_told}

    def _telling(self, number: int) -> Telling:
        return Telling.of_round(self.stated, self.tensors, number, self._scale)


class FedAvg(LatticeRounds):
    """Clients train for themselves; the mean of their changes is added."""

    factor = "all"

    def __init__(self, stated: dict[str, Any]) -> None:
        super().__init__(stated)
        self._optim = read_job(self._shared.parent / JOB_FILE, []).optim

    def growth(self, number: int) -> float:
        """Changes grow with the learning rate."""
        before, after = self._rate(number), self._rate(number + 1)
        return after / before if before else 1.0

    def _rate(self, number: int) -> float:
        """Mean learning rate of a round's steps; round 0 trains as round 1 does."""
        steps, rounds = int(self.stated["steps"]), int(self.stated["rounds"])
        last = steps * min(max(number, 1), rounds)
        rates = [
            learning_rate(self._optim, index, steps * rounds) for index in range(last - steps, last)
        ]
        return sum(rates) / steps

    def after(self, number: int, mean: Floats) -> Tensors:
        """See `LatticeRounds`."""
        return plus(self.tensors, "all", mean)


class Gradients(LatticeRounds):
    """Clients tell gradients of a batch each; the server makes a step with their mean."""

    factor = "gradient"

    def __init__(self, stated: dict[str, Any]) -> None:
        super().__init__(stated)
        self._optimizer = ServerOptimizer(self._shared.parent, self.tensors)

    def after(self, number: int, mean: Floats) -> Tensors:
        """See `LatticeRounds`."""
        return self._optimizer.step(number - 1, mean)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The optimizer's, too."""
        settings, _ = super().state()
        return settings, self._optimizer.state

    def go_on(self, settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """See `state`."""
        super().go_on(settings, tensors)
        self._optimizer = ServerOptimizer(self._shared.parent, self.tensors)
        self._optimizer.go_on(tensors)


STRATEGIES: Mapping[str, type[Rounds]] = {
    "changes": Changes,
    "fedavg": FedAvg,
    "gradients": Gradients,
}
"""By what clients tell."""
