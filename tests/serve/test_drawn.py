"""Requests drawn at random, many at once: whoever stays gets the text of the engine alone, and
nothing is left of those who leave."""

import asyncio
import json
import random
from contextlib import suppress

import httpx2

from tests.serve.served import PATIENCE_S, SMALL, Served, serve, small_network

NUM_REQUESTS, AT_ONCE = 100, 24


def drawn(draw: random.Random) -> dict:
    """The body of a request."""
    beginning = draw.choice(["a", "shared beginning of a prompt ", "x" * 70])
    fields = {
        "prompt": beginning + "b" * draw.randint(0, 9),
        "max_tokens": draw.randint(1, 40),
        "temperature": draw.choice([0, 0, 0.8, 1.5]),
        "seed": draw.randint(0, 2**40),
    }
    if draw.random() < 0.3:
        fields |= {"top_k": draw.choice([1, 5, 50]), "top_p": draw.choice([0.5, 0.9, 1])}
    if draw.random() < 0.3:
        fields |= {"stop": draw.choice(["a", ["e", "q"], ["\x00\x01"]])}
    if draw.random() < 0.2:
        fields |= {"repetition_penalty": 1.2, "presence_penalty": 0.5}
    if draw.random() < 0.2:
        fields |= {"cache_salt": draw.choice(["one", "two"])}
    return fields


async def ask(client: httpx2.AsyncClient, url: str, draw: random.Random, found: list) -> None:
    fields, kind = drawn(draw), draw.choice(["whole", "stream", "leave", "leave at once"])
    path = f"{url}/v1/completions"
    if kind == "whole":
        done = await client.post(path, json=fields)
        found.append((fields, done.json()["choices"][0]["text"]))
        return
    if kind == "leave at once":
        with suppress(TimeoutError):
            async with asyncio.timeout(draw.random() * 0.05):
                await client.post(path, json=fields)
        return
    text, num_lines = "", draw.randint(0, 5) if kind == "leave" else 10**9
    async with client.stream("POST", path, json={**fields, "stream": True}) as told:
        async for line in told.aiter_lines():
            if line == "data: [DONE]":
                found.append((fields, text))
            elif line:
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            num_lines -= 1
            if num_lines <= 0:
                return


async def everybody(served: Served, draw: random.Random) -> list:
    found, room = [], asyncio.Semaphore(AT_ONCE)
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:

        async def one() -> None:
            async with room:
                await ask(client, served.url, draw, found)

        await asyncio.gather(*(one() for _ in range(NUM_REQUESTS)))
    return found


def test_drawn_requests_get_what_each_alone_gets():
    network = small_network(128)
    scarce = SMALL.replace(kv_gb=2e-4, max_sequences=12)  # so that texts are computed anew
    with serve(network, scarce) as served:
        found = asyncio.run(everybody(served, random.Random(3)))
        served.wait_until_idle()
        assert served.metrics()["preemptions_total"] > 0
        assert served.metrics()["requests_total failed"] == 0
        assert len(found) > NUM_REQUESTS / 4
        for fields, text in found:
            prompt, stop = fields.pop("prompt"), fields.pop("stop", ())
            fields.pop("cache_salt", None)
            stops = (stop,) if isinstance(stop, str) else tuple(stop)
            assert text == served.alone(prompt, **fields, stop=stops)
