"""Every command of docs/serving.md runs, in the order of the page, on a small run of that name."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess

import httpx2
import pytest

from tests.command_line import COMMAND, Started, environment, paceline, write_tiny_job
from tests.serve.served import PATIENCE_S, serve, small_network
from tests.serve.test_serve_command import url_of
from tests.test_names import ROOT

PAGE = (ROOT / "docs" / "serving.md").read_text().replace("\\\n", " ")
SHELL = re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.S | re.M)
LINES = [line.strip() for block in SHELL for line in block.splitlines()]
KEY = "a-key-of-a-test-that-nobody-else-has"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the commands name: a run, its exported weights, and files."""
    folder = tmp_path_factory.mktemp("page")
    job = write_tiny_job(folder)
    for name in ("demo", "small"):
        done = paceline("train", "job.toml", "--set", f"name={name}", folder=folder)
        assert done.returncode == 0, done.stderr
    assert paceline("export", "runs/demo", "exported", folder=folder).returncode == 0
    (folder / "my.toml").write_text(job.read_text().replace("_len = 64", "_len = 2048"))
    jobs = re.findall(r"^```toml\n(.*?)^```", PAGE, flags=re.S | re.M)
    (heads,) = (job for job in jobs if 'family = "heads"' in job)
    (folder / "heads.toml").write_text(heads.replace("= 500", "= 4").replace("= 128", "= 32"))
    (folder / "documents").mkdir()
    (folder / "documents" / "blocks.md").write_text("the quick block has a lazy name\n")
    (folder / "notes.txt").write_text("the quick brown fox")
    (folder / "keys.txt").write_text(KEY)
    line = {"context": "the", "choices": [" dog", " @"], "answer": 0}
    (folder / "questions.jsonl").write_text(json.dumps(line))
    (task,) = re.findall(r"^```yaml\n(task: .*?)^```", PAGE, flags=re.S | re.M)
    (folder / "arithmetic.yaml").write_text(task)
    (folder / "sums.jsonl").write_text(json.dumps({"question": "2 + 2 =", "answer": 0}))
    return folder


def test_commands_stand_in_blocks_of_shell_alone():
    found = re.findall(r"^\s*(?:\$ )?((?:paceline|curl|pip|python) .*?)\s*$", PAGE, flags=re.M)
    assert found == LINES


@pytest.mark.parametrize("line", LINES)
def test_a_command_runs(line, folder):
    words = shlex.split(line, comments=True)
    if words[0] == "curl":
        _curl(words, folder)
    elif words[0] == "pip":
        wanted = re.fullmatch(r"paceline\[(.+)\]", words[2])
        assert words[:2] == ["pip", "install"]
        project = (ROOT / "pyproject.toml").read_text()
        assert all(f"\n{extra} = [" in project for extra in wanted[1].split(","))
    elif words[:2] == ["paceline", "serve"]:
        _serve(words[2:], folder)
    elif words[:2] == ["paceline", "chat"]:
        done = _run([COMMAND, *words[1:]], folder, "the quick\n")
        assert "tokens/s" in done.stderr
    else:
        assert words[0] == "paceline"
        _other(words[1:], folder)


def _run(words, folder, given=""):
    done = subprocess.run(
        words, cwd=folder, env=environment(folder), input=given,
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def _curl(words, folder):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    asks_documents = "retrieval" in words[-1]
    # A short one: the small network takes 64 tokens.
    told = ["retrieval.index=idx", "retrieval.instruction=the"] if asks_documents else []
    settings = [f"--set={each}" for each in told]

    def ask(url):
        here = [word.replace("http://127.0.0.1:8000", url) for word in words]
        answer = _run(here, folder).stdout
        if asks_documents:
            assert json.loads(answer)["sources"][0]["document"] == "blocks.md"
        else:
            assert answer.endswith("data: [DONE]\n\n")

    _served(["runs/demo", *settings], folder, ask)


def _serve(words, folder):
    def ask(url):
        told = httpx2.post(
            f"{url.replace('0.0.0.0', '127.0.0.1')}/v1/completions",
            headers={"Authorization": f"Bearer {KEY}"},
            json={"prompt": "the", "max_tokens": 3},
            timeout=PATIENCE_S,
        )
        assert told.status_code == 200, told.text

    _served(words, folder, ask)


def _served(words, folder, ask):
    """Serve until it has answered, and a signal."""
    if "--port" in words:
        words[words.index("--port") + 1] = "0"  # others may have this one
    else:
        words += ["--port", "0"]
    process = Started([COMMAND, "serve", *words], folder, num_outputs=1)
    try:
        ask(url_of(process))
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0, output


def _other(words, folder):
    """As it stands, but for lengths and times that a small run on a busy machine doesn't keep."""
    if "runs/demo" in words:
        words = [{"100": "20", "50": "20", "32-128": "9-30"}.get(word, word) for word in words]
        words = [re.sub("ttft 500ms, tpot 60ms", "ttft 60s", word) for word in words]
    if words[0] == "index":
        words += ["--tokens", "4", "--overlap", "1"]
    if "--url" not in words:
        done = paceline(*words, folder=folder)
    else:
        with serve(small_network()) as served:
            words[words.index("--url") + 1] = served.url
            done = paceline(*words, folder=folder)
    assert done.returncode == 0, done.stderr
