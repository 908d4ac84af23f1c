"""Retrieval: indices of documents, searches, and answers that are made from them."""

import json
import random
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

pytest.importorskip("faiss")

from paceline.config.errors import InputError
from paceline.config.serving import Retrieval, read_endpoint_settings
from paceline.models.weights import write_weights
from paceline.serve.retrieval import build
from paceline.serve.retrieval.build import Cut, build_index, nearest, recall_of
from paceline.serve.retrieval.documents import chunks_of, read_documents
from paceline.serve.retrieval.encoder import open_encoder
from paceline.serve.retrieval.folder import FILES, IndexFolder, sum_of
from paceline.serve.retrieval.lists import Lists
from paceline.serve.retrieval.retriever import BatchSize, Retriever, open_retriever
from paceline.train.data.tokenizer import make_encoder
from tests.command_line import paceline
from tests.generate.networks import MODELS, built
from tests.serve.served import PATIENCE_S, serve, small_network, wait_until
from tests.test_names import ROOT

WORDS = ["brown", "dog", "fox", "jumps", "lazy", "over", "quick", "the", "ärger", "süß"]


def write_network(folder, seed=0, longest=96):
    model = MODELS["grouped"].replace(vocab_size=257, max_seq_len=longest)
    decoder = built(model, torch.float32, seed)
    write_weights(folder, model, decoder.state_dict())
    make_encoder("bytes", ()).tokenizer.save(str(folder / "tokenizer.json"))


def write_documents(folder, number=60):
    folder.mkdir()
    pick = random.Random(0)
    for name in range(number):
        text = " ".join(pick.choices(WORDS, k=pick.randint(5, 60)))
        (folder / f"{name:03}.txt").write_text(text)
    rows = [{"text": "a row of its own"}, {"text": " "}, {"text": "another row"}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Documents, an encoder, another one, and an index."""
    folder = tmp_path_factory.mktemp("retrieval")
    write_documents(folder / "documents")
    write_network(folder / "encoder")
    write_network(folder / "other", seed=1)
    done = paceline(
        "index", "documents", "--encoder", "encoder", "--out", "idx",
        "--tokens", "40", "--overlap", "8", "--json", folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["num_documents"] == 62
    assert (told["num_lists"], told["probes"], told["recall"]) == (1, 1, 1.0)
    assert not (folder / "idx.partial").exists()
    return folder


@pytest.fixture
def copied(place, tmp_path):
    return shutil.copytree(place / "idx", tmp_path / "idx")


def vectors_of(place):
    """All chunks of the index, and their vectors."""
    folder = IndexFolder(place / "idx")
    texts = [folder.text(chunk) for chunk in range(len(folder))]
    return folder, texts, open_encoder(place / "encoder").vectors(texts)


# ---- documents ----------------------------------------------------------------------------------


def test_documents_are_files_and_rows_and_chunks_cover_them(place):
    documents = {each.name: each.text for each in read_documents(place / "documents")}
    assert documents["rows.jsonl:1"] == "a row of its own"
    assert documents["rows.jsonl:3"] == "another row"
    assert "rows.jsonl:2" not in documents
    folder = IndexFolder(place / "idx")
    covered = {name: set() for name in documents}
    for chunk in range(len(folder)):
        name, start, stop = folder.place(chunk)
        assert folder.text(chunk) == documents[name][start:stop]
        covered[name] |= set(range(start, stop))
    assert all(len(covered[name]) == len(text) for name, text in documents.items())


def test_chunks_overlap_by_tokens():
    tokenizer = make_encoder("bytes", ()).tokenizer
    text = "abcdefghij"
    cut = [text[c.start : c.stop] for c in chunks_of(text, tokenizer, 4, 1)]
    assert cut == ["abcd", "defg", "ghij"]
    assert [text[c.start : c.stop] for c in chunks_of("ab", tokenizer, 4, 1)] == ["ab"]
    assert chunks_of("", tokenizer, 4, 1) == []


# ---- searches -----------------------------------------------------------------------------------


def test_a_search_is_that_of_looking_at_all(place):
    folder, texts, vectors = vectors_of(place)
    found = Lists(folder).search(vectors[:20], 5, 1)
    wanted = nearest(vectors[:20], vectors, 5)
    assert [[hit.chunk for hit in hits] for hits in found] == wanted.tolist()
    assert found[0][0].score == pytest.approx(1, abs=1e-5)
    alone = Retriever(folder, open_encoder(place / "encoder")).find([texts[7]], 1)
    assert (alone[0][0].text, alone[0][0].chunk) == (texts[7], 7)


def index_of(given, tmp_path, monkeypatch, place, fewest=200):
    """An index of many lists, of vectors that are given."""

    class Given:
        tokenizer = make_encoder("bytes", ()).tokenizer
        width, longest, step = given.shape[1], 96, None

        def vectors(self, texts):
            return given[[int(text) for text in texts]]

        def fingerprint(self):
            return "given"

    monkeypatch.setattr(build, "_FEWEST_CHUNKS", fewest)
    rows = [json.dumps({"text": str(number)}) for number in range(len(given))]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    made = build_index(tmp_path / "rows.jsonl", Given(), place, tmp_path / "many", Cut(9, 0))
    return IndexFolder(tmp_path / "many"), made


def test_many_lists_find_what_they_say_they_find(tmp_path, monkeypatch, place):
    draw = np.random.default_rng(3)
    middles = draw.standard_normal((40, 24))
    vectors = middles[draw.integers(40, size=4000)] + 0.5 * draw.standard_normal((4000, 24))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    folder, made = index_of(vectors, tmp_path, monkeypatch, place)
    assert made.num_lists == 102
    assert made.probes < made.num_lists / 2
    assert made.recall >= 0.95
    asked = vectors[draw.choice(4000, 300, replace=False)]
    asked = asked + 0.1 * draw.standard_normal(asked.shape).astype(np.float32)
    wanted = nearest(asked, vectors, 10)
    plain, cached = Lists(folder), Lists(folder, memory_bytes=100_000)
    found = plain.search(asked, 10, made.probes)
    assert recall_of(wanted, [[hit.chunk for hit in hits] for hits in found]) >= 0.9
    every = plain.search(asked, 10, made.num_lists)
    assert recall_of(wanted, [[hit.chunk for hit in hits] for hits in every]) == 1
    for _ in range(3):  # from memory and from disk alike, within the budget
        assert cached.search(asked, 10, made.probes) == found
        assert 50_000 < cached.in_memory_bytes <= 100_000
    assert plain.in_memory_bytes == 0


def test_a_batch_is_as_large_as_its_costs_say():
    size = BatchSize()
    assert size.of(9) == 9  # nothing is known
    for number in (1, 4, 2, 8, 1, 16) * 3:
        size.took(number, 0.02 + 0.005 * number)
    assert size.costs == pytest.approx((0.02, 0.005))
    assert [size.of(number) for number in (1, 4, 9, 36, 100, 10_000)] == [1, 4, 6, 12, 20, 64]
    for number in (1, 4, 2, 8) * 20:
        size.took(number, 0.1)  # a batch costs the same, whatever it has
    assert size.of(50) == 50


def test_who_waits_is_answered_together_and_who_left_is_not(place):
    folder, texts, _ = vectors_of(place)
    encoder = open_encoder(place / "encoder")
    retriever, batches, may_go = Retriever(folder, encoder), [], threading.Event()
    vectors = encoder.vectors

    def watched(given):
        batches.append(list(given))
        may_go.wait(PATIENCE_S)
        return vectors(given)

    encoder.vectors = watched
    retriever.start()
    first = retriever.ask(texts[0], 2)
    wait_until(lambda: batches)
    others = [retriever.ask(text, 3) for text in texts[1:5]]
    assert others[0].cancel()
    may_go.set()
    retriever.end_thread()
    assert batches == [[texts[0]], texts[2:5]]
    assert first.result()[0].chunk == 0
    assert [len(each.result()) for each in others[1:]] == [3, 3, 3]


# ---- builds -------------------------------------------------------------------------------------


def test_an_interrupted_build_goes_on(place, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_PART_CHUNKS", 32)
    encoder, count = open_encoder(place / "encoder"), []
    vectors = encoder.vectors

    def broken(texts):
        count.append(len(texts))
        if len(count) == 3:
            raise KeyboardInterrupt
        return vectors(texts)

    encoder.vectors = broken
    arguments = (place / "documents", encoder, place / "encoder", tmp_path / "idx")
    with pytest.raises(KeyboardInterrupt):
        build_index(*arguments, Cut(40, 8))
    assert not (tmp_path / "idx").exists()
    made = build_index(*arguments, Cut(40, 8))
    assert sum(count[:2]) + sum(count[3:]) == made.num_chunks  # none was encoded twice
    for name in FILES:
        assert (tmp_path / "idx" / name).read_bytes() == (place / "idx" / name).read_bytes()
    assert sorted(f.name for f in (tmp_path / "idx").iterdir()) == sorted([*FILES, "manifest.json"])
    assert not (tmp_path / "idx.partial").exists()


def test_parts_of_another_build_are_not_used(place, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_PART_CHUNKS", 32)
    partial = tmp_path / "idx.partial"
    partial.mkdir()
    (partial / "key").write_text("another")
    np.zeros((32, 32), np.float32).tofile(partial / "part-000000000.bin")
    encoder = open_encoder(place / "encoder")
    out = tmp_path / "idx"
    build_index(place / "documents", encoder, place / "encoder", out, Cut(40, 8))
    assert sum_of(out / "lists.bin") == sum_of(place / "idx" / "lists.bin")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--out", "new"], "nowhere does not exist"),
        (["empty", "--out", "new"], "empty"),
        (["documents", "--out", "idx"], "idx exists: give another folder"),
        (["documents", "--out", "new", "--overlap", "40"], "Chunks of 40 tokens with 40 in common"),
        (["documents", "--out", "new", "--tokens", "97"], "at most the encoder's 96"),
        (["documents", "--out", "new", "--encoder", "documents"], "neither a run nor a folder"),
        (["documents", "--out", "new", "--encoder", "bare"], "has no tokenizer.json"),
    ],
)
def test_what_can_not_be_indexed_is_refused_in_a_sentence(place, arguments, said):
    (place / "empty").mkdir(exist_ok=True)
    (place / "empty" / "nothing.txt").write_text(" \n")
    (place / "bare").mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(place / "encoder" / name, place / "bare" / name)
    usual = {"--encoder": "encoder", "--tokens": "40", "--overlap": "8"}
    for name, value in usual.items():
        arguments = arguments if name in arguments else [*arguments, name, value]
    done = paceline("index", *arguments, folder=place)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(place.glob("new*"))


# ---- what is read may be anything ---------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("harm", ["cut", "changed", "gone"])
def test_a_damaged_index_is_refused(copied, name, harm):
    file = copied / name
    data = bytearray(file.read_bytes())
    if harm == "gone":
        file.unlink()
    elif harm == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    if (name, harm) == ("manifest.json", "changed"):
        file.write_text(file.read_text().replace('"width": 32', '"width": 31'))
    with pytest.raises(InputError, match="make it anew by paceline index"):
        IndexFolder(copied)


@pytest.mark.parametrize(
    ("name", "dtype", "place_of", "value"),
    [
        ("chunks.bin", "<i8", 0, 10**6),
        ("chunks.bin", "<i8", 0, -1),
        ("chunks.bin", "<i8", 4, 10**12),
        ("chunks.bin", "<i8", 3, -5),
        ("sizes.bin", "<i8", 0, 10**9),
        ("sizes.bin", "<i8", 0, -1),
    ],
)
def test_an_index_that_lies_is_refused(copied, name, dtype, place_of, value):
    """Its sums are right: somebody made it so."""
    data = np.fromfile(copied / name, dtype)
    data[place_of] = value
    data.tofile(copied / name)
    told = json.loads((copied / "manifest.json").read_text())
    told["files"][name] = sum_of(copied / name).model_dump()
    (copied / "manifest.json").write_text(json.dumps(told))
    with pytest.raises(InputError, match="doesn't fit the rest of its index"):
        IndexFolder(copied)


def test_chunks_that_there_are_not_are_not_found(copied, place):
    told = json.loads((copied / "manifest.json").read_text())
    lists = bytearray((copied / "lists.bin").read_bytes())
    number = told["num_chunks"]
    lists[-8 * number :] = np.full(number, 10**9, "<i8").tobytes()
    (copied / "lists.bin").write_bytes(lists)
    told["files"]["lists.bin"] = sum_of(copied / "lists.bin").model_dump()
    (copied / "manifest.json").write_text(json.dumps(told))
    assert Retriever(IndexFolder(copied), open_encoder(place / "encoder")).find(["a"], 4) == [[]]


def test_another_encoder_is_refused(place):
    with pytest.raises(InputError, match=r"other is not the encoder that made"):
        open_retriever(Retrieval(index=str(place / "idx"), encoder=str(place / "other")))
    moved = shutil.copytree(place / "encoder", place / "moved", dirs_exist_ok=True)
    assert open_retriever(Retrieval(index=str(place / "idx"), encoder=str(moved))) is not None
    assert open_retriever(Retrieval()) is None


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_an_encoder_of_transformers(place, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    words |= {word: len(words) + at for at, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=len(words), intermediate_size=32, max_position_embeddings=24, **shape
    )
    model = BertModel(config).eval()
    model.save_pretrained(tmp_path / "bert")
    tokenizer.save(str(tmp_path / "bert" / "tokenizer.json"))
    encoder = open_encoder(tmp_path / "bert")
    texts = ["the quick fox", "dog", "lazy " * 40, "", "brown dog jumps"]
    found = encoder.vectors(texts)
    for text, vector in zip(texts, found, strict=True):
        ids = torch.tensor([tokenizer.encode(text).ids[:24]])
        with torch.no_grad():
            state = model(ids).last_hidden_state[0].mean(0)
        wanted = torch.nn.functional.normalize(state, dim=0)
        np.testing.assert_allclose(vector, wanted.numpy(), atol=1e-5)
    (tmp_path / "bert" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "bert" / "pytorch_model.bin")
    with pytest.raises(InputError, match="transformers can't open"):
        open_encoder(tmp_path / "bert")


# ---- answers ------------------------------------------------------------------------------------


def retrieval(place, **settings):
    return Retrieval(index=str(place / "idx"), instruction="Texts:", **settings)


@pytest.fixture(scope="module")
def served(place):
    with serve(small_network(longest=512), retrieval=retrieval(place, k=3)) as one:
        yield one


@pytest.fixture
def serial(place):
    """What is found for a query, by itself."""
    retriever = Retriever(IndexFolder(place / "idx"), open_encoder(place / "encoder"))
    return lambda query, k: retriever.find([query], k)[0]


def sources_text(found):
    parts = [
        f"{one.document}:\n{one.text.strip()}" for one in sorted(found, key=lambda one: one.chunk)
    ]
    return "\n\n".join(["Texts:", *parts])


def test_an_answer_is_made_from_what_is_found_and_says_so(served, serial):
    answer = served.post(prompt="the quick fox", max_tokens=20, temperature=0).json()
    found = serial("the quick fox", 3)
    assert [(s["document"], s["start"], s["stop"], s["text"]) for s in answer["sources"]] == [
        (one.document, one.start, one.stop, one.text) for one in found
    ]
    assert [s["score"] for s in answer["sources"]] == pytest.approx([one.score for one in found])
    prompt = f"{sources_text(found)}\n\nthe quick fox"
    text = served.alone(prompt, max_tokens=20, temperature=0.0)
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["prompt_tokens"] == len(prompt.encode())


def test_openais_client_gets_sources_whole_and_streamed(served, serial):
    chat = served.client().chat.completions
    asked = {
        "model": "small",
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "no"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "lazy dog"},
        ],
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"retrieval": {"k": 2}},
    }
    whole = chat.create(**asked)
    found = serial("lazy dog", 2)
    assert [source["document"] for source in whole.sources] == [one.document for one in found]
    prompt = f"Be short.\n\n{sources_text(found)}\nno\nyes\nlazy dog\n"
    assert whole.choices[0].message.content == served.alone(prompt, max_tokens=12, temperature=0.0)
    chunks = list(chat.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == (
        whole.choices[0].message.content
    )
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].sources == whole.sources
    assert not any(hasattr(chunk, "sources") for chunk in chunks[:-1])


def test_a_request_may_say_what_is_searched_for_or_that_nothing_is(served, serial):
    plain = served.post(prompt="fox", max_tokens=5, temperature=0, retrieval={"k": 0}).json()
    assert "sources" not in plain
    assert plain["choices"][0]["text"] == served.alone("fox", max_tokens=5, temperature=0.0)
    other = served.post(prompt="fox", max_tokens=5, retrieval={"k": 1, "query": "süß"}).json()
    assert [s["document"] for s in other["sources"]] == [serial("süß", 1)[0].document]
    for prompt in (["a", "b"], [97, 98]):  # which are no text to search for
        assert "sources" not in served.post(prompt=prompt, max_tokens=2).json()


def test_chunks_that_leave_no_room_are_left_out(served, serial):
    long = "the quick fox " * 24
    answer = served.post(prompt=long, max_tokens=64, retrieval={"k": 9}).json()
    kept = answer["sources"]
    assert 0 < len(kept) < 9
    assert [s["document"] for s in kept] == [f.document for f in serial(long, 9)[: len(kept)]]
    assert answer["usage"]["prompt_tokens"] <= 512 - 64


def test_many_at_once_get_what_each_alone_gets(served, serial):
    pick = random.Random(1)
    queries = [" ".join(pick.choices(WORDS, k=4)) for _ in range(24)]

    def ask(query):
        return served.post(prompt=query, max_tokens=10, temperature=0).json()

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, queries))
    for query, answer in zip(queries, answers, strict=True):
        found = serial(query, 3)
        assert [s["document"] for s in answer["sources"]] == [one.document for one in found]
        prompt = f"{sources_text(found)}\n\n{query}"
        text = served.alone(prompt, max_tokens=10, temperature=0.0)
        assert answer["choices"][0]["text"] == text
    assert served.metrics()["retrieval_seconds_count"] >= 24
    served.wait_until_idle()


def test_a_client_that_goes_away_while_it_waits_for_documents_leaves_nothing(place):
    with serve(small_network(longest=512), retrieval=retrieval(place)) as served:
        encoder, may_go = served.serving._retriever._encoder, threading.Event()
        vectors, batches = encoder.vectors, []

        def slow(texts):
            batches.append(list(texts))
            may_go.wait(PATIENCE_S)
            return vectors(texts)

        encoder.vectors = slow
        body = json.dumps({"prompt": "fox", "max_tokens": 4})
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with served.connect() as first, served.connect() as second:
            first.sendall((head + body).encode())
            wait_until(lambda: batches)
            second.sendall((head + body).encode())
            wait_until(lambda: served.serving._retriever.num_waiting == 1)
        wait_until(lambda: served.metrics()["requests_total cancelled"] == 2)
        may_go.set()
        assert served.post(prompt="dog", max_tokens=4).status_code == 200
        assert len(batches) == 2
        served.wait_until_idle()


def test_a_search_that_fails_fails_alone(place, capfd):
    with serve(small_network(longest=512), retrieval=retrieval(place)) as served:
        encoder = served.serving._retriever._encoder
        vectors = encoder.vectors
        encoder.vectors = lambda texts: 1 / 0
        assert served.post(prompt="fox", max_tokens=4).status_code == 500
        assert "ZeroDivisionError" in capfd.readouterr().err
        encoder.vectors = vectors
        assert served.post(prompt="fox", max_tokens=4).json()["sources"]
        served.wait_until_idle()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"retrieval": {"k": -1}}, "retrieval.k = -1"),
        ({"retrieval": {"k": 65}}, "retrieval.k = 65"),
        ({"retrieval": {"n": 1}}, "retrieval.n is not a setting"),
        ({"retrieval": {"query": ""}}, "retrieval.query = ''"),
        ({"retrieval": 4}, "retrieval = 4"),
        ({"prompt": [1, 2], "retrieval": {"k": 2}}, "retrieval needs one text to search for"),
        ({"prompt": ["a", "b"], "retrieval": {"query": "x"}}, "retrieval needs one prompt"),
    ],
)
def test_what_can_not_be_retrieved_is_refused_in_a_sentence(served, fields, said):
    answer = served.post(**{"prompt": "fox", "max_tokens": 2, **fields})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    served.wait_until_idle()


def test_a_server_without_documents_says_so():
    with serve() as served:
        answer = served.post(prompt="a", retrieval={"k": 2})
        assert answer.status_code == 400
        assert "this server has none" in answer.json()["error"]["message"]


def test_settings_of_documents_are_an_endpoints_alone(place):
    done = paceline(
        "generate", "encoder", "a", "--set", 'retrieval.index="idx"', folder=place
    )  # fmt: skip
    assert done.returncode == 2
    assert "retrieval is not a setting" in done.stderr
    for settings, said in (
        (['retrieval.index="documents"'], "manifest.json does not exist"),
        (['retrieval.index="nowhere"'], "nowhere is no index"),
        (['retrieval.index="idx"', 'retrieval.encoder="other"'], "other is not the encoder"),
        (["retrieval.indx=3"], "did you mean index"),
        (["retrieval.k=65"], "retrieval.k = 65"),
    ):
        flags = [word for each in settings for word in ("--set", each)]
        done = paceline("serve", "encoder", "--port", "0", *flags, folder=place)
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1


def test_the_pages_commands_run(place, tmp_path):
    page = (ROOT / "docs" / "serving.md").read_text()
    (command,) = re.findall(r"^paceline (index .*)$", page, flags=re.M)
    (settings,) = re.findall(r"^paceline serve runs/demo (.*retrieval.*)$", page, flags=re.M)
    names = {"runs/demo": str(place / "encoder")}
    shutil.copytree(place / "documents", tmp_path / "documents")
    words = [names.get(word, word) for word in command.split()]
    done = paceline(*words, "--tokens", "64", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.match(r"62 documents, \d+ chunks in 1 lists in ", done.stdout)
    read = read_endpoint_settings(settings.replace("--set", "").split())
    assert read.retrieval == Retrieval(index="idx", k=4)


def test_prompts_with_the_same_chunks_share_their_keys(served):
    first, again = (
        served.post(prompt=prompt, max_tokens=2, retrieval={"query": "quick dog"}).json()["usage"]
        for prompt in ("what?", "and who?")
    )
    assert again["prompt_tokens_details"]["cached_tokens"] > 0.7 * again["prompt_tokens"]
    assert first["prompt_tokens"] > 100
