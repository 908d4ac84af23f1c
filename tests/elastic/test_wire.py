"""Messages between agents, in one process: who doesn't know the secret says nothing, and nobody
changes, repeats or leaves out a line."""

import asyncio
from pathlib import Path

import pytest

from paceline.elastic.wire import (
    Listener,
    Message,
    StreamChannel,
    decode,
    dial,
    encode,
    secret_of,
)

SECRET = b"s" * 32


def _talk(act, secret=SECRET):
    """Run `act(port, heard)` beside a listener that keeps what it hears, and answers it."""

    async def main() -> list[Message]:
        waiting = asyncio.all_tasks()
        heard: list[Message] = []

        async def on_channel(channel: StreamChannel) -> None:
            while (message := await channel.receive()) is not None:
                heard.append(message)
                channel.send({"kind": "heard", "number": len(heard)})
            heard.append({"kind": "gone"})

        listener = Listener(secret, on_channel)
        port = await listener.open("127.0.0.1")
        await act(port, heard)
        listener.close()
        # What was let go is closed here: else its collection makes a later test fail.
        if accepted := asyncio.all_tasks() - waiting:
            await asyncio.wait(accepted)
        await asyncio.sleep(0.05)
        return heard

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_messages_arrive_in_order_both_ways():
    async def act(port, _heard):
        channel = await dial("127.0.0.1", port, SECRET, 5)
        for number in range(3):
            channel.send({"kind": "a", "text": "ä" * 1000, "number": number})
            assert await channel.receive() == {"kind": "heard", "number": number + 1}
        channel.close()
        await asyncio.sleep(0.05)

    heard = _talk(act)
    assert [one.get("number") for one in heard] == [0, 1, 2, None]


def test_who_does_not_know_the_secret_is_not_heard():
    async def act(port, _heard):
        with pytest.raises(ConnectionError):
            await dial("127.0.0.1", port, b"t" * 32, 5)

    assert _talk(act) == []


@pytest.mark.parametrize("harm", ["changed", "repeated", "left out", "no mac", "no message"])
def test_a_line_that_is_not_the_next_of_this_peer_ends_the_channel(harm):
    async def act(port, heard):
        channel = await dial("127.0.0.1", port, SECRET, 5)
        written: list[bytes] = []
        real = channel._writer.write
        channel._writer.write = written.append
        channel.send({"kind": "one"})
        channel.send({"kind": "two"})
        one, two = written
        lines = {
            "changed": [one.replace(b"one", b"ONE")],
            "repeated": [one, one],
            "left out": [two],
            "no mac": [encode({"kind": "one"})],
            "no message": [b"\xff" * 100 + b"\n"],
        }[harm]
        for line in lines:
            real(line)
        while {"kind": "gone"} not in heard:
            await asyncio.sleep(0.01)
        channel.close(at_once=True)
        await asyncio.sleep(0.05)

    heard = _talk(act)
    assert heard == ([{"kind": "one"}] if harm == "repeated" else []) + [{"kind": "gone"}]


@pytest.mark.parametrize("line", [b"[1]", b"{}", b'{"kind": 3}', b"{", b"[" * 100_000])
def test_what_is_no_message_is_refused(line):
    with pytest.raises(ValueError, match=r"."):
        decode(line)


def test_nobody_there_is_told_from_nobody_answers():
    async def act(port, _heard):
        async def say_nothing(_reader, writer):
            await asyncio.sleep(0.3)
            writer.close()

        silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        with pytest.raises(ConnectionError, match="does not answer"):
            await dial("127.0.0.1", silent.sockets[0].getsockname()[1], SECRET, 0.1)
        silent.close()
        await asyncio.sleep(0.4)

    _talk(act)

    async def refused() -> None:
        server = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        with pytest.raises(ConnectionRefusedError):
            await dial("127.0.0.1", port, SECRET, 5)

    asyncio.run(refused())


def test_all_agents_read_one_secret_that_is_the_owners_alone(tmp_path: Path):
    first = secret_of(tmp_path / "agents")
    assert len(first) == 32
    assert secret_of(tmp_path / "agents") == first
    assert (tmp_path / "agents" / "secret").stat().st_mode & 0o777 == 0o600
    assert [file.name for file in (tmp_path / "agents").iterdir()] == ["secret"]
