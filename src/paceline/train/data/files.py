"""Which files a `Data.source` names, in a stated order, and how each of them is read.

How it works: every name is "python-stdlib", a file, a folder or a glob, on disk or in a store
(stores.py), and becomes a list of files. Files keep the order in which they are named; those of one
folder or glob are sorted by path, so the same source gives the same documents on every machine. A
folder means every file below it but the hidden ones, with these exceptions:

- `datasets.save_to_disk` wrote it: the files that its `state.json` lists.
- It has a README.md and Parquet, Arrow or JSON lines: a data set of the Hugging Face Hub. Its data
  files are read, of which only those of "train" if names tell splits apart.
- It has shards of MDS, or indexes of Megatron's: these alone.

"python-stdlib" is every .py file below the running interpreter's standard library. Left out are
third-party packages, tests, the `idlelib` and `turtledemo` applications, `lib2to3` (gone since
Python 3.13), tables made by programs (`encodings`, `pydoc_data`) and files that describe one build.
All of it is UTF-8: PEP 8 demands it of the core distribution outside its tests.
"""

import glob
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from paceline.config.errors import InputError
from paceline.config.files import read_json
from paceline.config.job_sections import Data
from paceline.config.mixture import Format
from paceline.config.urls import is_url
from paceline.train.data.stores import StoredFile, stored_files

STDLIB = "python-stdlib"
_ANEW = "save the dataset anew"
_STDLIB_WITHOUT = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"),
    *("idlelib", "turtledemo", "lib2to3", "encodings", "pydoc_data"),
}
_STDLIB_BUILD_PREFIXES = ("config-", "_sysconfigdata", "_sysconfig_vars")
_FORMAT_OF_SUFFIX: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "webdataset",
    ".tgz": "webdataset",
    ".mds": "mds",
    ".idx": "megatron",
}
COMPRESSIONS = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_SPLIT = re.compile(
    r"(?:^|[/._ -])(train|training|test|testing|validation|valid|val|dev|eval)"
    r"(?=[/._ -]|$)"
)
"""The Hub's names of splits: https://huggingface.co/docs/hub/datasets-file-names-and-splits"""


# What `datasets.save_to_disk` writes; typing's TypedDict gives pydantic too little in 3.11.
class _Splits(TypedDict, total=False):
    splits: list[str]


class _DataFile(TypedDict):
    filename: str


class _State(TypedDict):
    _data_files: list[_DataFile]


_DICT, _STATE = TypeAdapter(_Splits), TypeAdapter(_State)


@dataclass(frozen=True)
class SourceFile:
    """A file and how it is read."""

    path: Path | StoredFile
    format: Format
    span: tuple[int, int] | None = None
    """Of JSON lines: those that begin in these bytes; None: all."""

    @property
    def size_bytes(self) -> int:
        """As it is on disk or in the store."""
        if self.span is not None:
            return self.span[1] - self.span[0]
        path = self.paths[-1]
        return path.size_bytes if isinstance(path, StoredFile) else path.stat().st_size

    @property
    def paths(self) -> "list[Path | StoredFile]":
        """All that it is read from."""
        if self.format == "megatron" and isinstance(self.path, Path):
            return [self.path, self.path.with_suffix(".bin")]
        return [self.path]

    @property
    def compression(self) -> str | None:
        """By which it is compressed as a whole."""
        return COMPRESSIONS.get(PurePosixPath(str(self.path)).suffix.lower())

    @property
    def can_be_sought(self) -> bool:
        """Whether reading can surely begin anywhere."""
        return not str(self.path).startswith(("http://", "https://"))

    def open(self) -> IO[bytes]:
        """Open it as it is, for reading."""
        return self.path.open() if isinstance(self.path, StoredFile) else self.path.open("rb")


def find_files(data: Data) -> list[SourceFile]:
    """List the files of a source in reading order, each once.

    Raises:
        InputError: a name matches no file, or the format of a file can't be told.
    """
    names = (data.source,) if isinstance(data.source, str) else data.source
    if not names:
        raise InputError("data.source is empty: name at least one file, folder or glob.")
    found = dict.fromkeys(file for name in names for file in _files_of(name, data.format))
    return list(found)


def _files_of(name: str, wanted: str) -> Iterator[SourceFile]:
    if name == STDLIB:
        yield from (SourceFile(path, "text") for path in stdlib_files())
        return
    if is_url(name):
        yield from _stored(name, wanted)
        return
    path = Path(name).expanduser()
    if path.is_dir():
        yield from _folder_files(path, wanted)
    elif path.is_file():
        yield SourceFile(path, _format_of(path, wanted))
    else:
        # Path.glob takes no absolute pattern.
        found = glob.glob(str(path), recursive=True)  # noqa: PTH207
        matches = sorted(match for match in found if Path(match).is_file())
        if not matches:
            raise InputError(
                f'data.source "{name}" names no file, folder or glob with matches, seen from '
                f"{Path.cwd()}: correct the path."
            )
        yield from (SourceFile(Path(p), _format_of(Path(p), wanted)) for p in matches)


def _stored(name: str, wanted: str) -> Iterator[SourceFile]:
    folder, files = stored_files(name)
    by_name = {file.url.removeprefix(folder).lstrip("/"): file for file in files}
    if {"state.json", "dataset_dict.json"} & set(by_name):
        raise InputError(
            f"{name} was written by datasets.save_to_disk, which is read from a disk: copy it "
            "there, or name its files by a glob such as " + folder + "/data-*.arrow."
        )
    names = list(by_name)
    chosen = [by_name[each] for each in _data_files(names, name)] if len(files) > 1 else files
    if not chosen:
        raise InputError(
            f'data.source "{name}" names no file, prefix or glob with matches, or nobody answers '
            "there: correct it."
        )
    yield from (SourceFile(file, _format_of(file, wanted)) for file in chosen)


def stdlib_files(folder: str | None = None) -> list[Path]:
    """List the .py files that make up "python-stdlib", sorted by their path below the folder.

    Args:
        folder: the standard library; by default that of the running interpreter.
    """
    top = folder or sysconfig.get_path("stdlib")
    found = []
    for parent, folders, files in os.walk(top):
        folders[:] = [name for name in folders if _is_of_stdlib(name)]
        found += [Path(parent, f) for f in files if f.endswith(".py") and _is_of_stdlib(f)]
    if not found:
        raise InputError(
            f'data.source "{STDLIB}" needs the .py files of the standard library and {top} has '
            "none: name a file or folder of text instead."
        )
    return sorted(found, key=lambda path: path.relative_to(top).as_posix())


def _is_of_stdlib(name: str) -> bool:
    return name not in _STDLIB_WITHOUT and not name.startswith(_STDLIB_BUILD_PREFIXES)


def _folder_files(folder: Path, wanted: str) -> Iterator[SourceFile]:
    is_dataset = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    if wanted == "arrow" or (wanted == "auto" and is_dataset):
        yield from (SourceFile(path, "arrow") for path in _dataset_files(folder))
        return
    paths = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    chosen = [paths[name] for name in _data_files(list(paths), str(folder))]
    if not chosen:
        raise InputError(f'data.source "{folder}" is a folder without files: name another.')
    yield from (SourceFile(path, _format_of(path, wanted)) for path in chosen)


def _data_files(names: Sequence[str], source: str) -> list[str]:
    """Which files of a folder are read, by their paths in it.

    Raises:
        InputError: they are a data set of the Hub without a split to train on.
    """
    seen = [n for n in names if not any(part.startswith(".") for part in n.split("/"))]
    formats = {name: _FORMAT_OF_SUFFIX.get(_suffix(name)) for name in seen}
    for alone in ("mds", "megatron"):
        if alone in formats.values():
            return [name for name in seen if formats[name] == alone]
    is_of_hub = "README.md" in seen and bool({"parquet", "arrow", "jsonl"} & {*formats.values()})
    if not is_of_hub:
        return seen
    data = [name for name in seen if formats[name]]
    splits = {name: match[1] for name in data if (match := _SPLIT.search(name))}
    chosen = [name for name in data if splits.get(name, "train").startswith("train")]
    if not chosen:
        known = ", ".join(sorted({*splits.values()}))
        raise InputError(
            f'data.source "{source}" has the splits {known} but not "train", which is the one '
            "that is read: name files of another by a glob."
        )
    return chosen


def _dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder that `datasets.save_to_disk` wrote; of a dict, its "train"."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_json(folder / "dataset_dict.json", _DICT, _ANEW).get("splits", [])
        if "train" not in splits:
            raise InputError(
                f'{folder} holds the splits {", ".join(splits)} but not "train", which is the one '
                f"that is read: name the folder of one split as data.source, like {folder}/"
                f"{splits[0] if splits else 'train'}."
            )
        folder = folder / "train"
    if not (folder / "state.json").is_file():
        raise InputError(
            f'{folder} has no state.json: data.format "arrow" needs a folder written by '
            "datasets.save_to_disk or an .arrow file."
        )
    state = read_json(folder / "state.json", _STATE, _ANEW)
    return [folder / entry["filename"] for entry in state["_data_files"]]


def _format_of(path: Path | StoredFile, wanted: str) -> Format:
    if wanted != "auto":
        return wanted  # type: ignore[return-value]  # a literal of Data.format
    suffix = _suffix(str(path))
    if suffix == ".json":
        raise InputError(
            f'{path} may be one document or JSON lines: set data.format to "text" or "jsonl".'
        )
    return _FORMAT_OF_SUFFIX.get(suffix, "text")


def _suffix(name: str) -> str:
    """The last suffix of a file's name that says what is in it, in small letters."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    while suffixes and suffixes[-1] in COMPRESSIONS and suffixes[-1] not in _FORMAT_OF_SUFFIX:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""
