"""The command `paceline serve`: an endpoint on a run or a folder of weights."""

import asyncio
import contextlib
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from rich.console import Console

from paceline.config.errors import InputError, RunError
from paceline.config.serving import EndpointSettings
from paceline.generate.engine import Engine
from paceline.machine.freed_memory import share_freed_memory
from paceline.observe.run import Run
from paceline.serve.generate_command import described
from paceline.serve.keys import VARIABLE, Keys, read_keys
from paceline.serve.network import Network, open_network
from paceline.serve.record import Recorder

_CONSOLE = Console(highlight=False, soft_wrap=True)
_GONE_AFTER_S = 30
"""Without an answer a client is taken to have vanished."""
_SEND_BUFFER_BYTES = 128 << 10
_LAST_BYTES_S = 3
_IDLE_S = 30
"""That a connection may wait for its next request; clients' own limits are lower."""


@dataclass(frozen=True)
class ServeOptions:
    """Of the command line."""

    host: str | None = None
    """None: this host alone."""
    port: int = 8000
    """0: any that is free."""
    step: int | None = None
    follow: bool = False
    key_file: Path | None = None
    no_keys: bool = False
    record: Path | None = None
    """Folder that gets a record of where the time goes; None: nothing is recorded."""


def serve_command(path: Path, settings: EndpointSettings, options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        path: a run or a folder of weights.

    Raises:
        InputError: no such network, options that don't fit, or an address that can't be had.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise InputError("paceline serve needs uvicorn: pip install 'paceline[serve]'.") from None
    if options.follow:
        share_freed_memory()
    keys = Keys() if options.no_keys else read_keys(options.key_file)
    _check(path, options, keys)
    listener = _listener(options.host or "127.0.0.1", options.port)
    begun_s = time.perf_counter()
    network = open_network(path, settings.serve, options.step)
    run = Run(path) if options.follow else None
    folder = options.record
    record = None if folder is None else partial(Recorder, folder, network.name, path)
    serving = Serving(network, settings, keys, listener, run, record)
    listener.listen()
    _CONSOLE.print(
        f"{described(network)}, ready in {time.perf_counter() - begun_s:.1f} s: "
        f"{serving.url}/v1{'' if keys else ', no API key is asked for'}"
    )
    serving.run()


class Serving:
    """A server from its socket to its end.

    Args:
        run: whose newer checkpoints are taken; None: the weights stay.
        record: makes what records the engine's steps; None: nothing does.
    """

    def __init__(
        self,
        network: Network,
        settings: EndpointSettings,
        keys: Keys,
        listener: socket.socket,
        run: Run | None = None,
        record: Callable[[Engine], Recorder] | None = None,
    ) -> None:
        from paceline.generate.chat import ChatTemplate
        from paceline.serve.bodies import Server
        from paceline.serve.endpoint import Endpoint
        from paceline.serve.follow import Follower
        from paceline.serve.grammar import Grammars
        from paceline.serve.metrics import Metrics
        from paceline.serve.retrieval.retriever import open_retriever
        from paceline.serve.service import Service

        self._listener = listener
        metrics = Metrics()
        self._retriever = open_retriever(settings.retrieval)
        engine = network.engine(settings.serve)
        vocab = network.decoder.model.vocab_size
        server = Server(
            network,
            ChatTemplate(network.chat_template, network.settings),
            Grammars(network.tokenizer, vocab, network.end_tokens),
            settings.sampling.model_dump(exclude_unset=True),
            engine.longest,
            settings.retrieval,
        )
        self._recorder = None if record is None else record(engine)
        self.service = Service(engine, metrics, self._end, self._recorder)
        if (others := engine.others) is not None:
            others.watch(lambda: self.service.between_steps(others.check))
        self._follower: Follower | None = None
        if run is not None and network.step is not None:
            self._follower = Follower(run, self.service, network.step, metrics, _CONSOLE.print)
        self._step = network.step
        is_local = ip_address(listener.getsockname()[0]).is_loopback
        self._app = Endpoint(
            server,
            self.service,
            keys,
            metrics,
            self._step_now,
            is_local=is_local,
            retriever=self._retriever,
        ).app()

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Answer requests until a signal, or until the engine dies.

        Raises:
            RunError: the engine has died, and has shown why.
        """
        asyncio.run(self._run())
        if self.service.failure is not None:
            raise RunError("The engine has died, so the server has ended: see above.")

    async def _run(self) -> None:
        import uvicorn

        from paceline.serve.connections import Connection

        config = uvicorn.Config(
            self._app,
            http=Connection,
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_LAST_BYTES_S,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        self.service.start()
        if self._retriever is not None:
            self._retriever.start()
        if self._follower is not None:
            self._follower.start()
        with _signals(self.stop):
            await self._server.serve([self._listener])
        if self._follower is not None:
            self._follower.stop()
        self.service.end_thread()
        self.service.engine.close()
        if self._retriever is not None:
            self._retriever.end_thread()
        if self._recorder is not None:
            self._recorder.close()

    def _step_now(self) -> int | None:
        return self._step if self._follower is None else self._follower.step

    def stop(self) -> None:
        """As a signal asks: those under way may end; a second signal ends them at once."""
        if self.service.is_stopping:
            self._end()
            return
        _CONSOLE.print("stopping: no more requests are taken, those under way may end")
        self._stopping = asyncio.ensure_future(self.service.stop())
        self._stopping.add_done_callback(lambda _: self._end())

    def _end(self) -> None:
        self._server.should_exit = True


def _check(path: Path, options: ServeOptions, keys: Keys) -> None:
    if options.no_keys and options.key_file is not None:
        raise InputError("--no-keys and --api-key-file contradict each other: leave one out.")
    if options.follow and options.step is not None:
        raise InputError(
            f"--follow takes newer checkpoints than --step {options.step}: leave one of them out."
        )
    if options.follow and (path / "config.json").is_file():
        raise InputError(f"--follow is for a run, and {path} is a folder of weights: leave it out.")
    if not (keys or options.no_keys or _is_loopback(options.host or "127.0.0.1")):
        raise InputError(
            f"--host {options.host} lets other hosts ask: give API keys by --api-key-file or "
            f"{VARIABLE}, or say --no-keys."
        )


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _listener(host: str, port: int) -> socket.socket:
    """A socket at an address, whose connections end when a client has vanished or never reads."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise InputError(
            f"{host}:{port} can't be listened at ({error.strerror}): choose another --port or "
            "--host."
        ) from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _GONE_AFTER_S // 2)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _GONE_AFTER_S // 6)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_AFTER_S * 1000)
    # A connection is an open file, and shells allow 1,024.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return listener


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call something in the event loop."""
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    with suppress(ValueError, RuntimeError):  # of a thread, which gets none
        for number in numbers:
            loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
