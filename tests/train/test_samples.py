"""Samples of a run: those of its weights, training as without them, and what is refused."""

import json
import shutil

import pytest

from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.observe.run import Run
from paceline.serve.network import open_network
from tests.command_line import paceline, ranks, write_tiny_job

PROMPTS = ["the quick", "dog"]
SAMPLES = ("--set", f"observe.samples={json.dumps(PROMPTS)}", "--set", "observe.sample_tokens=20")


def _train(folder, name, *settings):
    return paceline(
        "train", "job.toml", "--set", f"name={name}", "--set", "train.eval_every=4", *settings,
        folder=folder,
    )  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_samples_are_those_of_the_weights_and_training_goes_on_as_without(num_ranks, tmp_path):
    write_tiny_job(tmp_path)
    layout = ("--set", f"layout.dp={num_ranks}", *ranks(num_ranks))
    for name, settings in (("without", ()), ("with", SAMPLES)):
        done = _train(tmp_path, name, *layout, *settings)
        assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "runs/with")
    lines = run.samples()
    assert [line["step"] for line in lines] == [4, 8, 12]
    for line in lines[1:]:
        network = open_network(run.path, step=line["step"])
        sampling = Sampling(max_tokens=20, temperature=0)
        assert line["texts"] == network.engine(Serving()).texts(PROMPTS, sampling)
    losses = [
        [line["loss"] for line in Run(tmp_path / "runs" / name).metrics()]
        for name in ("with", "without")
    ]
    assert losses[0] == losses[1]
    assert "step 12: " in done.stdout + done.stderr
    if num_ranks == 1:  # a kill after the last evaluation: what it takes back is made anew
        shutil.rmtree(run.checkpoint_folder / "step-12")
        again = _train(tmp_path, "with", *layout, *SAMPLES)
        assert "going on after step 8 of 12" in again.stdout, again.stderr
        made = [(line["step"], line["texts"]) for line in run.samples()]
        assert made == [(line["step"], line["texts"]) for line in lines]
    page = run.report_file.read_text()
    assert "Samples" in page
    assert "the quick" in page
    assert "Samples" not in (tmp_path / "runs/without/report.html").read_text()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["layout.fsdp=2"], "observe.samples needs ranks that hold the network whole"),
        (["layout.recompute=full"], "this layout has recompute = 'full'"),
        (['observe.samples=[""]'], "observe.samples has an empty prompt"),
        (["observe.sample_tokens=0"], "observe.sample_tokens = 0"),
    ],
)
def test_what_can_not_be_sampled_is_refused_in_a_sentence(settings, said, tmp_path):
    write_tiny_job(tmp_path)
    given = [word for setting in settings for word in ("--set", setting)]
    more = ranks(2) if "fsdp" in settings[0] else ()
    done = _train(tmp_path, "new", *SAMPLES, *given, *more)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert not (tmp_path / "runs" / "new").exists()
