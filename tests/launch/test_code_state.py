"""Which code a job runs: a commit, a refusal, or a patch that makes the same tree."""

import subprocess

import pytest

from paceline.config.errors import InputError
from paceline.launch.code_state import CodeState, code_state


def git(folder, *arguments: str) -> str:
    who = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "model.py").write_text("a = 1\n")
    (folder / "job.toml").write_text("name = 'x'\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


def test_a_clean_project_is_its_commit(project):
    (project / "runs").mkdir()
    (project / "runs" / "copied.py").write_text("")
    (project / "notes.txt").write_text("no code")
    (project / "job.toml").write_text("name = 'y'\n")
    apart = (project / "runs", project / "job.toml")
    state = code_state(project, apart=apart, with_patch=False)
    assert state == CodeState(git(project, "rev-parse", "HEAD").strip())


def test_a_folder_outside_git_has_no_commit(tmp_path):
    assert code_state(tmp_path, with_patch=False) == CodeState()


def test_a_repository_without_a_commit_is_refused(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "sub").mkdir()
    with pytest.raises(InputError, match="of which git tells no commit"):
        code_state(tmp_path / "sub", with_patch=True)


def test_the_patch_has_what_changed_in_a_submodule(project, tmp_path):
    git(tmp_path, "init", "-q", "library")
    (tmp_path / "library" / "layers.py").write_text("a = 1\n")
    git(tmp_path / "library", "add", "-A")
    git(tmp_path / "library", "commit", "-qm", "first")
    allowed = ("-c", "protocol.file.allow=always")
    git(project, *allowed, "submodule", "add", "-q", str(tmp_path / "library"), "library")
    git(project, "commit", "-qam", "library")
    (project / "library" / "layers.py").write_text("a = 2\n")
    state = code_state(project, with_patch=True)
    assert state.changed == ("library",)
    git(project / "library", "checkout", "-q", "layers.py")
    (tmp_path / "code.patch").write_bytes(state.patch)
    git(project, "apply", str(tmp_path / "code.patch"))
    assert (project / "library" / "layers.py").read_text() == "a = 2\n"


def test_what_is_not_committed_is_refused_or_kept_as_a_patch(project, tmp_path):
    (project / "model.py").write_text("a = 2\n")
    (project / "job.toml").write_bytes(b"name = 'caf\xe9'\n")
    (project / "sub dir").mkdir()
    (project / "sub dir" / "new $(1).py").write_text("b = 1\n")
    with pytest.raises(InputError, match=r"not committed \(job.toml, model.py, sub dir/new "):
        code_state(project / "sub dir", with_patch=False)
    state = code_state(project, with_patch=True)
    assert state.changed == ("job.toml", "model.py", "sub dir/new $(1).py")
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(project), str(copy))
    (tmp_path / "code.patch").write_bytes(state.patch)
    git(copy, "apply", str(tmp_path / "code.patch"))
    assert (copy / "job.toml").read_bytes() == b"name = 'caf\xe9'\n"
    assert (copy / "model.py").read_text() == "a = 2\n"
    assert (copy / "sub dir" / "new $(1).py").read_text() == "b = 1\n"
