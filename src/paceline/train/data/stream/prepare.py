"""From a Job to the log of its stream: made before anything arrives, with its tokenizer in it."""

import hashlib
import uuid
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from paceline.config import files
from paceline.config.errors import InputError
from paceline.config.job import JobSpec
from paceline.config.job_sections import Data
from paceline.train.data.build import Progress
from paceline.train.data.cache import PreparedData, prepare
from paceline.train.data.stream.kafka import require_kafka
from paceline.train.data.stream.log import (
    TOKENIZER_FILE,
    WAY_OUT,
    LogMeta,
    create_log,
    has_log,
    read_log_meta,
)
from paceline.train.data.tokenizer import Encoder, make_encoder, read_tokenizer


@dataclass(frozen=True)
class PreparedStream:
    """The log of a Job's stream, and what is known before anything arrives."""

    folder: Path
    meta: LogMeta
    window: int
    """Samples that are shuffled among themselves."""
    held_out: PreparedData | None
    """`data.source`, whose held-out part is evaluated on; None: it was not given."""

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer.json of the log."""
        return self.folder / TOKENIZER_FILE

    @property
    def vocab_size(self) -> int:
        """What an embedding must have rows for."""
        return self.meta.vocab_size

    @property
    def data_key(self) -> str:
        """Names what a run trains on, in which order."""
        return f"stream-{self.meta.id}-{self.window}"

    def encoder(self) -> Encoder:
        """Makes tokens for the log.

        Raises:
            InputError: its tokenizer is damaged.
        """
        text = files.read_bytes(self.tokenizer_path, WAY_OUT)
        if hashlib.sha256(text).hexdigest() != self.meta.tokenizer_sha256:
            raise InputError(f"{self.tokenizer_path} is damaged: {WAY_OUT}.")
        tokenizer = read_tokenizer(self.tokenizer_path)
        tokenizer.encode_special_tokens = True
        is_bytes = self.meta.tokenizer == "bytes"
        return Encoder(tokenizer, self.meta.end_of_document, is_bytes=is_bytes)


def log_folder(job: JobSpec) -> Path:
    """Where the log of a Job's stream is."""
    given = job.data.stream.log
    return Path("streams", job.name) if given == "auto" else Path(given).expanduser()


def prepare_stream(job: JobSpec, progress: Progress | None = None) -> PreparedStream:
    """Make the log of a Job's stream, or find it.

    Args:
        job: has a stream.
        progress: called with the bytes of `data.source` tokenised so far, and all of them.

    Raises:
        InputError: the source or the tokenizer can't be used, or the log has another one.
    """
    data, folder = job.data, log_folder(job).absolute()
    check_sources(data)
    held_out = None
    if data.source != Data().source:
        held_out = prepare(data, progress).for_samples(job.train.seq_len)
    if held_out is None:
        encoder = make_encoder(data.tokenizer, ())
        tokenizer = encoder.tokenizer.to_str().encode()
        vocab_size, end_of_document = encoder.vocab_size, encoder.end_of_document
    else:
        tokenizer = held_out.tokenizer_path.read_bytes()
        vocab_size, end_of_document = held_out.meta.vocab_size, held_out.meta.end_of_document
    wanted = LogMeta(
        id=uuid.uuid4().hex,
        tokenizer=data.tokenizer,
        tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
        vocab_size=vocab_size,
        end_of_document=end_of_document,
    )
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "made.lock"):
        if not has_log(folder):
            create_log(folder, wanted, tokenizer)
    meta = read_log_meta(folder)
    if meta.tokenizer_sha256 != wanted.tokenizer_sha256:
        raise InputError(
            f"{folder} holds tokens of another tokenizer ({meta.tokenizer} when it was made): "
            "change data.tokenizer or data.source back, or name another data.stream.log."
        )
    return PreparedStream(folder, meta, data.stream.shuffle, held_out)


def check_sources(data: Data) -> None:
    """Refuse what can't be read.

    Raises:
        InputError: the folder is missing, or Kafka's client.
    """
    stream = data.stream
    if stream.folder is not None and not Path(stream.folder).expanduser().is_dir():
        raise InputError(
            f"data.stream.folder = {stream.folder!r} is no folder: make it, or give another one."
        )
    if stream.kafka is not None:
        require_kafka()
