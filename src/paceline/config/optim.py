"""The optimizer of a Job: which one, its settings, groups of parameters, the learning rate.

docs/optimizers.md says what each does and when to use it.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.config.frozen import CountOrNone, FrozenConfig
from paceline.config.recommender import RowOptim

OptimizerName = Literal[
    "adamw", "sgd", "lion", "adafactor", "lars", "lamb", "muon", "schedulefree"
]  # fmt: skip
Betas = Annotated[tuple[float, float], Field(strict=False)]

TAKES: Mapping[str, frozenset[str]] = {
    "adamw": frozenset({"betas", "eps"}),
    "sgd": frozenset({"momentum", "nesterov"}),
    "lion": frozenset({"betas"}),
    "adafactor": frozenset(),
    "lars": frozenset({"momentum", "trust"}),
    "lamb": frozenset({"betas", "eps"}),
    "muon": frozenset({"betas", "eps", "momentum"}),
    "schedulefree": frozenset({"betas", "eps"}),
}
"""Settings of `Optim` that an optimizer takes besides those that all take."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"weight_decay": 1e-4},
    "lion": {"betas": (0.9, 0.99)},
    "lars": {"weight_decay": 1e-4},
    "lamb": {"betas": (0.9, 0.999), "eps": 1e-6},
    "muon": {"momentum": 0.95},
    "schedulefree": {"betas": (0.9, 0.999), "schedule": "constant"},
}
"""Where an optimizer's own differ from those of the fields."""
_STATE_BYTES: Mapping[str, float] = {
    "adamw": 8, "sgd": 4, "lion": 4, "adafactor": 0.01, "lars": 4, "lamb": 8, "schedulefree": 8,
}  # fmt: skip


class ParameterGroup(FrozenConfig):
    """Parameters that step by settings of their own. Of groups that a parameter matches, the first
    counts."""

    pattern: str = Field(min_length=1)
    """Of names, with * and ? as in file names: "*.attention.*", "embed.weight"."""
    lr_factor: float = Field(1.0, ge=0, le=1e6)
    """Times the learning rate; 0: they stay as they are."""
    weight_decay: float | None = Field(None, ge=0, le=1e3)
    """None: optim.weight_decay for matrices, none for vectors."""
    betas: Betas | None = None
    """None: optim.betas."""
    momentum: float | None = Field(None, ge=0, lt=1)
    """None: optim.momentum."""
    adamw: bool = False
    """With optim.name = "muon": by its AdamW, though they are matrices."""


class Optim(FrozenConfig):
    """The optimizer, its learning-rate schedule and gradient clipping. The defaults are those of
    AdamW; docs/optimizers.md has those of the others."""

    name: OptimizerName = "adamw"
    lr: float = Field(3e-4, gt=0, le=1e3)
    """Peak learning rate."""
    betas: Betas = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0, le=1e3)
    momentum: float = Field(0.9, ge=0, lt=1)
    """Of sgd, lars and muon (0.95)."""
    nesterov: bool = False
    """Whether sgd looks ahead along its momentum."""
    trust: float = Field(0.001, gt=0, le=1e3)
    """Of lars: the step of a matrix over its norm, where lr = 1."""
    weight_decay: float = Field(0.1, ge=0, le=1e3)
    """Weight decay of matrices, decoupled from the gradient (with sgd and lars, 1e-4, added to it);
    vectors (norms, biases) have none."""
    clip_norm: float = Field(1.0, ge=0, le=1e15)
    """Largest global gradient norm; 0: gradients are not clipped."""
    schedule: Literal["cosine", "wsd", "polynomial", "inverse_sqrt", "constant"] = "cosine"
    """After the warm-up: cosine to the floor; or stay and fall linearly at the end; or fall to the
    floor as `power` says; or by the root of the steps, to the floor at the least; or stay."""
    warmup_steps: CountOrNone = 0
    decay_steps: CountOrNone = 0
    """Length of the last, falling part of "wsd", steps."""
    power: float = Field(1.0, gt=0, le=10)
    """Of "polynomial": 1 falls in a straight line, 2 is usual with lars."""
    final_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the last step over the peak."""
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False, max_length=256)] = ()
    """Parameters that step by settings of their own, as [[optim.groups]]."""
    rows: RowOptim = RowOptim()

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
            return given
        return {**_DEFAULTS.get(given["name"], {}), **given}

    @property
    def problem(self) -> str | None:
        """What is set that the optimizer doesn't take, as a sentence; None: nothing."""
        takes = TAKES[self.name]
        for setting in ("betas", "eps", "momentum", "nesterov", "trust"):
            value = getattr(self, setting)
            if setting not in takes and value != type(self).model_fields[setting].default:
                return _of_others(f"optim.{setting} = {_shown(value)}", setting, self.name)
        for group in self.groups:
            for setting in ("betas", "momentum"):
                value = getattr(group, setting)
                if setting not in takes and value is not None:
                    what = f'{setting} = {_shown(value)} of group "{group.pattern}" of optim.groups'
                    return _of_others(what, setting, self.name)
            if group.adamw and self.name != "muon":
                return (
                    f'adamw = true of group "{group.pattern}" of optim.groups has no effect with '
                    f'optim.name = "{self.name}": leave it out.'
                )
        if self.power != 1.0 and self.schedule != "polynomial":
            return (
                f"optim.power = {self.power:g} has no effect with optim.schedule = "
                f'"{self.schedule}": leave it out, or use schedule = "polynomial".'
            )
        if self.nesterov and not self.momentum:
            return "optim.nesterov = true has no effect with optim.momentum = 0: leave it out."
        if self.name == "schedulefree" and self.schedule != "constant":
            return (
                f'optim.schedule = "{self.schedule}" doesn\'t go with optim.name = "schedulefree", '
                'whose mean of the weights takes its place: use "constant".'
            )
        return None

    def state_bytes(self, matrix_share: float) -> float:
        """What is kept for a parameter, bytes in fp32, master copies aside.

        Args:
            matrix_share: of the parameters, the part in matrices inside the network, which Muon
                steps.
        """
        if self.name == "muon":
            return 4 * matrix_share + 8 * (1 - matrix_share)
        return _STATE_BYTES[self.name]


def _of_others(what: str, setting: str, name: str) -> str:
    others = " or ".join(f'"{each}"' for each, takes in TAKES.items() if setting in takes)
    return f'{what} has no effect with optim.name = "{name}": leave it out, or use {others}.'


def _shown(value: Any) -> str:
    return str(list(value) if isinstance(value, tuple) else value).lower()
