"""Serving: how an engine shares out a device among requests."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from paceline.config.errors import InputError
from paceline.config.frozen import Auto, Count, FrozenConfig, Ways
from paceline.config.override import override
from paceline.config.sampling import Sampling

S = TypeVar("S", bound="ServingSettings")
WeightForm = Literal["as_trained", "int8", "int4"]
"""How a network's matrices are stored while it is served."""
KeyForm = Literal["as_weights", "int8"]
"""How keys and values are."""


class Serving(FrozenConfig):
    """The memory and the forward passes of an engine."""

    precision: Literal["fp32", "bf16"] | Auto = "auto"
    """Type of weights, keys and values; "auto" is that of the weights."""
    weights: WeightForm | Auto = "as_trained"
    """Matrices in 8 or 4 bits make other texts, and quicker where few tokens are computed at a
    time. "auto" is int8 where it was measured to be quicker for any number of texts up to
    max_sequences, and for prompts; else as_trained."""
    weight_group: Literal[32, 64, 128, 256] = 64
    """Neighbouring weights that share a scale in int4."""
    tp: Ways = 1
    """Processes that share the heads and columns of every layer, each on a device of its own."""
    ep: Ways = 1
    """Times as many of them, which share the experts of every layer."""
    block_size: Ways = 32
    """Tokens of a block of keys and values."""
    kv: KeyForm | Auto = "as_weights"
    """Keys and values in 8 bits make other texts, and take a half of bf16's memory or a quarter of
    fp32's. "auto" is int8 where it was measured to be quicker for few and many texts, short and
    long ones; else as_weights, in the type of the weights."""
    kv_gb: Annotated[float, Field(gt=0, le=1e6)] | Auto = "auto"
    """Memory for keys and values in GB; "auto" is what max_sequences whole sequences take, at most
    a quarter of what is free."""
    host_gb: Annotated[float, Field(ge=0, le=1e6)] | Auto = "auto"
    """Host memory in GB for blocks of keys and values that kv_gb has no room for; "auto" is as much
    as kv_gb, at most an eighth of what is free, and is used where fetching is quicker than
    computing anew."""
    disk_gb: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """And in files, for what host memory has no room for."""
    disk_folder: str = ""
    """Where files are; they are removed at the end."""
    weights_gb: Annotated[float, Field(gt=0, le=1e6)] | Auto = "auto"
    """Memory for weights in GB; layers that it doesn't hold lie in files in disk_folder, with a
    CUDA device in host memory, and are copied while others compute. "auto" holds all."""
    max_tokens: Count | Auto = "auto"
    """Tokens of a forward pass; more of them make prompts quicker and let the others wait longer.
    "auto" is 512, and 64 with exact."""
    max_sequences: Count = 64
    """Texts that are made at a time; the others wait."""
    max_waiting: Count = 1024
    """Texts that may wait; requests for more are refused."""
    timeout_s: Annotated[float, Field(gt=0, le=1e6)] = 600.0
    """Seconds after which a request that isn't answered is ended."""
    stop_s: Annotated[float, Field(ge=0, le=1e6)] = 30.0
    """Seconds that requests get to end when the server is asked to stop."""
    share_prefixes: bool = True
    """Whether requests that begin alike share keys and values."""
    exact: bool = False
    """Whether logits have the same bits whatever else is computed beside them."""
    speculate: Literal["off", "ngram", "draft", "heads", "auto"] = "off"
    """How tokens are guessed, to compute several at once: by what followed the same tokens earlier
    in the text ("ngram"), by a small network ("draft"), by heads that were trained for this network
    ("heads"), or by what promises most in each step, which may be nothing ("auto"). The text stays
    the same."""
    draft: str | None = None
    """What guesses, with the network's tokenizer: the run or folder of a small network, or a run of
    heads."""
    guess_tokens: Ways = 6
    """Tokens that are guessed of a text at a time; with "auto" the most."""

    @property
    def num_ranks(self) -> int:
        """Processes that share a network."""
        return self.tp * self.ep


class Retrieval(FrozenConfig):
    """Documents that an endpoint's answers are made from."""

    index: str | None = None
    """Folder that `paceline index` wrote; without one nothing is retrieved."""
    encoder: str | None = None
    """The run or folder that made it, where it isn't at its place any more."""
    k: Annotated[int, Field(ge=0, le=64)] = 4
    """Chunks that a request's prompt gets which doesn't say how many; 0: none."""
    probes: Ways | Auto = "auto"
    """Lists of the index that a search looks at; "auto" is what the index was measured to need."""
    memory_gb: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Memory for copies of the lists that are searched most, GB; others are mapped from disk."""
    instruction: str = "Answer with the help of these texts."
    """What a prompt says before the chunks."""


class ServingSettings(FrozenConfig):
    """What a person sets of texts: how they are served, and how tokens are chosen."""

    serve: Serving = Serving()
    sampling: Sampling = Sampling()


class EndpointSettings(ServingSettings):
    """What a person sets of an endpoint."""

    retrieval: Retrieval = Retrieval()


def read_settings(overrides: Iterable[str], **sampling: Any) -> ServingSettings:
    """The defaults with "serve.key=value" and "sampling.key=value" applied.

    Args:
        sampling: settings of it that have an option of their own; None: not given.

    Raises:
        InputError: an unknown setting, or a value that it can't have.
    """
    raw = {"sampling": {k: v for k, v in sampling.items() if v is not None}}
    return _read(ServingSettings, overrides, raw)


def read_endpoint_settings(overrides: Iterable[str]) -> EndpointSettings:
    """The same of an endpoint, with "retrieval.key=value".

    Raises:
        InputError: as `read_settings`.
    """
    return _read(EndpointSettings, overrides, {})


def _read(kind: type[S], overrides: Iterable[str], raw: dict[str, Any]) -> S:
    for text in overrides:
        override(raw, text)
    for name, field in kind.model_fields.items():
        section = field.annotation
        if name in raw and isinstance(section, type) and issubclass(section, FrozenConfig):
            raw[name] = section.parse(raw[name], name)
    settings = kind.parse(raw)
    for name, needed in _without_effect(settings):
        raise InputError(f"{name} has no effect without {needed}: give that, or leave it out.")
    return settings


def _without_effect(settings: ServingSettings) -> Iterator[tuple[str, str]]:
    """Settings that were given and do nothing, and what they need."""
    serve = settings.serve
    needs = {
        "guess_tokens": ("serve.speculate", serve.speculate != "off"),
        "weight_group": ('serve.weights = "int4"', serve.weights == "int4"),
        "disk_folder": (
            "serve.disk_gb or serve.weights_gb",
            serve.disk_gb > 0 or serve.weights_gb != "auto",
        ),
    }
    for name, (needed, is_there) in needs.items():
        if name in serve.model_fields_set and not is_there:
            yield f"serve.{name}", needed
    if isinstance(settings, EndpointSettings) and settings.retrieval.index is None:
        for name in settings.retrieval.model_fields_set - {"index"}:
            yield f"retrieval.{name}", "retrieval.index"
