"""Online: a load of requests as they come, against an engine of this process or an endpoint.

An endpoint is any that speaks OpenAI's completions with prompts of tokens and `ignore_eos`, as
Paceline's, vLLM's and SGLang's do. Each request has a thread and a connection of its own.
"""

import json
import os
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.generate.engine import Engine
from paceline.plan.serving.load import Request, Served

_PATIENCE_S = 600.0
_MOST_CONNECTIONS = 512
_MOST_SHOWN = 200


def serve_load(engine: Engine, requests: Sequence[Request], sampling: Sampling) -> Served:
    """Have an engine of this process serve a load; every text gets as many tokens as it asks for.

    Args:
        requests: in the order in which they come.
        sampling: of all of them, but for how many tokens they get.
    """
    served, coming, numbers = Served(requests), deque(enumerate(requests)), {}
    begun_s = time.perf_counter()
    while coming or not engine.is_idle:
        while coming and coming[0][1].after_s <= time.perf_counter() - begun_s:
            number, request = coming.popleft()
            asked = sampling.replace(max_tokens=request.num_tokens, ignore_end=True)
            numbers[engine.submit(request.prompt, asked)] = number
        for progress in engine.step():
            now_s = time.perf_counter() - begun_s
            served.came(numbers[progress.sequence], len(progress.tokens), now_s)
        if engine.is_idle and coming:
            time.sleep(0.0005)
    return served


class EndpointLoad:
    """A load for an endpoint.

    Args:
        url: of the endpoint, with or without /v1.
        sampling: of all requests.

    Raises:
        InputError: no endpoint answers there.
    """

    def __init__(self, url: str, sampling: Sampling) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise InputError(f"--url {url} is no address: give http://host:port.")
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._sampling = sampling
        self._key = os.environ.get("OPENAI_API_KEY")
        try:
            with self._open("models") as answer:
                self._model = json.load(answer)["data"][0]["id"]
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            raise InputError(
                f"--url {url} does not answer as OpenAI's API does ({_reason(error)}): start it, "
                "or give its key in OPENAI_API_KEY."
            ) from None
        self.problems: list[str] = []
        """Of requests that failed."""

    def serve(self, requests: Sequence[Request]) -> Served:
        """Send each request when it comes, and read its text.

        Raises:
            InputError: all of them failed.
        """
        served, lock = Served(requests), threading.Lock()
        begun_s = time.perf_counter()

        def one(number: int) -> None:
            try:
                events = [
                    (time.perf_counter() - begun_s, event)
                    for event in self._events(requests[number])
                ]
            except (OSError, HTTPException, ValueError) as error:
                with lock:
                    self.problems.append(_reason(error))
                return
            with lock:
                _take(served, number, events)

        with ThreadPoolExecutor(min(len(requests), _MOST_CONNECTIONS)) as pool:
            for number, request in enumerate(requests):
                time.sleep(max(0.0, request.after_s - (time.perf_counter() - begun_s)))
                pool.submit(one, number)
        if len(self.problems) == len(requests):
            raise InputError(
                f"All {len(requests)} requests failed; the first: {self.problems[0]}: mend that, "
                "or ask for less."
            )
        return served

    def _events(self, request: Request) -> Any:
        body = {
            "model": self._model,
            "prompt": list(request.prompt),
            "max_tokens": request.num_tokens,
            "temperature": self._sampling.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self._open("completions", body) as answer:
            for line in answer:
                data = line.strip().removeprefix(b"data: ")
                if line.startswith(b"data: ") and data != b"[DONE]":
                    event = json.loads(data)
                    if not isinstance(event, dict) or "error" in event:
                        raise ValueError(str(event)[:_MOST_SHOWN])
                    yield event

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/{path}", data, headers)
        return urllib.request.urlopen(request, timeout=_PATIENCE_S)


def _take(served: Served, number: int, events: Sequence[tuple[float, Any]]) -> None:
    """Read a text's events: one for each token, or for several where their characters need it."""
    came = [now_s for now_s, event in events if event.get("choices")]
    usage = [event["usage"] for _, event in events if isinstance(event.get("usage"), dict)]
    for now_s in came:
        served.came(number, 1, now_s)
    if came and usage and isinstance(count := usage[-1].get("completion_tokens"), int):
        served.was_made(number, count)


def _reason(error: Exception) -> str:
    if isinstance(error, HTTPError):
        return f"{error.code} {error.read(_MOST_SHOWN).decode(errors='replace')}"
    return str(error)[:_MOST_SHOWN] or type(error).__name__
