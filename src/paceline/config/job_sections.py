"""The sections of a Job, as a person writes them; what they demand of each other: `job_rules`."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from paceline.config.comm import Comm
from paceline.config.dedup import Dedup
from paceline.config.elastic import Elastic
from paceline.config.family import ModelFamily
from paceline.config.finetune import Finetune
from paceline.config.frozen import MOST, Auto, Count, CountOrNone, FrozenConfig, Width
from paceline.config.hardware import ClusterSpec
from paceline.config.heads import Heads
from paceline.config.layout import Layout, LayoutSpec
from paceline.config.mamba import Mamba2
from paceline.config.mixture import EvalSet, Format, Source, Stage
from paceline.config.model import Model
from paceline.config.optim import Optim
from paceline.config.recommender import Clicks, Dlrm
from paceline.config.row_filter import FilterText
from paceline.config.stream import Stream
from paceline.config.urls import SourceNames, check_tells_no_secret
from paceline.config.vision import EfficientNet, Images, ResNet

LOCAL_HOST = "127.0.0.1"
TrackerName = Literal["mlflow", "wandb", "trackio", "opentelemetry"]


class CustomModel(ModelFamily):
    """A person's own `nn.Module`, handed to `paceline.train`; only its name is data."""

    is_own: ClassVar[bool] = True
    takes_text: ClassVar[bool] = True
    has_batch_norms: ClassVar[bool] = True

    family: Literal["custom"] = "custom"
    name: str = "custom"
    """Kept in the Run, so that checkpoints of one model are never loaded into another."""

    def layout_refusals(self, layout: Layout) -> Iterator[str]:
        """Besides: tp is as the plan says, beside the script."""
        yield from super().layout_refusals(layout)
        if layout.tp == 1:
            return
        if layout.sequence_parallel:
            yield (
                "layout.sequence_parallel = true is of models that Paceline knows the layers of: "
                "leave it out, and let the styles of tp_plan share out the tokens."
            )
        if layout.precision == "fp8":
            yield (
                f"layout.tp = {layout.tp} cuts torch's own linear layers, which those of "
                'layout.precision = "fp8" are not: use "bf16", or tp = 1.'
            )


class Data(FrozenConfig):
    """What is trained on. The order of samples is a pure function of (train.seed, step)."""

    source: SourceNames = "python-stdlib"
    """Files, globs or folders, also as URLs of fsspec (s3://, gs://, https://, hf://);
    "python-stdlib": the running interpreter's own library; "clicks": a synthetic click log, for
    recommenders; "images": synthetic textures, for ResNets, which also take folders of images by
    class, and shards (*.tar)."""
    format: Auto | Format = "auto"
    """"auto" goes by the file's suffix; "arrow" is a Hugging Face dataset directory on disk,
    "webdataset" tar files, "mds" shards of mosaicml-streaming, "megatron" an .idx beside its .bin,
    which holds tokens of `tokenizer`, "tokens" what `paceline tokens JOB --to URL` published."""
    text_field: str = "text"
    """The column or key that holds a document's text (all formats but "text")."""
    filter: FilterText = None
    """Which rows are read: an expression over their fields that is true of them, such as
    `len(text) > 200 and language == "en"` (rows only: not "text", not "megatron")."""
    dedup: Dedup = Dedup()
    records: Literal["text", "chat", "preferences", "prompts"] = "text"
    """What a row is. "chat": a conversation, `messages`, or `prompt` and `completion`. A sample
    holds whole ones, each with attention of its own; the loss counts the answers alone.
    "preferences": `prompt`, `chosen` and `rejected`, for `finetune.objective = "dpo"`. "prompts":
    `prompt`, which the network completes, for "grpo"."""
    columns: Annotated[tuple[str, ...], Field(strict=False, max_length=100)] = ()
    """Other columns of prompts, which the reward function is given."""
    chat_template: str | None = None
    """Jinja file that makes texts of conversations; by default the one beside the tokenizer."""
    tokenizer: str = "bpe:4096"
    """"bpe:N" trains one on the source, "bytes", or the path of a tokenizer.json (by default that
    of `model.hf`, where it has one)."""
    eval_fraction: float = Field(0.01, gt=0, lt=0.5)
    """Part of the tokens that is held out for evaluation, by whole documents where it can be; or of
    the images."""
    reset_at_documents: bool = False
    """Start attention and positions anew at every document inside a packed sequence."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """How documents become samples. "concatenate": one after another, cut where a sample ends.
    "best_fit": whole, but for those that are longer than a sample, each with attention and
    positions of its own; what is left of a sample is padding, which the loss doesn't count."""
    mask_share: float | None = Field(None, gt=0, lt=1)
    """With model.causal = false: part of the tokens that are to be guessed, 0.15 by default. Of
    these 80 % are masked, 10 % become any token, and 10 % stay."""
    mask_token: int | None = Field(None, ge=0, lt=2**31)
    """Id that stands for a masked token; by default model.vocab_size - 1, if no token has it."""
    cache_dir: str = "auto"
    """Where tokenised data is kept, "auto": $XDG_CACHE_HOME/paceline or ~/.cache/paceline."""
    cache_gb: Annotated[float, Field(gt=0, le=10**9)] | None = None
    """The most that it may take, GB (10^9 bytes): each start removes what was used longest ago, but
    nothing that is in use. None: no limit."""
    wait_s: float = Field(60.0, ge=0, le=10**6)
    """How long a store with published tokens is waited for that doesn't answer, seconds."""
    sources: Annotated[tuple[Source, ...], Field(strict=False, max_length=1000)] = ()
    """In place of `source`: a mixture of several, `[[data.sources]]` each."""
    temperature: float = Field(1.0, gt=0, le=100)
    """Of a mixture without weights: sources are weighed by size^(1 / temperature); above 1 small
    ones are read more often than large ones."""
    stages: Annotated[tuple[Stage, ...], Field(strict=False, max_length=1000)] = ()
    """Other weights from given steps on, `[[data.stages]]` each."""
    eval_sets: Annotated[tuple[EvalSet, ...], Field(strict=False, max_length=100)] = ()
    """More text to evaluate on, `[[data.eval_sets]]` each. Each named set, that a source holds out
    or that stands here, has a loss of its own; the held-out loss is their mean."""
    clicks: Clicks = Clicks()
    stream: Stream = Stream()
    images: Images = Images()

    @property
    def starts_anew(self) -> bool:
        """Whether attention and positions do so at every document."""
        return self.reset_at_documents or self.counts_some

    @property
    def counts_some(self) -> bool:
        """Whether the loss counts some tokens of a sample and others not."""
        return self.has_answers or self.packing == "best_fit"

    @property
    def chosen_by(self) -> str | None:
        """The setting by which some documents of the one source are left out."""
        if self.filter is not None:
            return "data.filter"
        return None if self.dedup == Dedup() else "data.dedup"

    @property
    def has_answers(self) -> bool:
        """Whether rows have answers, which alone the loss counts."""
        return self.records != "text"


class Train(FrozenConfig):
    """How long and on how much."""

    steps: CountOrNone = 0
    """Optimizer steps of the whole run; left out: as many as `epochs` or `tokens` make."""
    epochs: float | None = Field(None, gt=0, le=MOST)
    """In place of `steps`: times that the train split, or one's own data, is read. They are made
    into steps, rounded up, before the run starts."""
    tokens: Count | None = None
    """In place of `steps`, of language models: tokens that are trained on, rounded up to steps."""
    global_batch: Width
    """Samples of one step over all ranks, whatever their number."""
    seq_len: Width = 1024
    """Tokens of a sample (language models)."""
    seed: int = Field(0, ge=0, lt=2**63)
    eval_every: CountOrNone = 0
    """Steps between evaluations on the held-out split; 0: only at the end."""
    eval_batches: Count = 4
    """Global batches of the held-out split that an evaluation reads."""
    exact_eval: bool = False
    """Evaluate a language model by the passes of `serve.exact`: each logit has the bits that it has
    when the run is served so, with blocks and passes of the default size. Slower; in fp32, for
    ranks that hold the whole network."""
    patience: CountOrNone = 0
    """Evaluations in a row without a better `checkpoint.best` that end the run; 0: none do."""
    max_bad_steps: Count = 5
    """Steps in a row with a non-finite loss or gradient (each is skipped) that end the run."""
    weights: str | None = None
    """Folder of safetensors to start from, in Hugging Face's layout, or one of torch's DCP; true:
    that of `model.hf`. Else, or with false, random weights."""

    @field_validator("weights", mode="before")
    @classmethod
    def _none_if_false(cls, given: Any) -> Any:
        return None if given is False else given


class Checkpoint(FrozenConfig):
    """When the state is kept. The last step is always kept."""

    every: CountOrNone = 1000
    """Steps between checkpoints; 0: only at the end."""
    keep_last: Count = 2
    keep_every: Count | None = None
    """Also keep each checkpoint whose step is a multiple of this, for ever."""
    best: str | None = None
    """Also keep that of the best evaluation by this figure: "eval_loss", or another one of
    evaluations or of one's own loss. `checkpoints/best` points to it."""
    best_is: Literal["least", "most"] = "least"
    """Which of two figures is the better one."""
    copy_to: str | None = None
    """Where each checkpoint is copied as well, beside training: a URL of fsspec, such as
    "s3://bucket/prefix", below which the Run has a folder of its name. Without a newer one on its
    disk, a run goes on from there. Credentials come from the environment."""

    @field_validator("copy_to")
    @classmethod
    def _tells_no_secret(cls, url: str | None) -> str | None:
        if url is None:
            return url
        check_tells_no_secret(url)
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://\S*[^\s/]/*", url):
            raise ValueError(f"{url!r} is no URL of a store: give one such as s3://bucket/prefix.")
        return url


class Observe(FrozenConfig):
    """What is written down about the run while it goes on."""

    profile_every: CountOrNone = 0
    """Steps between profiled windows; 0: none."""
    profile_steps: int = Field(2, gt=0, le=1000)
    """Steps of one window."""
    samples: Annotated[tuple[str, ...], Field(strict=False, max_length=64)] = ()
    """Prompts: after each evaluation of a decoder, how it goes on from them (greedy), for the
    report. The ranks wait for it, and hold the whole network."""
    sample_tokens: Count = 48
    """Tokens of a sample."""
    noise_scale_every: CountOrNone = 0
    """Steps between measurements of the gradient noise scale, about the global batch beyond which
    more samples help little (docs/optimizers.md); 0: none. It compares the gradients of the
    micro-batches of all ranks with their mean, so there must be two."""
    tensorboard: bool = True
    trackers: Annotated[tuple[TrackerName, ...], Field(strict=False)] = ()
    """Also told each step's numbers: "mlflow", "wandb", "trackio", "opentelemetry". Where they
    are, and with which credentials, their own variables in the environment say."""
    prometheus_port: int | None = Field(None, ge=1, le=65535)
    """Port of the metrics endpoint; none is opened where this is left out."""
    prometheus_host: str = LOCAL_HOST
    """Address at which it listens; it has no password (docs/security.md)."""
    debug_port: int | None = Field(None, ge=1, le=65535)
    """Port of torch's debug page (stacks of all ranks, collectives), on rank 0's host; it has no
    password, so it listens at 127.0.0.1: reach it from elsewhere with `ssh -L`."""


class Sections(FrozenConfig):
    """All of a Job, before anybody looked whether it agrees with itself."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The Run is the directory `runs/<name>`."""
    model: Annotated[
        Model | Dlrm | ResNet | EfficientNet | Heads | Mamba2 | CustomModel,
        Field(discriminator="family"),
    ]
    cluster: ClusterSpec = ClusterSpec()
    layout: LayoutSpec = LayoutSpec()
    comm: Comm = Comm()
    data: Data = Data()
    optim: Optim = Optim()
    train: Train
    finetune: Finetune = Finetune()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
    elastic: Elastic = Elastic()
