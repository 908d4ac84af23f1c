"""A real server on loopback, in a thread of the test's process, with a small network."""

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx2
import torch
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from paceline.config.errors import RunError
from paceline.config.sampling import Sampling
from paceline.config.serving import EndpointSettings, Retrieval
from paceline.config.serving import Serving as Settings
from paceline.generate.engine import Engine
from paceline.observe.run import Run
from paceline.serve.keys import Keys
from paceline.serve.network import Network
from paceline.serve.serve_command import Serving, _listener
from paceline.train.data.tokenizer import make_encoder
from tests.generate.networks import MODELS, built

PATIENCE_S = 400.0
SMALL = Settings(block_size=8, max_tokens=64, max_sequences=8)
END = 256


def small_network(
    longest: int = 256, template: str | None = None, dtype: torch.dtype = torch.float64
) -> Network:
    """A decoder of bytes with random weights."""
    encoder = make_encoder("bytes", ())
    model = MODELS["grouped"].replace(vocab_size=END + 1, max_seq_len=longest)
    return Network(
        name="small",
        decoder=built(model, dtype),
        tokenizer=encoder.tokenizer,
        end_tokens=frozenset({END}),
        chat_template=template,
        settings={"eos_token": "<|endoftext|>"},
        step=7,
    )


@dataclass
class Served:
    """A server that runs."""

    serving: Serving
    network: Network
    sampling: dict[str, Any]
    error: RunError | None = None
    """With which it ended."""

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.serving.run()
        except RunError as error:
            self.error = error

    @property
    def url(self) -> str:
        return self.serving.url

    @property
    def address(self) -> tuple[str, int]:
        return self.serving._listener.getsockname()[:2]

    @property
    def engine(self) -> Engine:
        return self.serving.service.engine

    def client(self, key: str = "none", **options: Any) -> OpenAI:
        """OpenAI's own client."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx2.Response:
        return httpx2.post(f"{self.url}{path}", json=fields, timeout=PATIENCE_S)

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(f"{self.url}{path}", timeout=PATIENCE_S)

    def metrics(self) -> dict[str, float]:
        """Samples by name, with their labels' values: `requests_total done`."""
        page = self.get("/metrics").text
        return {
            " ".join([sample.name.removeprefix("paceline_serve_"), *sample.labels.values()]): (
                sample.value
            )
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

    def alone(self, prompt: str, **sampling: Any) -> str:
        """The text of an engine that nobody else asks."""
        engine = Engine(self.network.decoder, SMALL, self.network.tokenizer, {END})
        return engine.texts([prompt], Sampling(**{**self.sampling, **sampling}))[0]

    def wait_until_idle(self) -> None:
        """Until nobody is served; then no block may be in use."""
        wait_until(lambda: self.engine.is_idle and not self.serving.service._open)
        numbers = self.engine.numbers()
        assert numbers["blocks_free"] == numbers["blocks"]
        assert not self.engine._scheduler._coming
        assert not self.serving.service._texts

    def stop(self) -> None:
        """As a signal does."""
        with suppress(RuntimeError):  # it has ended already
            self.serving.service.loop.call_soon_threadsafe(self.serving.stop)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE_S)


@contextmanager
def serve(
    network: Network | None = None,
    settings: Settings = SMALL,
    keys: Keys | None = None,
    run: Run | None = None,
    sampling: Mapping[str, Any] | None = None,
    retrieval: Retrieval | None = None,
    record: Any = None,
) -> Iterator[Served]:
    """Serve a network; at the end nothing may be left."""
    network = network or small_network()
    # Random weights would end a text anywhere.
    chosen = {"logit_bias": {END: -100.0}, **(sampling or {})}
    given = EndpointSettings(
        serve=settings, sampling=Sampling(**chosen), retrieval=retrieval or Retrieval()
    )
    serving = Serving(network, given, keys or Keys(), _listener("127.0.0.1", 0), run, record)
    served = Served(serving, network, chosen)
    served.thread.start()
    wait_until(lambda: _answers(served))
    try:
        yield served
    finally:
        served.stop()
        served.thread.join(PATIENCE_S)
        assert not served.thread.is_alive()


def _answers(served: Served) -> bool:
    try:
        return served.get("/ready").status_code == 200
    except httpx2.ConnectError:
        return False


def wait_until(condition: Any) -> None:
    """Look again and again."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
