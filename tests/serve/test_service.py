"""A server under stress: limits, time-outs, slow readers, keys, a dying engine, stopping."""

import json
import threading

import pytest
import torch
from openai import AuthenticationError, InternalServerError, RateLimitError

from paceline.config.errors import InputError
from paceline.serve import endpoint, serve_command, service
from paceline.serve.keys import VARIABLE, Keys, read_keys
from tests.serve.served import SMALL, serve, small_network, wait_until

LONG = {"max_tokens": 2000, "temperature": 0, "ignore_eos": True}


class Background:
    """A request in a thread of its own."""

    def __init__(self, served, **fields):
        self._ask = lambda: served.post(**fields)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        self.response = self._ask()

    def result(self):
        self._thread.join()
        return self.response


def ask_raw(served, **fields):
    """The connection of a request whose answer is still to be read."""
    body = json.dumps(fields).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection = served.connect()
    connection.sendall(head + body)
    return connection


def running(served, count):
    wait_until(lambda: served.engine.numbers()["running"] == count)


def test_more_than_may_wait_are_refused_and_may_ask_again():
    settings = SMALL.replace(max_sequences=2, max_waiting=1, stop_s=0.0)
    with serve(small_network(2048), settings) as served:
        busy = [Background(served, prompt="a", **LONG) for _ in range(2)]
        running(served, 2)
        waits = Background(served, prompt="b", max_tokens=1)
        wait_until(lambda: len(served.serving.service._open) == 3)
        refused = served.post(prompt="c", max_tokens=1)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["Retry-After"]) >= 1
        with pytest.raises(RateLimitError):
            served.client().completions.create(model="small", prompt="c")
        never = served.post(prompt="c", n=4)
        assert never.status_code == 400
        assert "asks for 4 texts, and this server makes or keeps waiting 3" in never.text
        assert served.metrics()["requests_total busy"] == 2
        assert served.metrics()["waiting_texts"] == 1
        served.stop()
        for each in (*busy, waits):
            assert each.result().status_code in (200, 503)


def test_a_request_that_takes_too_long_is_ended_whole_or_streamed():
    with serve(small_network(2048), SMALL.replace(timeout_s=0.5)) as served:
        ended = served.post(prompt="a", **LONG)
        assert ended.status_code == 504
        assert "serve.timeout_s" in ended.json()["error"]["message"]
        served.wait_until_idle()
        lines = served.post(prompt="a", stream=True, **LONG).text.splitlines()
        last = json.loads([line for line in lines if line][-1].removeprefix("data: "))
        assert last["error"]["code"] == "timeout"
        served.wait_until_idle()
        assert served.metrics()["requests_total timeout"] == 2


def test_a_reader_that_is_too_slow_is_given_up_and_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(service, "MOST_BEHIND", 8)
    with (
        serve(small_network(2048)) as served,
        ask_raw(served, prompt="a", **LONG, stream=True, n=8, logprobs=20) as connection,
    ):
        assert connection.recv(1) == b"H"
        assert served.post(prompt="other", max_tokens=3).status_code == 200
        wait_until(lambda: served.metrics()["requests_total slow_reader"] == 1)
        served.wait_until_idle()


def test_clients_that_vanish_free_their_blocks_at_once():
    with serve(small_network(4096, dtype=torch.float32)) as served:
        for number, streamed in enumerate((True, False), 1):
            connection = ask_raw(served, prompt="long", **LONG, stream=streamed, n=8)
            if streamed:
                assert connection.recv(1) == b"H"
            else:
                running(served, 8)
            connection.close()
            wait_until(lambda: served.metrics()["requests_total cancelled"] == number)  # noqa: B023
            served.wait_until_idle()
        assert served.metrics()["generated_tokens_total"] < 8 * LONG["max_tokens"]


def test_a_stream_that_is_closed_early_ends():
    with serve(small_network(4096, dtype=torch.float32)) as served:
        stream = served.client().completions.create(
            model="small", prompt="a", max_tokens=4000, stream=True
        )
        next(iter(stream))
        stream.close()
        served.wait_until_idle()
        assert served.metrics()["generated_tokens_total"] < 4000


def test_an_engine_that_dies_ends_all_requests_and_the_server(capfd):
    with serve(small_network(2048)) as served:
        asked = [
            Background(served, prompt="a", **LONG),
            Background(served, prompt="a", stream=True, **LONG),
        ]
        running(served, 2)

        def fall():
            raise RuntimeError("the device has fallen off the bus")

        served.serving.service.between_steps(fall)
        whole, streamed = (each.result() for each in asked)
        assert whole.status_code == 500
        assert "The engine has died" in whole.json()["error"]["message"]
        assert "The engine has died" in streamed.text
        served.thread.join()
    assert "The engine has died" in str(served.error)
    assert "the device has fallen off the bus" in capfd.readouterr().err


def test_a_server_that_stops_ends_what_is_under_way(monkeypatch):
    # uvicorn's own patience would do for such short texts.
    monkeypatch.setattr(serve_command, "_LAST_BYTES_S", 0)
    with serve(small_network(2048)) as served:
        streamed = Background(served, prompt="b", max_tokens=60, stream=True)
        running(served, 1)
        served.stop()
        assert streamed.result().text.endswith("data: [DONE]\n\n")
        served.thread.join()


def test_a_server_that_stops_waits_no_longer_than_it_may():
    with serve(small_network(2048), SMALL.replace(stop_s=0.2)) as served:
        whole = Background(served, prompt="a", **LONG)
        streamed = Background(served, prompt="b", stream=True, **LONG)
        running(served, 2)
        served.stop()
        assert whole.result().status_code == 503
        assert whole.result().headers["Retry-After"] == "5"
        assert "The server stops" in streamed.result().text
        served.thread.join()
        assert served.engine.is_idle


KEYS = ("a-key-of-24-characters-1", "a-key-of-24-characters-2")


def test_only_who_has_a_key_may_ask_and_shares_with_nobody():
    with serve(keys=Keys(KEYS)) as served:
        for key in ("none", "a-key-of-24-characters-", ""):
            with pytest.raises(AuthenticationError, match="No API key that this server knows"):
                served.client(key or "x").models.list()
        assert served.get("/v1/models").status_code == 401
        assert served.post(prompt="a").headers["WWW-Authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/metrics"):
            assert served.get(path).status_code == 200

        def cached(key, **more):
            done = served.client(key).completions.create(
                model="small", prompt="p" * 60, max_tokens=2, extra_body=more
            )
            return done.usage.prompt_tokens_details.cached_tokens

        assert [cached(KEYS[0]), cached(KEYS[0]), cached(KEYS[1])] == [0, 56, 0]
        together = {"cache_salt": "together"}
        assert [cached(KEYS[0], **together), cached(KEYS[1], **together)] == [0, 56]
        assert "a-key" not in served.get("/metrics").text


def test_keys_come_from_a_file_and_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEYS[0]}\n\n")
    monkeypatch.setenv(VARIABLE, f"{KEYS[1]}, {'x' * 20}")
    keys = read_keys(file)
    holders = {keys.holder(f"Bearer {key}") for key in (*KEYS, "x" * 20)}
    assert len(holders) == 3
    assert not any(key.encode() in holder for key in KEYS for holder in holders)
    monkeypatch.setenv(VARIABLE, "")
    assert not read_keys(None)
    for text in ("", "short\n", "x" * 300, "with a space in between\n"):
        file.write_text(text)
        with pytest.raises(InputError) as told:
            read_keys(file)
        assert text.strip() == "" or text.strip() not in str(told.value)


def test_metrics_tell_what_was_done():
    with serve() as served:
        before = served.metrics()
        assert before["ready"] == 1
        assert before["weights_step"] == 7
        for _ in range(2):
            served.post(prompt="p" * 60, max_tokens=10)
        served.post(prompt="p" * 60, max_tokens=10, stream=True)
        served.post(prompt="")
        served.wait_until_idle()
        after = served.metrics()
        assert after["requests_total done"] == 3
        assert after["requests_total refused"] == 1
        assert after["prompt_tokens_total"] == 180
        assert after["prompt_tokens_cached_total"] == 112
        assert after["generated_tokens_total"] == 30
        assert after["time_to_first_token_seconds_count"] == 3
        assert after["inter_token_seconds_count"] == 27
        assert after["time_per_output_token_seconds_count"] == 3
        assert after["request_seconds_count"] == 3
        assert after["blocks used"] == 0
        blocks = sum(after[f"blocks {state}"] for state in ("used", "kept", "empty"))
        assert blocks == served.engine.numbers()["blocks"]
        assert after["blocks kept"] > 0


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(endpoint, "_BODY_S", 0.2)
    with serve() as served, served.connect() as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
        connection.sendall(head + b"Content-Type: application/json\r\n\r\n{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")
        assert served.metrics()["requests_total refused"] == 1


def test_many_idle_connections_harm_nobody():
    with serve() as served:
        idle = [served.connect() for _ in range(400)]
        for each in idle[::2]:
            each.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        assert served.post(prompt="a", max_tokens=2).status_code == 200
        for each in idle:
            each.close()
        served.wait_until_idle()


def test_a_server_that_stops_is_not_ready_and_lives():
    with serve() as served:
        assert served.get("/ready").json() == {"status": "ready", "step": 7}
        served.serving.service.is_stopping = True
        assert served.get("/ready").status_code == 503
        assert served.get("/health").status_code == 200
        with pytest.raises(InternalServerError, match="The server stops"):
            served.client().completions.create(model="small", prompt="a")
        served.serving.service.is_stopping = False
