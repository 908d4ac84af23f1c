"""Embeddings of the endpoint: the network's own states, by OpenAI's client, beside texts."""

import asyncio
import base64
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.generate.embed import embed, parts_of
from tests.generate.networks import MODELS, built, prompt
from tests.serve.served import serve, small_network, wait_until

TEXTS = ["the quick brown fox", "a", "jumps over the lazy dog, again and again", "ä"]


@pytest.fixture(scope="module")
def served():
    with serve() as served:
        yield served


def vector(network, tokens):
    """Of a text alone: the mean of what the head reads, of length 1."""
    kept = []
    hook = network.norm.register_forward_hook(lambda module, given, states: kept.append(states))
    with torch.no_grad():
        network(torch.tensor([tokens]))
    hook.remove()
    return F.normalize(kept[0][0].float().mean(0), dim=0)


@pytest.mark.parametrize("name", MODELS)
def test_vectors_are_of_each_text_alone_whatever_goes_with_it(name):
    decoder = built(MODELS[name])
    texts = [prompt(length, length) for length in (1, 30, 7, 30)]
    together = embed(decoder, texts)
    for text, found in zip(texts, together, strict=True):
        torch.testing.assert_close(found, vector(decoder, text))
    last = embed(decoder, texts, "last")
    torch.testing.assert_close(last[0], together[0])  # of one token
    assert not torch.allclose(last[1], together[1], atol=1e-3)
    assert embed(built(MODELS[name], torch.bfloat16), texts).dtype == torch.float32


def test_texts_of_like_length_go_together():
    lengths = [9, 1, 8, 30, 2]
    parts = [*parts_of(lengths, 20)]
    assert parts == [[1, 4], [2, 0], [3]]


def test_openais_client_gets_vectors_whole_and_as_bytes(served):
    client = served.client()
    for options in ({}, {"encoding_format": "float"}):  # left out, it asks for base64
        told = client.embeddings.create(model="small", input=TEXTS, **options)
        assert [each.index for each in told.data] == [0, 1, 2, 3]
        assert told.usage.prompt_tokens == sum(len(text.encode()) for text in TEXTS)
        for text, each in zip(TEXTS, told.data, strict=True):
            wanted = vector(served.network.decoder, list(text.encode()))
            assert each.embedding == pytest.approx(wanted.tolist(), abs=1e-6)
    one = client.embeddings.create(model="small", input=list(b"the quick brown fox"))
    assert one.data[0].embedding == pytest.approx(told.data[0].embedding, abs=1e-6)


def test_an_encoder_serves_vectors_and_no_texts():
    network = small_network()
    model = network.decoder.model.replace(causal=False, residual="post_norm", embedding_norm=True)
    network = dataclasses.replace(network, decoder=built(model))
    with serve(network) as served:
        told = served.client().embeddings.create(model="small", input=TEXTS).data
        for text, each in zip(TEXTS, told, strict=True):
            wanted = vector(network.decoder, list(text.encode()))
            assert each.embedding == pytest.approx(wanted.tolist(), abs=1e-6)
        refused = served.post(prompt="a")
        assert refused.status_code == 400
        assert "makes no texts" in refused.text


def test_bytes_are_little_endian_fp32(served):
    ask = {"input": "a", "encoding_format": "base64"}
    told = served.post("/v1/embeddings", **ask).json()["data"][0]["embedding"]
    read = np.frombuffer(base64.b64decode(told), "<f4")
    plain = served.post("/v1/embeddings", input="a").json()["data"][0]["embedding"]
    np.testing.assert_array_equal(read, np.array(plain, np.float32))


def test_texts_beside_it_stay_as_they_are(served):
    asked = {"prompt": "the quick", "max_tokens": 40, "temperature": 0}

    def ask(number):
        if number % 2:
            return served.post("/v1/embeddings", input=TEXTS * 20).json()["data"][5]["embedding"]
        return served.post(**asked).json()["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(ask, range(12)))
    text = served.alone("the quick", max_tokens=40, temperature=0.0)
    assert told[::2] == [text] * 6
    assert all(each == told[1] for each in told[1::2])
    served.wait_until_idle()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "input is missing"),
        ({"input": []}, "input has 0 texts"),
        ({"input": ""}, "has no tokens"),
        ({"input": [["a"]]}, "input is neither a text nor its tokens"),
        ({"input": [300]}, "has token 300, but the network knows"),
        ({"input": "a" * 257}, "A text has 257 tokens, and the network takes 256"),
        ({"input": "a", "dimensions": 8}, "dimensions is not taken"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format = 'int8'"),
        ({"input": "a", "inputs": "b"}, "inputs is not a setting"),
    ],
)
def test_what_can_not_be_embedded_is_refused_in_a_sentence(served, fields, said):
    answer = served.post("/v1/embeddings", **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert said in error["message"]
    assert served.post("/v1/embeddings", input="a", model="other").status_code == 404


def test_a_client_that_goes_away_leaves_the_rest_undone():
    network = small_network()
    with serve(network) as served:
        forward, count = network.decoder.forward, []

        def counted(*args, **options):
            count.append(1)
            return forward(*args, **options)

        network.decoder.forward = counted

        async def go():
            connection = await asyncio.open_connection(*served.address)
            body = '{"input": [' + ", ".join([f'"{"a" * 200}"'] * 128) + "]}"
            head = "POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection[1].write((head + body).encode())
            await connection[1].drain()
            while not count:
                await asyncio.sleep(0.001)
            connection[1].close()

        asyncio.run(go())
        wait_until(lambda: served.metrics()["requests_total cancelled"] == 1)
        assert len(count) < 128
