"""The endpoint over HTTP: texts as the engine alone makes them, in OpenAI's form."""

import asyncio
import json
import re
import threading
import time
from functools import partial

import httpx2
import pytest
import torch
from openai import APIError

from paceline.config.sampling import Sampling
from paceline.generate.engine import Engine
from paceline.serve import connections
from paceline.serve.bodies import _seed
from tests.serve.served import END, PATIENCE_S, SMALL, serve, small_network

GREEDY = {"max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def served():
    with serve(small_network()) as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_is_left(served):
    yield
    served.wait_until_idle()


# ---- texts --------------------------------------------------------------------------------------


def test_a_completion_is_the_text_of_the_engine_alone(served):
    done = served.client().completions.create(model="small", prompt="the quick", **GREEDY)
    assert done.choices[0].text == served.alone("the quick", **GREEDY)
    assert done.object == "text_completion"
    assert done.choices[0].finish_reason == "length"
    assert done.system_fingerprint == "step-7"
    usage = done.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (9, 24, 33)


def test_a_stream_is_the_whole_answer_in_parts(served):
    client = served.client()
    options = {
        "model": "small", "prompt": ["abc", "xyz"], "n": 2, "seed": 5, "max_tokens": 30,
        "logprobs": 2,
    }  # fmt: skip
    whole = client.completions.create(**options)
    texts, ends, tokens = {}, {}, {}
    usage = None
    for chunk in client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        assert chunk.id.startswith("cmpl-")
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            tokens.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
            assert choice.index not in ends
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    for choice in whole.choices:
        assert tokens[choice.index] == pytest.approx(choice.logprobs.token_logprobs)
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_chat_is_the_completion_of_its_prompt_whole_and_streamed(served):
    client = served.client()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    options = {"model": "small", "max_completion_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(messages=messages, **options)
    wanted = served.alone("Be brief.\nHello\n", max_tokens=20, temperature=0)
    assert whole.choices[0].message.content == wanted
    assert whole.choices[0].message.role == "assistant"
    parts = [*client.chat.completions.create(messages=messages, stream=True, **options)]
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == wanted
    assert parts[-1].choices[0].finish_reason == "length"
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "Be"}]}, messages[1]]
    again = client.chat.completions.create(messages=in_parts, **options)
    assert again.usage.prompt_tokens == len("Be\nHello\n")


def test_the_role_comes_with_the_first_token(served):
    """Clients measure the time to the first token by it."""
    ask = {"messages": [{"role": "user", "content": "hello"}], "stream": True, **GREEDY}
    with httpx2.stream("POST", f"{served.url}/v1/chat/completions", json=ask) as told:
        first = next(told.iter_raw())
    deltas = [json.loads(line)["choices"][0]["delta"] for line in first.split(b"data: ")[1:]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "content" in deltas[1]


def test_each_choice_depends_on_seed_and_index_alone(served):
    ask = {"prompt": "once upon", "max_tokens": 12, "seed": 11}
    many = served.post(**ask, n=4).json()["choices"]
    assert [choice["index"] for choice in many] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in many}) == 4
    few = served.post(**ask, n=2).json()["choices"]
    assert [choice["text"] for choice in few] == [choice["text"] for choice in many[:2]]
    assert many[0]["text"] == served.alone("once upon", max_tokens=12, seed=11)
    assert many[2]["text"] == served.alone("once upon", max_tokens=12, seed=_seed(11, 2))
    beside = served.post(**{**ask, "prompt": ["something", "once upon"]}, n=2).json()["choices"]
    assert [choice["text"] for choice in beside[2:]] == [choice["text"] for choice in few]


def test_best_of_answers_the_likeliest(served):
    ask = {"prompt": "best", "max_tokens": 8, "seed": 3}
    everything = served.post(**ask, n=5, logprobs=0).json()["choices"]

    def mean(choice):
        told = choice["logprobs"]["token_logprobs"]
        return sum(told) / len(told)

    wanted = sorted(everything, key=mean, reverse=True)[:2]
    done = served.post(**ask, n=2, best_of=5).json()
    assert [choice["text"] for choice in done["choices"]] == [each["text"] for each in wanted]
    assert done["choices"][0]["logprobs"] is None
    assert done["usage"]["completion_tokens"] == 40


def test_prompts_are_texts_or_tokens(served):
    as_text = served.post(prompt="abc", **GREEDY).json()["choices"][0]["text"]
    tokens = [*b"abc"]
    assert served.post(prompt=tokens, **GREEDY).json()["choices"][0]["text"] == as_text
    echoed = served.post(prompt=[tokens, [*b"x"]], echo=True, **GREEDY).json()["choices"]
    assert echoed[0]["text"] == "abc" + as_text
    assert echoed[1]["text"].startswith("x")
    streamed = served.client().completions.create(
        model="small", prompt="abc", echo=True, stream=True, **GREEDY
    )
    assert "".join(part.choices[0].text for part in streamed) == "abc" + as_text


def test_a_stop_string_ends_a_text_wherever_it_is_cut(served):
    text = served.alone("stop", max_tokens=60, seed=1)
    stop = text[20:24]
    cut = text[: text.find(stop)]
    ask = {"prompt": "stop", "max_tokens": 60, "seed": 1, "stop": [stop, "never to be seen"]}
    whole = served.post(**ask, logprobs=0).json()
    assert whole["choices"][0]["text"] == cut
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["logprobs"]["text_offset"][-1] < len(cut)
    parts = [*served.client().completions.create(model="small", stream=True, **ask)]
    assert len(parts) > 5  # the stop string's tokens come one by one
    assert "".join(part.choices[0].text for part in parts) == cut
    assert parts[-1].choices[0].finish_reason == "stop"


def test_the_end_of_a_document_ends_a_text_unless_it_is_ignored(served):
    ask = {"prompt": "a", "max_tokens": 5, "logit_bias": {str(END): 100}, "logprobs": 0}
    done = served.post(**ask).json()
    choice = done["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["logprobs"]["tokens"] == []
    assert done["usage"]["completion_tokens"] == 1
    assert served.post(**ask, ignore_eos=True).json()["usage"]["completion_tokens"] == 5


def test_logprobs_are_those_of_the_network(served):
    ask = {"max_tokens": 6, "temperature": 0}
    chosen = served.post(prompt="hey\n", **ask, logprobs=3).json()["choices"][0]["logprobs"]
    engine = Engine(served.network.decoder, SMALL, served.network.tokenizer, {END})
    sequence = engine.submit([*b"hey\n"], Sampling(**ask, **served.sampling, logprobs=3))
    while not engine.is_idle:
        engine.step()
    assert chosen["token_logprobs"] == pytest.approx([t.chosen for t in sequence.logprobs])
    chat = served.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "hey"}], logprobs=True, top_logprobs=3, **ask,
    ).json()["choices"][0]["logprobs"]["content"]  # fmt: skip
    assert [bytes(each["bytes"]) for each in chat] == [bytes([t]) for t in sequence.made]
    for told, wanted in zip(chat, sequence.logprobs, strict=True):
        best = [(top["bytes"], top["logprob"]) for top in told["top_logprobs"]]
        assert best == [([token], pytest.approx(value)) for token, value in wanted.likeliest]


def test_an_echo_is_told_with_what_the_network_thinks_of_it(served):
    prompts = ["once upon a time", [*"aß".encode(), ord("b")], "z"]
    ask = {"prompt": prompts, "echo": True, "logprobs": 2, "temperature": 0}
    scored = served.post(**ask, max_tokens=0).json()
    whole = served.post(**ask, max_tokens=5).json()
    texts = served.post(prompt=prompts, logprobs=2, temperature=0, max_tokens=5).json()["choices"]
    assert scored["usage"]["completion_tokens"] == 0
    for prompt, only, both, text in zip(
        prompts, scored["choices"], whole["choices"], texts, strict=True
    ):
        data = prompt.encode() if isinstance(prompt, str) else bytes(prompt)
        assert only["text"] == data.decode()
        assert only["finish_reason"] == "length"
        told = only["logprobs"]
        first, *others = told["token_logprobs"]
        assert first is None
        assert told["top_logprobs"][0] is None
        tokens = torch.tensor([[*data]])
        log = served.network.decoder(tokens)[0, :-1].float().log_softmax(-1)
        wanted = log.gather(-1, tokens[0, 1:, None])[:, 0].tolist()
        assert others == pytest.approx(wanted, abs=1e-4)
        assert all(len(each) == 2 for each in told["top_logprobs"][1:])
        assert both["text"] == data.decode() + text["text"]
        for name, values in both["logprobs"].items():
            before, after = values[: len(data)], values[len(data) :]
            assert before == told[name]
            moved = len(data.decode()) if name == "text_offset" else 0
            assert after == [each + moved if moved else each for each in text["logprobs"][name]]
    assert scored["choices"][0]["logprobs"]["text_offset"] == [*range(16)]
    assert scored["choices"][1]["logprobs"]["text_offset"] == [0, 1, 1, 2]
    for choice, max_tokens in ((scored["choices"][0], 0), (whole["choices"][0], 5)):
        fields = {**ask, "prompt": prompts[0], "max_tokens": max_tokens}
        parts = [*served.client().completions.create(model="small", stream=True, **fields)]
        streamed = [part.choices[0].model_dump() for part in parts]
        assert "".join(part["text"] for part in streamed) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [each for part in streamed for each in part["logprobs"][name]] == values
    served.wait_until_idle()


def test_what_was_there_is_told_and_a_salt_keeps_it_apart(served):
    def cached(**salt):
        done = served.post(prompt="p" * 60, max_tokens=2, **salt).json()
        return done["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") == 56
    assert cached(cache_salt="yours") == 0
    assert cached() == 0


def test_models_are_told(served):
    client = served.client()
    (model,) = client.models.list().data
    assert model.id == "small"
    assert client.models.retrieve("small").max_model_len == 256
    assert served.get("/v1/models/other/name").status_code == 404


# ---- constrained texts ---------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}


def test_texts_are_instances_of_their_schema(served):
    jsonschema = pytest.importorskip("jsonschema")
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
    choices = served.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "a pet"}],
        response_format=form, max_tokens=250, n=6, seed=1, top_k=20,
    ).json()["choices"]  # fmt: skip
    ended = [each for each in choices if each["finish_reason"] == "stop"]
    assert len(ended) >= 3
    for each in ended:
        jsonschema.validate(json.loads(each["message"]["content"]), SCHEMA)


def test_a_text_that_max_tokens_cuts_says_so(served):
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
    (choice,) = served.post(prompt="a pet", response_format=form, max_tokens=5).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["text"].lstrip()[0] == "{"


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-c]+x"}, r"[0-9]{3}-[a-c]+x"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "a" digit* "."\ndigit: /[0-9]/'}, r"a[0-9]*\."),
        ({"json": {"type": "boolean"}}, "true|false"),
    ],
)
def test_other_grammars(served, outputs, pattern):
    done = served.post(prompt="q", structured_outputs=outputs, max_tokens=150, n=3, seed=0).json()
    ended = [each["text"] for each in done["choices"] if each["finish_reason"] == "stop"]
    assert ended
    for text in ended:
        assert re.fullmatch(pattern, text)


def test_a_grammar_that_fails_later_ends_its_request_alone(served):
    ask = {"prompt": "q", "max_tokens": 50, "seed": 0}
    endless = {"grammar": 'start: /[a-z]{3}/ b\nb: "c" b'}
    refused(served.post(**ask, structured_outputs=endless), 400, "can't be followed any further")
    stream = served.client().completions.create(
        model="small", stream=True, **ask, extra_body={"structured_outputs": endless}
    )
    with pytest.raises(APIError, match="can't be followed any further"):
        list(stream)


# ---- what is refused -----------------------------------------------------------------------------

ASK = {"prompt": "a", "max_tokens": 2}
TOO_DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BODIES = {
    "no JSON": (b"{", 400, "not valid JSON"),
    "nothing": (b"", 400, "not valid JSON"),
    "no object": (b"[1]", 400, "The body"),
    "too deep": (TOO_DEEP, 400, "recursion limit"),
    "no UTF-8": (b'{"prompt": "\xff\xfe"}', 400, "not valid JSON"),
    "half a character": (b'{"prompt": "\\ud800"}', 400, "not valid JSON"),
    "not a number": (b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
    "an endless number": (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
    "a huge number": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, ""),
}
FIELDS = {
    "unknown": ({**ASK, "temprature": 1}, 400, "temprature is not a setting; did you mean"),
    "no prompt": ({"max_tokens": 2}, 400, "prompt is missing"),
    "no text": ({**ASK, "prompt": {"a": 1}}, 400, "prompt"),
    "no prompts": ({**ASK, "prompt": []}, 400, "prompt has 0 texts"),
    "too many prompts": ({**ASK, "prompt": ["a"] * 129}, 400, "prompt has 129 texts"),
    "mixed prompts": ({**ASK, "prompt": ["a", 1]}, 400, "neither a text nor its tokens"),
    "an empty prompt": ({**ASK, "prompt": ""}, 400, "The prompt has no tokens"),
    "one empty prompt": ({**ASK, "prompt": ["a", ""]}, 400, "The prompt has no tokens"),
    "too long": ({**ASK, "prompt": "a" * 300}, 400, "The prompt has 300 tokens"),
    "unknown token": ({**ASK, "prompt": [257]}, 400, "token 257"),
    "negative token": ({**ASK, "prompt": [-1]}, 400, "token -1"),
    "huge token": ({**ASK, "prompt": [2**70], "echo": True}, 400, "token"),
    "another model": ({**ASK, "model": "gpt-9"}, 404, "is not served here: use 'small'"),
    "no tokens": ({**ASK, "max_tokens": 0}, 400, "max_tokens = 0"),
    "many tokens": ({**ASK, "max_tokens": 10**30}, 400, "max_tokens"),
    "hot": ({**ASK, "temperature": 101}, 400, "temperature = 101"),
    "no top_p": ({**ASK, "top_p": 0}, 400, "top_p"),
    "text": ({**ASK, "n": "2"}, 400, "n = '2'"),
    "true": ({**ASK, "n": True}, 400, "n = True"),
    "many choices": ({**ASK, "n": 129}, 400, "n = 129"),
    "few candidates": ({**ASK, "n": 3, "best_of": 2}, 400, "best_of = 2 is less than n = 3"),
    "best of a stream": ({**ASK, "best_of": 2, "stream": True}, 400, "best_of"),
    "many stops": ({**ASK, "stop": ["a"] * 17}, 400, "stop"),
    "an empty stop": ({**ASK, "stop": ""}, 400, "stop"),
    "bias for nobody": ({**ASK, "logit_bias": {"300": 1}}, 400, "logit_bias names token 300"),
    "bias for words": ({**ASK, "logit_bias": {"the": 1}}, 400, "logit_bias names 'the'"),
    "a huge bias": ({**ASK, "logit_bias": {"3": 101}}, 400, "logit_bias"),
    "suffix": ({**ASK, "suffix": "b"}, 400, "suffix is not taken"),
    "usage of no stream": ({**ASK, "stream_options": {}}, 400, "stream_options"),
    "unknown option": (
        {**ASK, "stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x is not"
    ),
    "an echo of no text": ({**ASK, "echo": True, "max_tokens": 0}, 400, "max_tokens = 0"),
    "an endless salt": ({**ASK, "cache_salt": "x" * 300}, 400, "cache_salt"),
    "no schema": ({**ASK, "response_format": {"type": "json_schema"}}, 400, "json_schema is miss"),
    "no kind": ({**ASK, "response_format": {"type": "xml"}}, 400, "response_format.type = 'xml'"),
    "bad schema": (
        {**ASK, "structured_outputs": {"json": {"type": "foo"}}}, 400, "The json schema can't be"
    ),
    "schema of nothing": (
        {**ASK, "structured_outputs": {"json": {"enum": []}}}, 400, "Unsatisfiable"
    ),
    "deep schema": (
        {**ASK, "structured_outputs": {"json": '{"not":' * 3000 + "{}" + "}" * 3000}},
        400, "can't be compiled",
    ),
    "long schema": ({**ASK, "structured_outputs": {"regex": "a" * 100_001}}, 400, "grammar.source"),
    "bad regex": ({**ASK, "structured_outputs": {"regex": "[0-9"}}, 400, "The regex can't be"),
    "bad grammar": ({**ASK, "structured_outputs": {"grammar": "start: ("}}, 400, "The lark can't"),
    "two grammars": (
        {**ASK, "structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "exactly one of"
    ),
    "both words": (
        {**ASK, "structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
        400, "leave one out",
    ),
    "a huge regex": (
        {**ASK, "structured_outputs": {"regex": "(a{1,1000}){1,1000}" * 50}}, 400, "too many"
    ),
    "no end": ({**ASK, "structured_outputs": {"grammar": 'start: "a" start'}}, 400, "Too many"),
}  # fmt: skip
HELLO = [{"role": "user", "content": "hello"}]
CHATS = {
    "tools": ({"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools is not taken"),
    "no messages": ({"messages": []}, 400, "messages"),
    "no role": ({"messages": [{"content": "a"}]}, 400, "role is missing"),
    "odd role": ({"messages": [{"role": "boss", "content": "a"}]}, 400, "role = 'boss'"),
    "no content": ({"messages": [{"role": "user", "content": None}]}, 400, "content"),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
        400, "image_url",
    ),
    "many messages": ({"messages": HELLO * 5000}, 400, "messages"),
    "top of nothing": ({"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs"),
    "two lengths": (
        {"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 2}, 400, "leave one out"
    ),
    "prompt": ({"messages": HELLO, "prompt": "a"}, 400, "prompt is not a setting"),
}  # fmt: skip


def refused(response, status, words):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert any(word in error["message"] for word in words.split("|")), error["message"]
    assert error["message"].endswith((".", "?"))
    assert "\n" not in error["message"]
    assert len(error["message"]) < 700
    return error


@pytest.mark.parametrize("case", BODIES)
def test_a_bad_body_is_refused_in_a_sentence(served, case):
    body, status, words = BODIES[case]
    headers = {"Content-Type": "application/json"}
    response = httpx2.post(
        f"{served.url}/v1/completions", content=body, headers=headers, timeout=PATIENCE_S
    )
    refused(response, status, words)
    served.wait_until_idle()


@pytest.mark.parametrize("case", FIELDS)
def test_a_bad_field_is_refused_in_a_sentence(served, case):
    fields, status, words = FIELDS[case]
    refused(served.post(**fields), status, words)
    served.wait_until_idle()


@pytest.mark.parametrize("case", CHATS)
def test_a_bad_chat_is_refused_in_a_sentence(served, case):
    fields, status, words = CHATS[case]
    refused(served.post("/v1/chat/completions", **fields), status, words)


def test_the_field_is_named_for_programs(served):
    assert refused(served.post(**ASK, foo=1), 400, "foo")["param"] == "foo"
    assert refused(served.post(**ASK, top_p=7), 400, "top_p")["param"] == "top_p"
    error = refused(served.post(**{**ASK, "model": "x"}), 404, "x")
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_null_is_a_field_that_was_left_out(served):
    nothing = dict.fromkeys(["n", "stop", "seed", "logprobs", "suffix", "user", "logit_bias"])
    assert served.post(**ASK, **nothing).status_code == 200
    refused(served.post(**ASK, foo=None), 400, "foo is not a setting")


def test_what_a_server_is_told_holds_for_what_a_request_leaves_out():
    with serve(sampling={"top_k": 1, "max_tokens": 3}) as served:
        likeliest = served.alone("abc", temperature=0)
        first, every = (served.post(prompt="abc", seed=4, **more) for more in ({}, {"top_k": -1}))
        assert first.json()["choices"][0]["text"] == likeliest
        assert every.json()["choices"][0]["text"] == served.alone("abc", seed=4, top_k=None)
        assert every.json()["usage"]["completion_tokens"] == 3


def test_paths_and_methods(served):
    refused(served.get("/v1/completions"), 405, "GET is not for /v1/completions")
    refused(served.get("/v1/audio"), 404, "/v1/audio is not a path")
    refused(served.post("/"), 404, "/ is not a path")
    form = httpx2.post(f"{served.url}/v1/completions", data={"prompt": "a"})
    refused(form, 415, "application/json")


def test_a_large_body_is_refused_before_it_is_whole(served):
    def endless():
        while True:
            yield b" " * 65536

    headers = {"Content-Type": "application/json"}
    try:
        response = httpx2.post(f"{served.url}/v1/completions", content=endless(), headers=headers)
    except httpx2.WriteError:
        return  # the connection is closed while the client still writes
    refused(response, 413, "8 MiB")


def test_what_is_no_http_harms_nobody(served):
    with served.connect() as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")
    with served.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n")
    assert served.post(**ASK).status_code == 200


def test_a_client_that_never_ends_its_head_is_given_up(served, monkeypatch):
    half = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: a"
    monkeypatch.setattr(connections, "HEAD_S", 1.0)
    for is_first in (True, False):
        with served.connect() as connection:
            if not is_first:
                connection.sendall(half + b"\r\n\r\n")
                assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            connection.sendall(half)
            told = b"".join(iter(partial(connection.recv, 1000), b""))
        assert b"HTTP/1.1 408" in told


def test_a_request_whose_head_was_here_in_time_may_take_longer(served, monkeypatch):
    body = json.dumps(ASK).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    monkeypatch.setattr(connections, "HEAD_S", 1.0)
    with served.connect() as connection:
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n")
        time.sleep(1.5)
        connection.sendall(body)
        told = b"".join(iter(partial(connection.recv, 1000), b""))
    assert told.startswith(b"HTTP/1.1 200")


def test_a_page_that_asks_by_a_name_of_its_own_is_refused(served):
    headers = {"Host": "evil.example:80"}
    refused(httpx2.get(f"{served.url}/v1/models", headers=headers), 403, "Host header")
    for host in ("localhost:1", "127.0.0.1", "[::1]:8000"):
        asked = httpx2.get(f"{served.url}/v1/models", headers={"Host": host})
        assert asked.status_code == 200


# ---- many, and those who leave -------------------------------------------------------------------


def test_hundreds_at_once_get_what_each_alone_gets(served):
    number, answers = 300, {}

    async def everybody():
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:

            async def ask(index):
                fields = {"prompt": f"{index % 7}", "max_tokens": 4, "seed": index % 7}
                done = await client.post(f"{served.url}/v1/completions", json=fields)
                answers[index] = done.json()["choices"][0]["text"]

            await asyncio.gather(*map(ask, range(number)))

    asyncio.run(everybody())
    wanted = [served.alone(f"{seed}", max_tokens=4, seed=seed) for seed in range(7)]
    assert answers == {index: wanted[index % 7] for index in range(number)}


def test_texts_beside_a_vanishing_client_are_not_changed(served):
    wanted = served.alone("beside", max_tokens=40, seed=2)
    found = []
    asking = threading.Thread(
        target=lambda: found.append(served.post(prompt="beside", max_tokens=40, seed=2).json())
    )
    asking.start()
    for _ in range(5):
        stream = served.client().completions.create(
            model="small", prompt="x", max_tokens=100, stream=True
        )
        next(iter(stream))
        stream.close()
    asking.join()
    assert found[0]["choices"][0]["text"] == wanted
