"""What of Paceline listens, to whom, and that nobody who reaches it has code run.

Each command that starts processes runs here while its sockets are looked at and attacked
(`tests.attacker`): by another account, where the tests are root's, else by the same one. What may
listen stands in docs/security.md, which this test reads. On several hosts: test_security_hosts.py.
"""

import ast
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch

import paceline
from paceline.models.weights import write_weights
from paceline.train.data.tokenizer import make_encoder
from tests.command_line import COMMAND, Started, python, ranks, write_tiny_job
from tests.generate.networks import MODELS, built
from tests.recommender.test_dlrm import SMALL as CLICK_JOB

REPOSITORY = Path(__file__).parents[1]
PATIENCE_S = 400.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- sockets -------------------------------------------------------------------------------------


def documented() -> dict[str, set[str]]:
    """Command -> what listens, from the table of docs/security.md."""
    text = (REPOSITORY / "docs/security.md").read_text()
    rows = re.findall(r"^\| `paceline ([a-z]+)[^|]*\| ([^|]+) \|", text, re.MULTILINE)
    found: dict[str, set[str]] = {}
    for command, what in rows:
        found.setdefault(command, set()).add(what.strip())
    return found


def listening(launcher: int, ports: dict[int, str]) -> dict[tuple[str, int], str]:
    """Address and port -> what listens there, of a process and all it started."""
    found = {}
    try:
        processes = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
    except psutil.NoSuchProcess:
        return {}
    for process in processes:
        try:
            sockets = process.net_connections("inet")
            is_server = "paceline.recommender.parameter_server.serve" in process.cmdline()
        except psutil.Error:
            continue
        for one in sockets:
            if one.status == psutil.CONN_LISTEN:
                kind = "table server" if is_server else "rank"
                kind = "store" if process.pid == launcher else kind
                found[one.laddr.ip, one.laddr.port] = ports.get(one.laddr.port, kind)
    return found


ENDLESS = "--set=train.steps=1000000"
WORKERS = ("comm.local.method=diloco", "comm.local.every=4")


class _Case:
    """A command, what of it should be seen listening, and the signal that ends it, if any."""

    def __init__(
        self,
        arguments: tuple[str, ...],
        listens: set[str],
        *,
        settings: tuple[str, ...] = (),
        ports: tuple[str, ...] = (),
        signal: int | None = None,
        write: Callable[[Path], object] = write_tiny_job,
    ) -> None:
        self.arguments, self.listens, self.write, self.signal = arguments, listens, write, signal
        names = {"metrics": "observe.prometheus_port", "debug page": "observe.debug_port"}
        self.ports = {free_port(): name for name in ports}
        told = [f"{names[name]}={port}" for port, name in self.ports.items()]
        self.settings = [f"--set={each}" for each in (*settings, *told)]


def _write_network(folder: Path) -> None:
    model = MODELS["grouped"].replace(vocab_size=257)
    tokens = make_encoder("bytes", ()).tokenizer.to_str().encode()
    state = built(model, torch.float32).state_dict()
    write_weights(folder / "weights", model, state, beside={"tokenizer.json": tokens})


def _served() -> _Case:
    port = free_port()
    arguments = ("serve", "weights", f"--port={port}")
    case = _Case(arguments, {"endpoint"}, signal=signal.SIGTERM, write=_write_network)
    case.ports[port] = "endpoint"
    return case


CASES = {
    "train": lambda: _Case(
        ("train", "job.toml", ENDLESS, *ranks(2)),
        {"rank", "metrics", "debug page"},
        ports=("metrics", "debug page"),
        signal=signal.SIGTERM,
    ),
    "workers": lambda: _Case(
        ("train", "job.toml", ENDLESS, "--set=checkpoint.every=4000", *ranks(3)),
        {"rank"},
        settings=(*WORKERS, "comm.timeout_s=20"),
        signal=signal.SIGTERM,
    ),
    "tables": lambda: _Case(
        ("train", "job.toml", ENDLESS, *ranks(2)),
        {"rank", "table server"},
        signal=signal.SIGTERM,
        write=lambda folder: (folder / "job.toml").write_text(CLICK_JOB),
    ),
    "bench": lambda: _Case(
        ("bench", "collectives", "--ranks=2", "--quick", "--no-pairs", "--sizes=64KiB,256KiB"),
        {"rank"},
    ),
    "serve": _served,
    "tune": lambda: _Case(
        ("tune", "job.toml", "--trials=1", *ranks(2)), {"rank"}, signal=signal.SIGINT
    ),
}


def attack(canary: Path, targets: Sequence[object]) -> str:
    words = [str(canary), *map(str, targets)]
    done = python("-m", "tests.attacker", *words, folder=REPOSITORY, timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", CASES)
def test_nothing_listens_beyond_loopback_and_no_attacker_has_code_run(name, tmp_path):
    case = CASES[name]()
    case.write(tmp_path)
    process = Started([COMMAND, *case.arguments, *case.settings], tmp_path, num_outputs=1)
    try:
        seen: dict[tuple[str, int], str] = {}
        end = time.monotonic() + PATIENCE_S
        while not case.listens <= set(seen.values()):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end, seen
            seen = listening(process.pid, case.ports)
            time.sleep(0.02)
        command = case.arguments[0]
        assert {address for address, _ in seen} <= {"127.0.0.1", "::1"}, seen
        assert set(seen.values()) <= documented()[command], seen
        told = attack(tmp_path / "canary", [f"{address}:{port}" for address, port in seen])
        print(told)
        if case.signal is not None and process.poll() is None:
            psutil.Process(process.pid).send_signal(case.signal)
        output, _ = process.communicate(PATIENCE_S)
    finally:
        process.kill()
    assert not (tmp_path / "canary").exists(), told
    assert "Traceback" not in output, output
    if name != "tune":  # which was interrupted
        assert process.returncode == 0, output


def _private(launcher: int) -> set[Path]:
    """Where a run's processes meet and what they are forked through, and all files they hold."""
    began = psutil.Process(launcher).create_time()
    all_stores = Path(tempfile.gettempdir()).glob("tmp*/store")
    stores = [store for store in all_stores if store.stat().st_mtime > began]
    found = {path for store in stores for path in (store, store.parent)}
    for process in psutil.Process(launcher).children(recursive=True):
        sockets = (one.laddr for one in process.net_connections("unix") if one.laddr)
        found |= {path for name in sockets for path in (Path(name), Path(name).parent)}
        held = (Path(f"/proc/{process.pid}/fd")).iterdir()
        opened = (Path(os.path.realpath(each)) for each in held)
        found |= {path for path in opened if path.is_file()}
        found |= {Path(f"/proc/{process.pid}/{name}") for name in ("environ", "mem", "cwd")}
    return {path for path in found if path.exists() and not path.is_relative_to("/dev/pts")}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which may become another account")
def test_another_account_reaches_no_file_of_a_run(tmp_path):
    write_tiny_job(tmp_path)
    process = Started([COMMAND, "train", "job.toml", ENDLESS, *ranks(2)], tmp_path, num_outputs=1)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        (control := Path(folder) / "open to all").touch()
        control.chmod(0o666)
        try:
            log = tmp_path / "runs/tiny/log/rank1.log"
            while not (log.exists() and (tmp_path / "runs/tiny/metrics.jsonl").exists()):
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.02)
            private = _private(process.pid)
            told = attack(tmp_path / "canary", [*private, control])
            psutil.Process(process.pid).send_signal(signal.SIGTERM)
            output, _ = process.communicate(PATIENCE_S)
        finally:
            process.kill()
    names = {path.name for path in private}
    assert {"store", "rank1.log", "environ"} <= names, private
    assert f"{control} was read, written to, renamed" in told, "the attacker does what it can"
    reached = [line for line in told.splitlines() if not line.endswith("was out of reach")]
    assert len(reached) == 1, reached
    assert process.returncode == 0, output


@pytest.mark.parametrize("command", [("doctor",), ("top", "runs/tiny"), ("plan", "job.toml")])
def test_other_commands_listen_nowhere(command, tmp_path):
    write_tiny_job(tmp_path)
    (tmp_path / "runs/tiny").mkdir(parents=True)
    process = Started([COMMAND, *command], tmp_path, num_outputs=1)
    try:
        end = time.monotonic() + 10
        while process.poll() is None and time.monotonic() < end:
            assert not listening(process.pid, {})
            time.sleep(0.02)
    finally:
        process.kill()
        process.communicate()
    assert command[0] not in documented()


# ---- what unpickles ------------------------------------------------------------------------------

# File and function -> why it may.
ALLOWED = {
    ("bench/rank_pool.py", "pickle.dumps"): "work for ranks of this process's own",
    ("bench/rank_pool.py", "pickle.loads"): "which came with the arguments of the rank's process",
    ("bench/rank_pool.py", "recv"): "an anonymous pipe between a process and one that it started",
    ("models/dcp.py", "pickle.Unpickler"): "one that knows the names of DCP's records alone",
    ("models/dcp.py", "pickle.UnpicklingError"): "an exception",
    ("models/dcp.py", "load"): "torch's own with weights_only",
    ("observe/snapshot.py", "pickle.Unpickler"): "one that refuses whatever has to be looked up",
    ("observe/snapshot.py", "pickle.UnpicklingError"): "an exception",
    ("train/custom/sent.py", "cloudpickle.dumps"): "work for ranks of this process's own",
    ("train/custom/sent.py", "cloudpickle.loads"): "which came as the function that it runs",
}
_CALLS = {
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def _unpicklers(tree: ast.AST) -> Iterator[str]:
    modules = {"pickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in modules:
            yield f"from {node.module}"
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = {alias.name for alias in node.names}
            yield from names & _CALLS
            yield from (name for name in names if name.endswith("distributed.rpc"))
        if isinstance(node, ast.Attribute):
            is_module = isinstance(node.value, ast.Name) and node.value.id in modules
            if is_module:
                yield f"{ast.unparse(node)}"
            if node.attr in _CALLS or ast.unparse(node).endswith(("torch.load", "dist.rpc")):
                yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "recv" and not node.args:  # a socket's says how much
                yield "recv"
            if any(
                word.arg == "allow_pickle" and ast.unparse(word.value) != "False"
                for word in node.keywords
            ):
                yield "allow_pickle"


def test_only_what_is_named_here_unpickles():
    package = Path(paceline.__file__).parent
    found = {
        (str(file.relative_to(package)), name)
        for file in package.rglob("*.py")
        for name in _unpicklers(ast.parse(file.read_text()))
    }
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "settings", [("layout.fsdp=2",), ("layout.pp=2", "layout.micro_batch=3")], ids=["fsdp", "pp"]
)
def test_ranks_that_train_unpickle_nothing(settings, tmp_path):
    """Checkpoints, evaluations, profiled windows and a resumed start among it."""
    write_tiny_job(tmp_path)
    sets = [f"--set={each}" for each in (*settings, "observe.profile_every=6")]
    for steps in (8, 12):
        command = ("train", "job.toml", f"--set=train.steps={steps}", *sets, *ranks(2))
        done = python("-m", "tests.train.audited_rank", *command, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    found = [file.read_text() for file in (tmp_path / "runs/tiny").glob("unpickled-*")]
    assert len(found) == 2, "one of each rank"
    assert set("".join(found).splitlines()) == set()
