"""Which code a job was launched with: the commit of the project, and what was not committed.

Nodes see the folder that the person launches from, so nothing is copied and nothing is applied. A
run can be made again from a commit; that is why what is not committed is refused, or kept as a
patch beside the job.
"""

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.outputs import shown_path

_TIMEOUT_S = 60
_DIFF = ("diff", "--binary", "--no-color", "--no-ext-diff", "--submodule=diff")
_MOST_NAMED = 3


@dataclass(frozen=True)
class CodeState:
    """The code of a folder."""

    commit: str = ""
    """Of git; "": the folder is in no repository."""
    changed: tuple[str, ...] = ()
    """Files that differ from the commit, and Python files that git doesn't know."""
    patch: bytes = b""
    """What differs, as `git apply` takes it; nothing where nothing does."""


def code_state(directory: Path, *, apart: tuple[Path, ...] = (), with_patch: bool) -> CodeState:
    """The state of the code in a folder.

    Args:
        directory: where the job will run.
        apart: files and folders that are kept with the job anyway, or hold no code.
        with_patch: keep what is not committed as a patch, rather than refuse it.

    Raises:
        InputError: something is not committed, or git can't tell.
    """
    top = _git(directory, "rev-parse", "--show-toplevel")
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    if top is None or commit is None:
        if any((folder / ".git").exists() for folder in (directory, *directory.parents)):
            where = shown_path(directory)
            raise InputError(
                f"{where} is in a git repository of which git tells no commit, and a run is made "
                f"again from a commit: mend what `git -C {shlex.quote(where)} rev-parse HEAD` says."
            )
        return CodeState()
    root, kept = Path(_text(top).strip()), tuple(path.resolve() for path in apart)

    def is_code(name: str) -> bool:
        file = (root / name).resolve()
        return not any(file == path or path in file.parents for path in kept)

    differing = _git(root, "diff", "--name-only", "-z", "HEAD", "--")
    unknown = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py")
    known = [name for name in _text(differing).split("\0") if name and is_code(name)]
    new = [name for name in _text(unknown).split("\0") if name and is_code(name)]
    changed = tuple(known + new)
    if changed and not with_patch:
        named = ", ".join(shown_path(Path(name)) for name in changed[:_MOST_NAMED])
        more = f" and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
        raise InputError(
            f"{shown_path(root)} has changes that are not committed ({named}{more}), and a run is "
            "made again from a commit: commit them, or keep them with the job by --patch."
        )
    patch = (_git(root, *_DIFF, "HEAD", "--", *known) or b"") if known else b""
    patch += b"".join(_added(root, name) for name in new)
    return CodeState(_text(commit).strip(), changed, patch)


def _added(root: Path, name: str) -> bytes:
    """A file that git doesn't know, as a patch that adds it; git says by 1 that they differ."""
    return _git(root, *_DIFF, "--no-index", "--", "/dev/null", name, differs=1) or b""


def _text(said: bytes | None) -> str:
    return (said or b"").decode(errors="surrogateescape")


def _git(directory: Path, *arguments: str, differs: int = 0) -> bytes | None:
    """What git says; None: it failed, or there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        raise InputError(
            f"git took more than {_TIMEOUT_S} s in {shown_path(directory)}: see whether its disk "
            "answers, and launch again."
        ) from None
    return done.stdout if done.returncode in (0, differs) else None
