"""What settings of a mixture demand of each other (pure)."""

import pytest

from paceline.config.errors import InputError
from paceline.config.job import change_job, read_job, to_toml
from tests.small_job import write_small_job

GOOD = """
[[data.sources]]
name = "a"
source = "a.txt"
weight = 1
[[data.sources]]
name = "b"
source = "b.txt"
weight = 0
[[data.stages]]
from_step = 2
weights = { b = 1 }
[[data.stages]]
from_step = 3
weights = { a = 0.5, b = 1 }
[[data.eval_sets]]
name = "c"
source = "c.txt"
"""


def job_of(folder, more):
    file = write_small_job(folder, more=more)
    file.write_text(file.read_text().replace('source = "text.txt"\n', ""))
    return read_job(file)


def test_a_mixture_is_written_as_it_is_read(tmp_path):
    job = job_of(tmp_path, GOOD)
    (tmp_path / "again.toml").write_text(to_toml(job))
    assert read_job(tmp_path / "again.toml") == job


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('name = "b"', 'name = "a"', 'two named "a"'),
        ('name = "c"', 'name = "a"', 'two named "a"'),
        ('name = "c"', 'name = "held_out"', "give another"),
        ('name = "c"', 'name = "c/d"', "must be a text that matches"),
        ("weight = 0\n", "", '"b" has no weight and others have'),
        ("weight = 0\n", "epochs = 2\n", '"b" has no weight and others have'),
        ("weight = 0\n", "weight = 0\nepochs = 2\n", "in place of a weight"),
        ("weight = 1\n", "weight = 0\n", "are all 0"),
        ("weight = 1\n", "weight = -1\n", "greater than or equal to 0"),
        ("from_step = 3", "from_step = 2", "stands after one of 2: sort them"),
        ("b = 1 }\n[[data.stages]]", "d = 1 }\n[[data.stages]]", "none of data.sources: a, b"),
        ("{ b = 1 }", "{ b = 0 }", "has no weight above 0"),
        ("from_step = 2", "from_step = 0", "from_step = 0 can't be used"),
    ],
)
def test_what_doesn_t_agree_is_said(tmp_path, old, new, sentence):
    assert old in GOOD
    with pytest.raises(InputError, match=sentence):
        job_of(tmp_path, GOOD.replace(old, new, 1))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("data.source=other.txt", "each say what is read"),
        ("data.format=jsonl", "data.format has no effect with data.sources"),
        ("data.text_field=body", "data.text_field has no effect with data.sources"),
        ("data.temperature=2", "is of sources without weights"),
        ("data.sources=[]", "data.stages has no effect without data.sources"),
    ],
)
def test_what_has_no_effect_is_refused(tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence):
        change_job(job_of(tmp_path, GOOD), [change])


def test_epochs_and_temperature_exclude_each_other(tmp_path):
    bare = GOOD.partition("[[data.stages]]")[0].replace("weight = 0\n", "")
    epochs = bare.replace("weight = 1", "epochs = 2")
    job_of(tmp_path, epochs)
    with pytest.raises(InputError, match=r'no effect on data.sources "a", which says its epochs'):
        change_job(job_of(tmp_path, epochs), ["data.temperature=2"])
