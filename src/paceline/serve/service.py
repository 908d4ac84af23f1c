"""Service: one thread that runs the engine, and the event loop that asks it for texts.

How it works: the loop puts orders (begin, cancel, change the weights) into a queue; the engine's
thread obeys them between two steps, so nobody else touches the engine, and hands what a step made
to the loop in one call. The loop never waits for the engine, and the engine never for a reader: one
that is too far behind is given up. An exception in the thread ends all requests and the service.
"""

import asyncio
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.generate.embed import embed, parts_of
from paceline.generate.engine import Engine, Progress
from paceline.generate.sequence import EndReason, Sequence, TokenLogprobs
from paceline.generate.text import TextStream
from paceline.serve.bodies import Asked
from paceline.serve.errors import ApiError
from paceline.serve.grammar import Matcher
from paceline.serve.metrics import Metrics
from paceline.serve.record import Recorder

T = TypeVar("T")
Events = list[tuple["Request", "Piece"]]

MOST_BEHIND = 1024
"""Pieces of each text that a reader may be behind."""


@dataclass(frozen=True)
class Token:
    """A token that is told with its probability."""

    token: int
    start: int
    """Of its text, in characters of the text that was made."""
    logprobs: TokenLogprobs | None
    """None: it is the first of all."""


@dataclass(frozen=True)
class Piece:
    """What is new of one of a request's texts."""

    number: int
    """Of the text: a prompt's candidates follow one another."""
    text: str
    tokens: list[Token]
    """That the new text is of, where they are asked for."""
    num_made: int
    """Tokens of the text so far."""
    num_cached: int
    """Tokens of the prompt whose keys and values were there."""
    mean_logprob: float
    """Of its tokens, once it has ended and where they are asked for; else 0."""
    end: EndReason | None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt's tokens after the first, with the text's first piece where they are asked
    for."""


class Request:
    """One request, as the event loop sees it."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.begun_s = time.perf_counter()
        self.is_open = True
        self.num_left = asked.num_texts
        self.pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self.given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the ApiError that ended it."""
        self.is_taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The engine has taken it, or refuses it by an ApiError."""
        # An error that nobody waits for is no news: the client has gone.
        for future in (self.given_up, self.is_taken):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def new_pieces(self) -> list[Piece]:
        """Wait for pieces, and take all that are there."""
        pieces = [await self.pieces.get()]
        while not self.pieces.empty():
            pieces.append(self.pieces.get_nowait())
        return pieces


@dataclass(eq=False)
class _Text:
    """One text that is being made, as the engine's thread sees it."""

    request: Request
    number: int
    stream: TextStream
    matcher: Matcher | None
    starts: list[int] = field(default_factory=list)
    """Of its tokens, where they are told."""
    num_shown: int = 0
    """Characters that the reader was given."""
    num_told: int = 0
    """Tokens that it was told of."""
    is_prompt_told: bool = False
    num_cached: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    """When its first and its last token came."""

    def take(self, tokens: list[int]) -> str | None:
        if self.request.asked.tells_logprobs:
            self.starts.append(self.stream.length)
        return self.stream.add(tokens)


class Service:
    """Texts for many requests at once.

    Args:
        engine: nobody else may use it any more.
        failed: called in the event loop when the engine's thread has died.
        recorder: is told of first tokens.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        failed: Callable[[], None] = lambda: None,
        recorder: Recorder | None = None,
    ) -> None:
        self.engine, self._metrics, self._failed = engine, metrics, failed
        self._recorder = recorder
        serving = engine.serving
        self._most_texts = serving.max_sequences + serving.max_waiting
        self._timeout_s = serving.timeout_s
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._texts: dict[Sequence, _Text] = {}
        self._open: dict[Request, asyncio.TimerHandle] = {}
        self._nothing_open = asyncio.Event()
        self._nothing_open.set()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.is_stopping = False
        self.failure: BaseException | None = None

    # ---- the event loop's side ------------------------------------------------------------------

    def start(self) -> None:
        """Begin to work; called in the event loop that asks."""
        self.loop = asyncio.get_running_loop()
        self._thread.start()

    def check_open(self) -> None:
        """Refuse a request before its body is read.

        Raises:
            ApiError: the engine has died, or the server stops.
        """
        if self.failure is not None:
            raise _died()
        if self.is_stopping:
            raise _stopping()

    async def begin(self, asked: Asked) -> Request:
        """Take a request, once the engine has.

        Raises:
            ApiError: too many wait, or the engine refuses it.
        """
        self.check_open()
        num_open = sum(request.num_left for request in self._open)
        if asked.num_texts > self._most_texts:
            raise ApiError(
                400,
                f"The request asks for {asked.num_texts} texts, and this server makes or keeps "
                f"waiting {self._most_texts}: ask for fewer at a time.",
            )
        if num_open + asked.num_texts > self._most_texts:
            raise ApiError(
                429,
                f"{num_open} texts are made or wait, and {self._most_texts} may: ask again later.",
                code="too_many_waiting",
                outcome="busy",
                headers={"Retry-After": "1"},
            )
        request = Request(asked)
        give_up = partial(self.give_up, request, too_long(self._timeout_s))
        self._open[request] = self.loop.call_later(self._timeout_s, give_up)
        self._nothing_open.clear()
        self._orders.put(partial(self._begin, request))
        try:
            await asyncio.wait(
                (request.is_taken, request.given_up), return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            self.close(request)
            raise
        for future in (request.given_up, request.is_taken):
            if future.done():
                future.result()
        return request

    def close(self, request: Request) -> None:
        """It is answered, or nobody wants the rest: then its blocks are free after the step that is
        under way."""
        if request.is_open:
            request.is_open = False
            self._open.pop(request).cancel()
            if request.num_left:
                self._orders.put(partial(self._drop, request))
            if not self._open:
                self._nothing_open.set()

    def give_up(self, request: Request, error: ApiError) -> None:
        """End a request with an error."""
        if not request.given_up.done():
            request.given_up.set_exception(error)
        self.close(request)

    async def stop(self) -> None:
        """Take no more requests; those under way get the time that the settings say."""
        self.is_stopping = True
        try:
            async with asyncio.timeout(self.engine.serving.stop_s):
                await self._nothing_open.wait()
        except TimeoutError:
            for request in list(self._open):
                self.give_up(request, _stopping())

    def end_thread(self) -> None:
        """End the engine's thread, and wait for it."""
        self._orders.put(self._end)
        self._thread.join()

    def between_steps(self, do: Callable[[], T]) -> "Future[T]":
        """Have something done by the engine's thread; any thread may ask."""
        done: Future[T] = Future()

        def order() -> None:
            if not done.set_running_or_notify_cancel():
                return  # whoever asked has gone
            try:
                done.set_result(do())
            except BaseException as error:
                done.set_exception(error)
                raise

        self._orders.put(order)
        return done

    async def embed(self, texts: list[list[int]]) -> Tensor:
        """The vectors of texts, (num_texts, hidden); others' texts go on between its passes.

        Raises:
            ApiError: ranks share the network, or it took too long.
        """
        engine = self.engine
        if engine.others is not None:
            raise ApiError(
                400, "This server's network is shared out, and then makes no embeddings."
            )
        vectors = torch.empty(len(texts), engine.decoder.model.hidden_size)
        try:
            async with asyncio.timeout(self._timeout_s):
                for part in parts_of([*map(len, texts)], engine.most_tokens):
                    do = partial(embed, engine.decoder, [texts[number] for number in part])
                    vectors[part] = await asyncio.wrap_future(self.between_steps(do))
        except TimeoutError:
            raise too_long(self._timeout_s) from None
        return vectors

    def _deliver(self, events: Events) -> None:
        for request, piece in events:
            if not request.is_open:
                continue
            request.num_left -= piece.end is not None
            request.pieces.put_nowait(piece)
            if request.pieces.qsize() > MOST_BEHIND * request.asked.num_texts:
                self.give_up(request, _slow_reader())

    def _settle(self, request: Request, error: ApiError | None) -> None:
        """The engine has taken a request, or refuses it."""
        if error is not None:
            request.num_left = 0
            self.close(request)
            request.is_taken.set_exception(error)
        elif not request.is_taken.done():
            request.is_taken.set_result(None)

    def _die(self, error: BaseException) -> None:
        self.failure = error
        for request in list(self._open):
            self.give_up(request, _died())
        self._failed()

    # ---- the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._obey()
                events = [self._piece(progress) for progress in self.engine.step()]
                if told := [event for event in events if event is not None]:
                    self.loop.call_soon_threadsafe(self._deliver, told)
        except BaseException as error:
            traceback.print_exception(error)
            self.loop.call_soon_threadsafe(self._die, error)

    def _obey(self) -> None:
        """Do what was ordered; wait for an order where nothing else is to do."""
        if self.engine.is_idle:
            self._orders.get()()
        while not self._orders.empty():
            self._orders.get()()

    def _end(self) -> None:
        self._is_over = True

    def _begin(self, request: Request) -> None:
        error = None
        try:
            for number in range(request.asked.num_texts):
                self._submit(request, number)
        except InputError as refused:
            self._drop(request)
            error = ApiError(400, str(refused))
        self.loop.call_soon_threadsafe(self._settle, request, error)

    def _submit(self, request: Request, number: int) -> None:
        asked = request.asked
        prompt, candidate = divmod(number, asked.num_candidates)
        sampling = asked.sampling_of(candidate)
        assert self.engine.tokenizer is not None
        text = _Text(
            request,
            number,
            TextStream(self.engine.tokenizer, sampling.stop, asked.prompts[prompt]),
            None if asked.matcher is None else asked.matcher.copy(),
        )
        sequence = self.engine.submit(
            asked.prompts[prompt],
            sampling,
            salt=asked.salt,
            take_text=text.take,
            matcher=text.matcher,
            prompt_logprobs=asked.prompt_logprobs,
        )
        self._texts[sequence] = text

    def _drop(self, request: Request) -> None:
        for sequence in [s for s, text in self._texts.items() if text.request is request]:
            self.engine.cancel(sequence)
            del self._texts[sequence]

    def _piece(self, progress: Progress) -> tuple[Request, Piece] | None:
        """What the loop is told of a sequence after a step; None: nothing."""
        sequence = progress.sequence
        text = self._texts.get(sequence)
        if text is None or not (progress.tokens or sequence.end):
            return None
        self._measure(text, progress)
        if sequence.end is not None:
            text.stream.finish()
            del self._texts[sequence]
        if text.matcher is not None and text.matcher.problem is not None:
            error = ApiError(400, text.matcher.problem)
            self._drop(text.request)
            self.loop.call_soon_threadsafe(self.give_up, text.request, error)
            return None
        if sequence.end is None and not text.request.asked.is_streamed:
            return None  # which is told as a whole
        new = text.stream.new_text()
        text.num_shown += len(new)
        told = self._told(text, sequence)
        if not (new or told or sequence.end):
            return None
        logprobs = [each.chosen for each in sequence.logprobs] if sequence.end else []
        mean = sum(logprobs) / len(logprobs) if logprobs else 0.0
        tells_prompt = sequence.num_prompt_logprobs is not None and not text.is_prompt_told
        text.is_prompt_told = True
        piece = Piece(
            text.number, new, told, sequence.num_made, text.num_cached, mean, sequence.end,
            sequence.prompt_logprobs if tells_prompt else None,
        )  # fmt: skip
        return text.request, piece

    def _told(self, text: _Text, sequence: Sequence) -> list[Token]:
        """Tokens whose text is shown by now and wasn't before."""
        told = []
        for place in range(text.num_told, len(text.starts)):
            if text.starts[place] >= text.num_shown:
                break
            token = sequence.tokens[sequence.num_prompt + place]
            told.append(Token(token, text.starts[place], sequence.logprobs[place]))
        text.num_told += len(told)
        return told

    def _measure(self, text: _Text, progress: Progress) -> None:
        sequence, now_s, count = progress.sequence, time.perf_counter(), len(progress.tokens)
        if sequence.num_made == count:
            text.num_cached = min(sequence.num_shared, sequence.num_prompt)
            text.first_s = now_s
            wait_s = now_s - text.request.begun_s
            self._metrics.text_began(wait_s, sequence.num_prompt, text.num_cached)
            if self._recorder is not None:
                self._recorder.first_token(sequence, text.request.begun_s, now_s)
        else:
            self._metrics.text_went_on((now_s - text.last_s) / count, count)
        self._metrics.tokens_out.inc(count)
        text.last_s = now_s
        if sequence.end is not None and sequence.num_made > 1:
            self._metrics.per_token.observe((now_s - text.first_s) / (sequence.num_made - 1))


def _died() -> ApiError:
    return ApiError(500, "The engine has died, and the server stops.", outcome="failed")


def _stopping() -> ApiError:
    return ApiError(
        503,
        "The server stops: ask another one, or ask again later.",
        outcome="stopping",
        headers={"Retry-After": "5"},
    )


def too_long(timeout_s: float) -> ApiError:
    """A request took longer than it may."""
    return ApiError(
        504,
        f"The request took {timeout_s:g} s, which is serve.timeout_s: ask for less, or when less "
        "is asked.",
        code="timeout",
        outcome="timeout",
        headers={"X-Should-Retry": "false"},
    )


def _slow_reader() -> ApiError:
    return ApiError(
        503, f"The reader is {MOST_BEHIND} tokens behind: read faster.", outcome="slow_reader"
    )
