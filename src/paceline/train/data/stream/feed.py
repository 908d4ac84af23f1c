"""The steps of a stream: its samples in a fixed order, waited for by all ranks together.

Which samples a step has is a function of the seed and of how many the run has consumed: as they
arrived, or in windows that are shuffled among themselves. When a step's are there rank 0 says so to
the others, in the store that ranks met over: either all of them do the step, or none does, because
somebody wished to stop or nothing came for too long. No collective waits meanwhile, so nobody takes
the wait for a hang.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import numpy as np
from torch._C._distributed_c10d import Store

from paceline.comm import words
from paceline.config.errors import RunError
from paceline.config.stream import Stream
from paceline.observe.run import Run
from paceline.render.figures import duration_text
from paceline.train.data.batches import BatchShape, MicroBatch, load
from paceline.train.data.order import Ids, sample_ids
from paceline.train.data.stream.beside import ingesting
from paceline.train.data.stream.reader import LogReader
from paceline.train.data.stream.retention import Reader, register
from paceline.train.rank_stats import RankStats

_WORD, _WISH = "stream", "stream-stop"
_LOOK_S = 0.02
# Waits that last are said after so long, and then again, less and less often.
_SAID_S, _SAID_TIMES = 5.0, 4.0
# What one node sees of a shared disk another one sees a little later.
_SEEN_S = 60.0

State = Literal["goes_on", "stops", "is_over"]


class _Word(NamedTuple):
    """What rank 0 says to the others."""

    state: State
    samples: int
    """That the log holds."""


def window_ids(seed: int, first: int, count: int, window: int) -> Ids:
    """Which samples of a log a run visits as its numbers first .. first + count - 1.

    Args:
        window: samples that are shuffled among themselves.
    """
    numbers = np.arange(first, first + count)
    if window == 1:
        return numbers
    return sample_ids(seed, first, count, window) + numbers // window * window


class StreamWait:
    """Waits of one rank for samples, in agreement with the others.

    Args:
        reader: of the log.
        seq_len: tokens of a sample.
        limit_s: `data.stream.wait_s`.
    """

    def __init__(self, reader: LogReader, seq_len: int, limit_s: float) -> None:
        self._reader, self._seq_len, self._limit_s = reader, seq_len, limit_s
        self._word = _Word("goes_on", 0)
        self._store: Store | None = None
        self._is_first = True
        self._stats: RankStats | None = None
        self._wants_stop: Callable[[], bool] = lambda: False
        self._say: Callable[[str], None] = lambda _sentence: None

    def bind(
        self,
        stats: RankStats,
        wants_stop: Callable[[], bool],
        say: Callable[[str], None],
        store: Store | None,
        *,
        is_first: bool,
    ) -> None:
        """Tell who waits.

        Args:
            stats: of this rank.
            wants_stop: whether this rank was asked to stop.
            say: tells a person.
            store: that the ranks met over; None: there is one rank.
            is_first: whether this is rank 0.
        """
        self._stats, self._wants_stop, self._say = stats, wants_stop, say
        self._store, self._is_first = store, is_first

    def until(self, num_samples: int) -> bool:
        """Wait until the log holds so many; False: the ranks stop instead."""
        began, said_s = time.monotonic(), _SAID_S
        while True:
            if num_samples <= self._word.samples:
                self._see(num_samples)
                return True
            if self._word.state != "goes_on":
                return False
            waited_s = time.monotonic() - began
            if self._is_first:
                self._decide(num_samples, waited_s)
            else:
                self._listen()
            if waited_s > said_s and self._is_first:
                self._tell(num_samples, waited_s)
                said_s *= _SAID_TIMES

    def check(self) -> None:
        """After the run has kept what it had.

        Raises:
            RunError: it ended because nothing came.
        """
        if self._word.state == "is_over":
            raise RunError(
                f"no data arrived for {duration_text(self._limit_s)} (data.stream.wait_s): the "
                "run kept a checkpoint and ended. Start it again when its source gives more."
            )

    def _decide(self, num_samples: int, waited_s: float) -> None:
        """As rank 0."""
        there = self._reader.num_samples(self._seq_len)
        if num_samples <= there:
            self._word = _Word("goes_on", there)
        elif self._wants_stop() or self._is_wished():
            self._word = _Word("stops", there)
        elif waited_s > self._limit_s:
            self._word = _Word("is_over", there)
        else:
            self._pause()
            return
        if self._store is not None:
            words.say(self._store, _WORD, self._word)

    def _listen(self) -> None:
        """As another rank."""
        assert self._store is not None
        before = self._word
        if self._store.check([_WORD]):
            self._word = words.heard(self._store, _WORD, _Word)
        if self._word == before:
            if self._wants_stop():
                words.say(self._store, _WISH, True)
            self._pause()

    def _is_wished(self) -> bool:
        return self._store is not None and self._store.check([_WISH])

    def _pause(self) -> None:
        assert self._stats is not None
        self._stats.watch.enter("stream")
        with self._stats.clock.waiting():
            time.sleep(_LOOK_S)

    def _see(self, num_samples: int) -> None:
        """Where rank 0 has seen samples, wait for this node's disk to show them."""
        until = time.monotonic() + _SEEN_S
        while self._reader.num_samples(self._seq_len) < num_samples:
            if time.monotonic() > until:
                raise RunError(
                    f"rank 0 sees sample {num_samples - 1} of the stream, and this node did not "
                    f"within {_SEEN_S:.0f} s: data.stream.log must be a folder that all share."
                )
            self._pause()

    def _tell(self, num_samples: int, waited_s: float) -> None:
        missing = num_samples * self._seq_len + 1 - self._reader.num_tokens()
        self._say(
            f"waiting for data since {duration_text(waited_s)}: {missing:,} tokens of the next "
            f"step are missing (data.stream.wait_s ends it after {duration_text(self._limit_s)})"
        )


class StreamFeed:
    """This rank's steps of a stream.

    Args:
        reader: of the log.
        shape: sizes of the batch and this rank's place.
        stream: the Job's.
        seed: `train.seed`.
        wait: for the samples of a step.
    """

    def __init__(
        self, reader: LogReader, shape: BatchShape, stream: Stream, seed: int, wait: StreamWait
    ) -> None:
        self._reader, self._shape, self._seed = reader, shape, seed
        self.wait = wait
        self._window = stream.shuffle
        self.figures: dict[str, float] = {}
        """Of the last step: seconds since its oldest token arrived, tokens that wait behind it."""

    def steps_from(self, first: int) -> Iterator[list[MicroBatch]]:
        """Steps from sample number `first` of the run on; they end where the ranks are to stop.

        Raises:
            InputError: the log is damaged, or has no such samples any more.
            RunError: this node doesn't see what rank 0 sees.
        """
        size, window = self._shape.global_batch, self._window
        while self.wait.until(-(-(first + size) // window) * window):
            ids = window_ids(self._seed, first, size, window)
            self._measure(ids, first + size)
            yield load(self._reader, self._shape, ids)
            first += size

    @contextmanager
    def accompany(self, run: Run, say: Callable[[str], None]) -> Iterator[None]:
        """As the first rank: while it trains, keep what its checkpoints need, and an ingester."""
        reader = Reader(run=str(run.path), seq_len=self._shape.seq_len, window=self._window)
        register(self._reader.folder, reader)
        with ingesting(run, self._reader.folder, say):
            yield

    def _measure(self, ids: Ids, consumed: int) -> None:
        seq_len = self._shape.seq_len
        arrived = self._reader.arrived(int(ids.min()) * seq_len, int(ids.max() + 1) * seq_len)
        self.figures = {
            "stream_latency_s": max(0.0, time.time() - arrived),
            "stream_backlog_tokens": max(0, self._reader.num_tokens() - consumed * seq_len),
        }
