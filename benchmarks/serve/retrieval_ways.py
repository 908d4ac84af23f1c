"""One contestant of `benchmarks.serve.retrieval`, in a process of its own."""

import json
import resource
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.serve.retrieval import Task
from paceline.config.sampling import Sampling
from paceline.config.serving import EndpointSettings, Retrieval
from paceline.config.serving import Serving as EngineSettings
from paceline.generate.chat import ChatTemplate
from paceline.serve.bodies import CompletionBody, Server
from paceline.serve.grammar import Grammars
from paceline.serve.keys import Keys
from paceline.serve.network import Network, open_network
from paceline.serve.retrieval.retriever import Found, open_retriever
from paceline.serve.serve_command import Serving, _listener

_WARM = "def main"
_MOST_CLIENTS = 256


def main() -> None:
    """Do what is asked, and write what came of it."""
    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    network = open_network(Path(task.folder) / "network")
    retrieval = Retrieval(index=f"{task.folder}/index", k=task.k, memory_gb=task.memory_gb)
    serve = EngineSettings(kv_gb=task.kv_gb, host_gb=0.0, share_prefixes=task.way != "apart")
    settings = EndpointSettings(serve=serve, retrieval=retrieval)
    found = (_serial if task.way == "one at a time" else _overlapped)(task, network, settings)
    found["resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(sys.argv[2]).write_text(json.dumps(found))


def _overlapped(task: Task, network: Network, settings: EndpointSettings) -> dict[str, Any]:
    """The endpoint, asked over HTTP by a client for each request."""
    serving = Serving(network, settings, Keys(), _listener("127.0.0.1", 0))
    thread = threading.Thread(target=serving.run)
    thread.start()
    serving._listener.listen()

    def ask(query: str) -> dict[str, Any]:
        body = {"prompt": query, "max_tokens": task.num_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{serving.url}/v1/completions",
            json.dumps({**body, "ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())

    ask(_WARM)
    begun = time.perf_counter()

    def one(number: int) -> tuple[float, dict[str, Any]]:
        answer = ask(task.queries[number])
        return time.perf_counter() - begun - task.after_s[number], answer

    with ThreadPoolExecutor(_MOST_CLIENTS) as pool:
        asked = []
        for number, after_s in enumerate(task.after_s):
            time.sleep(max(0.0, begun + after_s - time.perf_counter()))
            asked.append(pool.submit(one, number))
        done = [each.result() for each in asked]
    serving.service.loop.call_soon_threadsafe(serving.stop)
    thread.join()
    assert serving._retriever is not None
    folder = serving._retriever.folder
    number_of = {folder.place(chunk): chunk for chunk in range(len(folder))}
    usages = [answer["usage"] for _, answer in done]
    return {
        "latencies": [seconds for seconds, _ in done],
        "texts": [answer["choices"][0]["text"] for _, answer in done],
        "chunks": [
            [number_of[s["document"], s["start"], s["stop"]] for s in answer["sources"]]
            for _, answer in done
        ],
        "prompts": sum(usage["prompt_tokens"] for usage in usages),
        "cached": sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages),
    }


def _serial(task: Task, network: Network, settings: EndpointSettings) -> dict[str, Any]:
    """Encode, search, generate, the next; the prompt as the endpoint makes it."""
    retriever = open_retriever(settings.retrieval)
    assert retriever is not None
    engine = network.engine(settings.serve)
    server = Server(
        network,
        ChatTemplate(None, {}),
        Grammars(network.tokenizer, network.decoder.model.vocab_size, network.end_tokens),
        {},
        engine.longest,
        settings.retrieval,
    )
    sampling = Sampling(max_tokens=task.num_tokens, temperature=0, ignore_end=True)
    num_prompt = num_cached = 0

    def answer(query: str) -> tuple[list[Found], str]:
        nonlocal num_prompt, num_cached
        (found,) = retriever.find([query], task.k)
        body = CompletionBody(prompt=query, max_tokens=task.num_tokens, temperature=0.0)
        (prompt,) = server.asked(body, b"", found).prompts
        sequence = engine.submit(prompt, sampling)
        while not engine.is_idle:
            engine.step()
        num_prompt += len(prompt)
        num_cached += sequence.num_shared
        return found, network.tokenizer.decode(sequence.made)

    answer(_WARM)
    num_prompt = num_cached = 0
    begun = time.perf_counter()
    latencies, answers = [], []
    for query, after_s in zip(task.queries, task.after_s, strict=True):
        time.sleep(max(0.0, begun + after_s - time.perf_counter()))
        answers.append(answer(query))
        latencies.append(time.perf_counter() - begun - after_s)
    return {
        "latencies": latencies,
        "texts": [text for _, text in answers],
        "chunks": [[one.chunk for one in found] for found, _ in answers],
        "prompts": num_prompt,
        "cached": num_cached,
    }


if __name__ == "__main__":
    main()
