# SPDX-License-Identifier: Apache-2.0
"""The release's own checks find what is wrong, and the workflows call what there is."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import check_dist
import pytest
import release_check
from permutation_table import ROOT

# The tools of a release need Python 3.11.
tomllib = pytest.importorskip("tomllib")

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
VERSION = check_dist.header_version()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one commit with what the first steps of a rehearsal read."""
    folder = tmp_path / "project"
    for name in ("cpp/include/attnres/attnres.h", "pyproject.toml", "CHANGELOG.md"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((ROOT / name).read_text())
    monkeypatch.setattr(release_check, "ROOT", folder)
    monkeypatch.setattr(check_dist, "ROOT", folder)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a maintainer")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "maintainer@example.invalid")
    for variable in ("GITHUB_REF_NAME", "GITHUB_REF_TYPE"):
        monkeypatch.delenv(variable, raising=False)
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        git(folder, *arguments)
    return folder


def git(folder: Path, *arguments: str) -> None:
    release_check.output("git", *arguments, cwd=folder)


@pytest.fixture
def rehearsal(project: Path, monkeypatch: pytest.MonkeyPatch) -> release_check.Rehearsal:
    # output() took its default folder when it was defined.
    monkeypatch.setattr(
        release_check, "git", lambda *words: release_check.output("git", *words, cwd=project).strip()
    )
    return release_check.Rehearsal(VERSION, project / "build", full=False, dist=None, pythons=[])


def test_another_version_than_the_header_is_missing(rehearsal: release_check.Rehearsal) -> None:
    assert rehearsal.version_of_the_header() == VERSION
    rehearsal.version = "9.8.7"
    with pytest.raises(release_check.MissingError, match="got " + re.escape(VERSION)):
        rehearsal.version_of_the_header()


@pytest.mark.parametrize(
    ("heading", "message"),
    [
        (f"## {VERSION} (2026-11-29)", None),
        (f"## {VERSION} (unreleased)", "expected the release's date"),
        ("## 9.8.7 (2026-11-29)", "expected a first section of"),
        ("", "got none"),
    ],
)
def test_changelog_needs_a_dated_section_of_the_version(
    rehearsal: release_check.Rehearsal, project: Path, heading: str, message: str | None
) -> None:
    (project / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n\n- a change\n")
    if message is None:
        assert rehearsal.changelog_entry() == heading
    else:
        with pytest.raises(release_check.MissingError, match=message):
            rehearsal.changelog_entry()


def test_uncommitted_files_are_named(rehearsal: release_check.Rehearsal, project: Path) -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", rehearsal.clean_tree())
    (project / "left-over.txt").touch()
    with pytest.raises(release_check.MissingError) as caught:
        rehearsal.clean_tree()
    assert "?? left-over.txt" in caught.value.lines


def test_tag_must_be_free_or_the_commit_itself(
    rehearsal: release_check.Rehearsal, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rehearsal.tag() == f"v{VERSION} is free"
    git(project, "tag", f"v{VERSION}")
    assert rehearsal.tag() == f"v{VERSION} is HEAD"
    monkeypatch.setenv("GITHUB_REF_TYPE", "tag")
    monkeypatch.setenv("GITHUB_REF_NAME", "v9.8.7")
    with pytest.raises(release_check.MissingError, match=r"the pushed tag is v9\.8\.7"):
        rehearsal.tag()
    monkeypatch.setenv("GITHUB_REF_NAME", f"v{VERSION}")
    git(project, "commit", "--quiet", "--allow-empty", "-m", "second")
    with pytest.raises(release_check.MissingError, match="the tag of another commit"):
        rehearsal.tag()


def test_inputs_are_pinned_to_the_versions_of_the_project(
    rehearsal: release_check.Rehearsal, project: Path
) -> None:
    assert rehearsal.pinned_inputs().endswith("requirements with hashes")
    file = project / "pyproject.toml"
    file.write_text(re.sub(r"pybind11==[\d.]+", "pybind11==9.8.7", file.read_text()))
    with pytest.raises(release_check.MissingError) as caught:
        rehearsal.pinned_inputs()
    assert "build-requirements.txt: pybind11==9.8.7 is not in it" in caught.value.lines


def test_upload_set_without_files_names_every_wheel(rehearsal: release_check.Rehearsal) -> None:
    with pytest.raises(release_check.MissingError) as caught:
        rehearsal.upload_set()
    wheels = [line for line in caught.value.lines if line.startswith("cp")]
    assert len(wheels) == len(release_check.PYTHONS) * len(release_check.ARCHITECTURES)


def faults_of_wheel(path: Path, members: dict[str, bytes]) -> Iterator[str]:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
    yield from check_dist.check_wheel(path).faults


def test_wheel_with_wrong_contents_is_refused(tmp_path: Path) -> None:
    info = f"libattnres-{VERSION}.dist-info"
    package = dict.fromkeys(check_dist.expected_package_files(), b"")
    members = {
        **package,
        "libattnres/_core.cpython-312-x86_64-linux-gnu.so": b"",
        **{f"{info}/{name}": b"" for name in check_dist.METADATA_FILES},
    }
    path = tmp_path / f"libattnres-{VERSION}-cp312-cp312-manylinux_2_28_x86_64.whl"
    members.pop("libattnres/py.typed")
    members.pop(f"{info}/sboms/libattnres.cdx.json")
    members["libattnres/notes.txt"] = b""
    assert set(faults_of_wheel(path, members)) == {
        "contents: missing libattnres/py.typed",
        "contents: unexpected libattnres/notes.txt",
        "dist-info: missing sboms/libattnres.cdx.json",
    }
    assert list(faults_of_wheel(path.with_name("libattnres-1-py3-none-any.whl"), members)) == [
        "not the name of a wheel of this project"
    ]


def test_size_above_the_limit_is_a_fault(tmp_path: Path) -> None:
    report = check_dist.Report(tmp_path)
    report.expect_size("sdist", check_dist.LIMITS["sdist"])
    assert not report.faults
    report.expect_size("sdist", check_dist.LIMITS["sdist"] + 1)
    assert len(report.faults) == 1


def test_supported_pythons_are_said_once_and_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tags = [f"cp{version.replace('.', '')}-*" for version in release_check.PYTHONS]
    assert project["tool"]["cibuildwheel"]["build"] == tags
    prefix = "Programming Language :: Python :: 3."
    classifiers = [
        word.rpartition(" ")[2] for word in project["project"]["classifiers"] if word.startswith(prefix)
    ]
    assert tuple(classifiers) == release_check.PYTHONS
    assert project["project"]["requires-python"] == f">={release_check.PYTHONS[0]}"
    for architecture in release_check.ARCHITECTURES:
        assert project["tool"]["cibuildwheel"][f"manylinux-{architecture}-image"] == release_check.MANYLINUX


@pytest.mark.skipif(not WORKFLOWS, reason="a source distribution has no workflows")
def test_workflows_pin_actions_and_call_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    versions: dict[str, set[str]] = {}
    for file in WORKFLOWS:
        text = file.read_text()
        assert re.search(r"^permissions:\n  contents: read$", text, re.MULTILINE), file.name
        for action in re.findall(r"uses: (.*)", text):
            if not action.startswith("./"):
                match = re.fullmatch(r"([\w./-]+)@([0-9a-f]{40} # v\d+\.\d+\.\d+)", action)
                assert match is not None, f"{file.name}: {action}"
                versions.setdefault(match[1], set()).add(match[2])
        commands = re.findall(r"^ *(?:- )?run: (.*)", text, re.MULTILINE)
        others = [command for command in commands if not command.startswith("make ")]
        assert others in ([], ['cat certificate/*.md >> "$GITHUB_STEP_SUMMARY"']), file.name
        called = {
            word
            for command in commands
            for word in command.removeprefix("make ").split()
            if command not in others and re.fullmatch(r"[a-z-]+", word)
        }
        assert called <= targets, file.name
    assert {name for name, found in versions.items() if len(found) > 1} == set()
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert f'python: ["{release_check.PYTHONS[0]}", "{release_check.PYTHONS[-1]}"]' in ci
