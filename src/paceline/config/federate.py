"""Federate: who trains together, how often they meet, and what the server may learn."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.config.errors import InputError
from paceline.config.files import read_toml
from paceline.config.frozen import Auto, Count, FrozenConfig

_Bits = Annotated[int, Field(ge=2, le=16, strict=True)]


class Privacy(FrozenConfig):
    """Table [federate.privacy]: how little the adapters of all rounds may tell of a client."""

    epsilon: float = Field(gt=0, le=1000)
    """That all rounds together may come to, at `delta`: a client, with all that it has, changes the
    probability of whatever can be seen in the adapters by a factor of at most e^epsilon."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """Probability that epsilon doesn't hold; below 1 / clients."""
    clip: float = Field(gt=0, le=1e6)
    """L2 norm of a client's change in a round: what is longer is scaled down to it."""
    noise: Annotated[float, Field(gt=0, le=1e6)] | Auto = "auto"
    """Standard deviation of the noise on each number of the sum, in multiples of `clip`. "auto":
    the least that keeps epsilon."""


class Federate(FrozenConfig):
    """Table [federate] of a file that `paceline federate` takes."""

    job: str
    """File of the Job that each client trains on its part of the data, beside this one. With
    `finetune.method` = "lora" adapters are shared, else all weights that it trains."""
    tells: Literal["changes", "fedavg", "gradients"] = "changes"
    """What a client tells in a round. "changes": what `steps` of its own come to, on one matrix of
    each adapter, so that the mean of their products is exact; few rounds learn something. "fedavg":
    the same of both matrices at once, weighed by samples; short rounds learn the most. "gradients":
    that of one batch, and the server makes the step: what one process does that has all data."""
    clients: int = Field(8, ge=3, le=1000)
    """That there are."""
    rounds: int = Field(10, gt=0, le=10**6)
    """How often what clients tell is summed."""
    steps: Count = 20
    """Optimizer steps of a client in a round, unless it tells gradients."""
    share: float = Field(1.0, gt=0, le=1)
    """Of the clients, drawn anew for each round; at least 3 take part."""
    least: float = Field(0.5, gt=0, le=1)
    """Share of those that take part whose changes must arrive; else the round changes nothing."""
    split: Literal["even", "dirichlet", "source"] = "even"
    """Who has which rows. "even": equally many of each source, drawn at random. "dirichlet": of
    each source shares that are drawn from Dirichlet(alpha). "source": each client has the rows of
    one source."""
    alpha: float = Field(0.5, gt=0, le=1e6)
    """Of "dirichlet": the smaller, the less alike are the clients' parts."""
    bits: _Bits | Annotated[tuple[_Bits, ...], Field(strict=False, min_length=1)] = 4
    """Of a number. With "changes" before masks, which add log2 of the clients that take part; else
    masks and all, and it may be a list: of equal parts of the rounds, one after the other. The
    first steps of "gradients" suffer most from noise."""
    told: float = Field(1.0, gt=0, le=1)
    """Share of the numbers that a client tells, but for "changes": the fewer, the more noise."""
    timeout_s: float = Field(600.0, gt=0, le=1e6)
    """A client that hasn't answered after so long has dropped out of the round."""
    privacy: Privacy | None = None
    """Noise on what is summed, so that adapters tell little of a client; left out: none."""

    @property
    def all_bits(self) -> tuple[int, ...]:
        """Bits of each part of the rounds."""
        return self.bits if isinstance(self.bits, tuple) else (self.bits,)

    @property
    def steps_of_job(self) -> int:
        """Optimizer steps of all rounds, which the schedule of the learning rate spans."""
        return self.rounds * (1 if self.tells == "gradients" else self.steps)

    @property
    def taking_part(self) -> int:
        """Clients of a round."""
        return max(3, round(self.share * self.clients))


def read_federate(file: Path) -> Federate:
    """Read the table [federate] of a file.

    Raises:
        InputError: one sentence with what is wrong.
    """
    raw = read_toml(file, "give a file with a table [federate]")
    table = raw.pop("federate", None)
    if not isinstance(table, dict) or raw:
        has = ", ".join(f"[{name}]" for name in raw) or "none"
        raise InputError(
            f"{file} needs the one table [federate], and has {has}: give it, and name the Job by "
            "federate.job."
        )
    found = Federate.parse(table, "federate")
    if found.split != "dirichlet" and "alpha" in found.model_fields_set:
        raise InputError(
            f'federate.alpha has no effect with split = "{found.split}": leave it out, or use '
            'split = "dirichlet".'
        )
    if found.tells == "changes" and "told" in found.model_fields_set:
        raise InputError(
            'federate.told has no effect with tells = "changes": leave it out, or use "fedavg" or '
            '"gradients".'
        )
    if isinstance(found.bits, tuple) and (
        found.tells == "changes" or len(found.bits) > found.rounds
    ):
        raise InputError(
            f"federate.bits has {len(found.bits)} values for parts of {found.rounds} rounds: give "
            'one value, or with tells = "fedavg" or "gradients" no more than there are rounds.'
        )
    if found.tells == "gradients" and "steps" in found.model_fields_set:
        raise InputError(
            'federate.steps is not for tells = "gradients", where a round is a step of the '
            'server: leave it out, or use "fedavg" or "changes".'
        )
    if found.tells != "changes" and found.privacy is not None:
        raise InputError(
            f'federate.privacy is not for tells = "{found.tells}", which doesn\'t bound what a '
            'client tells: leave it out, or use tells = "changes".'
        )
    return found
