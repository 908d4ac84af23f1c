"""Settings for the tests of training, and a store that speaks S3."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.request import urlopen

import pytest

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key-of-a-test",
    "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
}


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a moto server on loopback."""
    pytest.importorskip("s3fs", reason="the extra paceline[s3] is not installed")
    pytest.importorskip("moto", reason="moto[server] is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (tmp_path_factory.mktemp("moto") / "log").open("w")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while not _answers(address):
            assert server.poll() is None, "moto's server ended"
            assert time.monotonic() < deadline, "moto's server does not answer"
            time.sleep(0.05)
        yield address
    finally:
        server.kill()
        server.wait()
        log.close()


def _answers(address: str) -> bool:
    try:
        with urlopen(f"{address}/moto-api/", timeout=5):
            return True
    except OSError:
        return False


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket, reached with what stands in the environment."""
    import boto3

    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": s3_server}.items():
        monkeypatch.setenv(name, value)
    with urlopen(f"{s3_server}/moto-api/reset", data=b""):
        pass
    boto3.client("s3").create_bucket(Bucket="bucket")
    return "s3://bucket/prefix"


@pytest.fixture
def as_if_alone(monkeypatch):
    """No launcher's ranks around a run in this process."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
