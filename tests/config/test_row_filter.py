"""Filters by expression (pure)."""

import pytest

from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.config.row_filter import RowFilter
from tests.small_job import write_small_job

ROW = {
    "text": "Some words here", "language": "en", "score": 0.5, "tags": ["a", "b"],
    "meta": {"site": {"rank": 3}, "none": None}, "ok": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "is_kept"),
    [
        ("len(text) == 15", True),
        ("len(text) > 200 and language == 'en'", False),
        ("len(text) > 200 or language == 'en'", True),
        ("not ok", False),
        ("10 < len(text) <= 15", True),
        ("10 < len(text) < 15", False),
        ('language in ("en", "de")', True),
        ('language not in ["en", "de"]', False),
        ("'words' in text", True),
        ("'c' in tags", False),
        ("len(tags) * 2 - 1 == 3", True),
        ("-score + 1 >= 1 / 2", True),
        ("7 // 2 == 3 and 7 % 2 == 1", True),
        ("words(text) == 3", True),
        ("lower(text) != text and upper(language) == 'EN'", True),
        ("meta.site.rank < 4", True),
        ("meta.none is None", True),
        ("get(meta.none, 7) == 7", True),
        ("get(meta.site.host, 'x') == 'x'", True),
        ("get(missing, score) is not None", True),
        ("language == 'fr' and missing > 3", False),  # the rest isn't asked for
    ],
)
def test_an_expression_says_what_is_kept(expression, is_kept):
    assert RowFilter(expression).keeps(ROW) is is_kept


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "text.__class__",
        "(1).__class__",
        "text[0]",
        "[x for x in tags]",
        "(lambda: True)()",
        "f'{text}'",
        "2 ** 99",
        "1 << 99",
        "exec('1')",
        "len(text, 3)",
        "len(*tags)",
        "get('text', 1)",
        "b'x' == text",
        "1j == score",
        "(x := 3)",
        "text if ok else text",
        "len(text) > 3 and",
        "text = 3",
        "",
        "\0",
        "(" * 300 + "1" + ")" * 300,
        "-" * 1900 + "1",
        "text == '" + "x" * 3000 + "'",
    ],
)
def test_whatever_else_is_refused_or_no_field(expression):
    """Each is refused when the Job is read, but names of Python's, which are fields like others."""
    with pytest.raises(ValueError, match=r"[:.]"):
        RowFilter(expression).keeps(ROW)


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("lang == 'en'", 'no "lang" for the filter .* but "text", "language"'),
        ("meta.site.host == 'x'", 'no "meta.site.host"'),
        ("text > 3", "not supported"),
        ("text * 1000000000 == 'x'", "is no number"),
        ("'%9999999d' % score == 'x'", "is no number"),
        ("ok + 1 == 2", "True is no number"),
        ("text and ok", "neither True nor False"),
        ("len(text)", "gives 15, which is neither"),
        ("score / 0 > 1", "division"),
        ("words(score) > 1", "can't be used"),
    ],
)
def test_a_row_that_does_not_fit_is_one_sentence(expression, sentence):
    with pytest.raises(ValueError, match=sentence):
        RowFilter(expression).keeps(ROW)


def test_fields_are_those_that_are_read():
    fields = RowFilter("len(text) > 3 and get(meta.a, lang) == text").fields
    assert sorted(fields) == ["lang", "meta", "text"]


MIXTURE = '[[data.sources]]\nname = "a"\nsource = "a.jsonl"\n'


@pytest.mark.parametrize(
    ("filtered", "more", "sentence"),
    [
        ("len(text) >", "", r"^data\.filter: 'len\(text\) >' is no expression"),
        ("eval(text)", "", r"^data\.filter: eval\(\) with 1 arguments is no part of a filter"),
        ("ok", MIXTURE, r"data\.filter has no effect with data\.sources"),
    ],
)
def test_a_job_with_a_wrong_filter_is_refused(tmp_path, filtered, more, sentence):
    file = write_small_job(tmp_path, more=more)
    if more:
        file.write_text(file.read_text().replace('source = "text.txt"\n', ""))
    with pytest.raises(InputError, match=sentence):
        read_job(file, [f"data.filter={filtered!r}"])


def test_filters_are_of_texts_at_rest(tmp_path):
    file = write_small_job(tmp_path)
    for other in ("data.records=chat", "data.stream.folder=in"):
        with pytest.raises(InputError, match=r"data\.filter"):
            read_job(file, ["data.filter=ok", other])
