# SPDX-License-Identifier: Apache-2.0
"""Rehearse a release: every step up to the upload, and a list of what is still missing.

    python release/release_check.py 1.2.3                  # host-only wheels of the Pythons at hand
    python release/release_check.py 1.2.3 --full           # with kernels, as they are uploaded
    python release/release_check.py 1.2.3 --dist folder    # the files that are to be uploaded

Nothing outside the work folder is written, nothing is uploaded. The exit status is 0 when nothing is missing.
Its tools are those of release/tools-requirements.txt; `make release-check VERSION=1.2.3` provides them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import check_dist

ROOT = check_dist.ROOT
RELEASE = ROOT / "release"
# Of the Python that runs this, so that nothing but pinned tools is used.
BIN = Path(sys.executable).parent
MANYLINUX = "manylinux_2_28"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
ARCHITECTURES = ("x86_64", "aarch64")


class MissingError(Exception):
    """A step found that something is missing; one line each."""

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.lines = lines


def output(*command: str | Path, cwd: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    """Run a command and return what it printed; its failure is something missing."""
    # Build tools are found beside this Python before those of the machine.
    path = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    run = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **path, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        words = " ".join(str(word) for word in command)
        raise MissingError(f"{words}: exit status {run.returncode}", *run.stdout.splitlines()[-15:])
    return run.stdout


def git(*arguments: str) -> str:
    """What git prints."""
    return output("git", *arguments).strip()


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def only(paths: Iterator[Path]) -> Path:
    """The one path that there is."""
    (path,) = paths
    return path


class Rehearsal:
    """The steps of a release, in their order; each returns one line that says what was found."""

    def __init__(
        self, version: str, work: Path, *, full: bool, dist: Path | None, pythons: list[str]
    ) -> None:
        self.version = version
        self.work = work
        self.full = full
        self.dist = dist
        self.pythons = pythons
        self.sdist: Path | None = None
        self.wheels: list[Path] = []
        # As in the workflow: time stamps are those of the commit.
        self.build_environment = {
            "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct"),
            "ATTNRES_CUDA": "ON" if full else "OFF",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def version_of_the_header(self) -> str:
        """ATTNRES_VERSION_* of attnres.h is the version of the release."""
        found = check_dist.header_version()
        if found != self.version:
            raise MissingError(f"attnres.h: expected version {self.version}, got {found}")
        return found

    def changelog_entry(self) -> str:
        """The first section of CHANGELOG.md is of this version and has its date."""
        match = re.search(r"^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
        if match is None or match[1] != self.version:
            got = match[0] if match else "none"
            raise MissingError(f"CHANGELOG.md: expected a first section of {self.version}, got {got}")
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", match[2]):
            raise MissingError(f"CHANGELOG.md: expected the release's date, got ({match[2]})")
        return match[0]

    def recorded_interface(self) -> str:
        """The C interface of this minor version has been recorded."""
        minor = self.version.rpartition(".")[0]
        record = ROOT / "tests" / "abi" / f"attnres-{minor}.txt"
        if not record.is_file():
            raise MissingError(f"{record.relative_to(ROOT)}: not there")
        return f"{record.name}, {len(check_dist.expected_symbols())} symbols"

    def clean_tree(self) -> str:
        """Nothing is uncommitted: what is released is what the tag names."""
        if changes := git("status", "--porcelain"):
            lines = changes.splitlines()
            more = [f"and {len(lines) - 10} more"] if len(lines) > 10 else []
            raise MissingError("uncommitted files:", *lines[:10], *more)
        return git("rev-parse", "HEAD")

    def tag(self) -> str:
        """The tag is not taken; a release that was tagged is built from the tagged commit."""
        name = f"v{self.version}"
        pushed = os.environ.get("GITHUB_REF_NAME") if os.environ.get("GITHUB_REF_TYPE") == "tag" else None
        if pushed is not None and pushed != name:
            raise MissingError(f"the pushed tag is {pushed}, expected {name}")
        if not git("tag", "--list", name):
            if pushed:
                raise MissingError(f"{name}: not in this clone")
            return f"{name} is free"
        if git("rev-parse", f"{name}^{{commit}}") != git("rev-parse", "HEAD"):
            raise MissingError(f"{name} is the tag of another commit")
        return f"{name} is HEAD"

    def pinned_inputs(self) -> str:
        """Every build input has its version and hash, and the versions are those of pyproject.toml."""
        import tomllib

        groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
        missing, count = [], 0
        for name, pins in (
            ("build", groups["build"]),
            ("cuda", []),
            ("tools", [*groups["build"], *groups["release"]]),
        ):
            file = RELEASE / f"{name}-requirements.txt"
            text = file.read_text().replace("\\\n", " ")
            requirements = [line for line in text.splitlines() if line and not line.startswith("#")]
            count += len(requirements)
            missing += [
                f"{file.name}: no version and hash: {line}"
                for line in requirements
                if not re.match(r"\S+==\S+ .*--hash=sha256:", line)
            ]
            locked = {line.split()[0] for line in requirements}
            missing += [
                f"{file.name}: {pin} is not in it"
                for pin in pins
                if isinstance(pin, str) and pin not in locked
            ]
        if missing:
            raise MissingError(*missing, "`make lock` writes these files")
        return f"{count} requirements with hashes"

    def source_distribution(self) -> str:
        """The sdist is built, holds what git tracks, and is the same when built again."""
        if self.dist:
            found = list(self.dist.glob("*.tar.gz"))
            if len(found) != 1:
                raise MissingError(f"{self.dist}: expected one source distribution, got {len(found)}")
            self.sdist = found[0]
            return self.sdist.name
        folders = [self.work / name for name in ("sdist", "sdist-again")]
        for folder in folders:
            output(
                BIN / "python",
                "-m",
                "build",
                "--sdist",
                "--no-isolation",
                "--outdir",
                folder,
                environment=self.build_environment,
            )
        self.sdist, again = (only(folder.glob("*.tar.gz")) for folder in folders)
        if digest(self.sdist) != digest(again):
            raise MissingError("two source distributions of the same files differ")
        return f"{self.sdist.name}, sha256 {digest(self.sdist)}"

    def _python_with_build_tools(self, python: str) -> Path:
        """An environment with the pinned build tools, like the one that cibuildwheel makes."""
        tag = output(python, "-c", "import sys; print('cp{}{}'.format(*sys.version_info))").strip()
        environment = self.work / tag / "environment"
        output(python, "-m", "venv", "--clear", environment)
        own = environment / "bin" / "python"
        files = ("build", "cuda") if self.full and shutil.which("nvcc") is None else ("build",)
        requirements = [word for name in files for word in ("-r", RELEASE / f"{name}-requirements.txt")]
        output(own, "-m", "pip", "install", "--quiet", "--require-hashes", *requirements)
        return own

    def _build_wheel(self, python: Path, source: Path, outdir: Path) -> Path:
        command = (
            python,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--check-build-dependencies",
        )
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        output(*command, "--wheel-dir", outdir, source, environment={**self.build_environment, "PATH": path})
        return only(outdir.glob("*.whl"))

    def wheels_of_the_sdist(self) -> str:
        """Wheels are built from the sdist, as in the workflow: one for each Python at hand."""
        if self.dist:
            self.wheels = sorted(self.dist.glob("*.whl"))
            return f"{len(self.wheels)} wheels given"
        if self.sdist is None:
            raise MissingError("no source distribution")
        for python in self.pythons:
            own = self._python_with_build_tools(python)
            self.wheels.append(self._build_wheel(own, self.sdist, own.parents[2] / "wheel"))
        if not self.wheels:
            raise MissingError(f"no Python of {', '.join(PYTHONS)}")
        return ", ".join(wheel.name for wheel in self.wheels)

    def same_bytes_from_the_checkout(self) -> str:
        """The wheel of the checkout, built in another folder, is the wheel of the sdist byte for byte."""
        if self.dist:
            return "not run for given files"
        if not self.wheels:
            raise MissingError("no wheel")
        first = self.wheels[0]
        own = first.parents[1] / "environment" / "bin" / "python"
        again = self._build_wheel(own, ROOT, first.parents[1] / "wheel-of-the-checkout")
        if digest(first) != digest(again):
            raise MissingError(
                "the wheels of the sdist and of the checkout differ:", *differences(first, again)
            )
        return f"sha256 {digest(first)}"

    def platform_tags(self) -> str:
        """The wheels run where their tag says."""
        if not self.wheels:
            raise MissingError("no wheel")
        if self.dist:
            wrong = [wheel.name for wheel in self.wheels if MANYLINUX not in wheel.name]
            if wrong:
                raise MissingError(*(f"{name}: expected the tag {MANYLINUX}" for name in wrong))
        facts = []
        for wheel in self.wheels if self.dist is None else self._of_this_machine():
            text = " ".join(output(BIN / "auditwheel", "show", wheel).split())
            match = re.search(r'following platform tag: "([^"]+)"', text)
            if match is None:
                raise MissingError(f"{wheel.name}: auditwheel found no tag")
            facts.append(match[1])
        if self.dist is None:
            repaired = []
            for wheel in self.wheels:
                folder = wheel.parents[1] / "repaired"
                output(
                    BIN / "auditwheel",
                    "repair",
                    "--wheel-dir",
                    folder,
                    wheel,
                    environment=self.build_environment,
                )
                repaired.append(only(folder.glob("*.whl")))
            self.wheels = repaired
        return ", ".join(sorted(set(facts)))

    def _of_this_machine(self) -> list[Path]:
        return [wheel for wheel in self.wheels if wheel.stem.endswith(os.uname().machine)]

    def descriptions(self) -> str:
        """An index will show the description."""
        files = self.files()
        output(BIN / "twine", "--no-color", "check", "--strict", *files)
        return f"{len(files)} files"

    def contents(self) -> str:
        """Contents, sizes, metadata, symbols and bills of materials are the expected ones."""
        reports = [check_dist.check(file) for file in self.files()]
        faults = [f"{report.path.name}: {fault}" for report in reports for fault in report.faults]
        if faults:
            raise MissingError(*faults)
        return "; ".join(f"{report.path.name}: {', '.join(report.facts)}" for report in reports)

    def files(self) -> list[Path]:
        """Everything that was built or given."""
        files = [*([self.sdist] if self.sdist else []), *self.wheels]
        if not files:
            raise MissingError("no file")
        return files

    def installation(self) -> str:
        """Each wheel of this machine that has its Python at hand installs, and its library loads."""
        program = (
            "import ctypes, importlib.util; folder = importlib.util.find_spec('libattnres').origin[:-11];"
            "library = ctypes.CDLL(folder + 'lib/libattnres.so');"
            "library.attnres_version_string.restype = ctypes.c_char_p;"
            "print(library.attnres_version_string().decode())"
        )
        done = []
        for python in self.pythons:
            tag = output(python, "-c", "import sys; print('cp{}{}'.format(*sys.version_info))").strip()
            for wheel in self._of_this_machine():
                if f"-{tag}-" not in wheel.name:
                    continue
                clean = self.work / tag / "clean"
                output(python, "-m", "venv", "--clear", clean)
                own = clean / "bin" / "python"
                output(own, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
                loaded = output(own, "-c", program, cwd=self.work).strip()
                if loaded != self.version:
                    raise MissingError(f"{wheel.name}: its library is of version {loaded}")
                done.append(tag)
        if not done:
            raise MissingError("no wheel for a Python at hand")
        return f"{', '.join(done)}; `make check-wheel` runs its tests beside a PyTorch"

    def documentation(self) -> str:
        """The site builds without a warning."""
        index = ROOT / "build" / "site" / "index.html"
        index.unlink(missing_ok=True)
        output("make", "docs")
        if not index.is_file():
            raise MissingError(f"{index.relative_to(ROOT)}: not written")
        return str(index.parent.relative_to(ROOT))

    def upload_set(self) -> str:
        """Every wheel of the release is there: each Python on each architecture, with kernels."""
        folder = self.dist or self.work
        names = [wheel.name for wheel in self.wheels] if self.dist else []
        missing = []
        for python in PYTHONS:
            tag = f"cp{python.replace('.', '')}"
            for architecture in ARCHITECTURES:
                pattern = (
                    rf"libattnres-{re.escape(self.version)}-{tag}-{tag}-[\w.]*{MANYLINUX}_{architecture}\.whl"
                )
                if not any(re.fullmatch(pattern, name) for name in names):
                    missing.append(f"{tag} {MANYLINUX}_{architecture}")
        hosts = [wheel.name for wheel in self.wheels if self.dist and not has_kernels(wheel)]
        missing += [f"kernels in {name}" for name in hosts]
        if missing:
            hint = (
                [] if self.dist else ["`make wheels` builds them in their container; DIST=folder checks them"]
            )
            raise MissingError(*missing, *hint)
        return f"{len(names)} wheels in {folder}"

    def agreement(self) -> list[Callable[[], str]]:
        """The steps that need neither a build nor tools."""
        return [
            self.version_of_the_header,
            self.changelog_entry,
            self.recorded_interface,
            self.clean_tree,
            self.tag,
            self.pinned_inputs,
        ]

    def steps(self) -> list[Callable[[], str]]:
        """All steps, in their order."""
        return [
            *self.agreement(),
            self.source_distribution,
            self.wheels_of_the_sdist,
            self.same_bytes_from_the_checkout,
            self.platform_tags,
            self.descriptions,
            self.contents,
            self.installation,
            self.documentation,
            self.upload_set,
        ]


def has_kernels(wheel: Path) -> bool:
    """Whether the library in a wheel was built with CUDA."""
    with zipfile.ZipFile(wheel) as archive:
        return check_dist.has_kernels(archive.read(check_dist.LIBRARY))


def differences(first: Path, second: Path) -> list[str]:
    """The members that differ between two wheels."""
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as other:
        members = [{entry.filename: entry for entry in archive.infolist()} for archive in (one, other)]
        lines = [f"only in one of them: {name}" for name in sorted(members[0].keys() ^ members[1].keys())]
        for name in sorted(members[0].keys() & members[1].keys()):
            if one.read(name) != other.read(name):
                lines.append(f"other bytes: {name}")
            elif members[0][name].date_time != members[1][name].date_time:
                lines.append(f"another time: {name}")
            elif members[0][name].external_attr != members[1][name].external_attr:
                lines.append(f"another mode: {name}")
    return lines or ["the order or the compression of the members"]


def pythons_at_hand() -> list[str]:
    """Every supported Python on PATH that runs."""
    found = []
    for version in PYTHONS:
        python = shutil.which(f"python{version}")
        if python and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            found.append(python)
    return found


def main() -> int:
    """Run every step, whatever the others found."""
    parser = argparse.ArgumentParser(description="Rehearse a release up to its upload.")
    parser.add_argument("version")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "release-check", help="folder for what is built"
    )
    parser.add_argument("--full", action="store_true", help="build the wheels with kernels")
    parser.add_argument("--agree", action="store_true", help="version, changelog, tag and inputs alone")
    parser.add_argument("--dist", type=Path, help="check these files, and build none")
    parser.add_argument("--python", action="append", help="interpreter to build for; default: those on PATH")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.work, ignore_errors=True)
    arguments.work.mkdir(parents=True)
    rehearsal = Rehearsal(
        arguments.version,
        arguments.work.resolve(),
        full=arguments.full,
        dist=arguments.dist.resolve() if arguments.dist else None,
        pythons=arguments.python or pythons_at_hand(),
    )
    missing: list[str] = []
    for step in rehearsal.agreement() if arguments.agree else rehearsal.steps():
        name = step.__name__.replace("_", " ")
        start = time.monotonic()
        try:
            found = step()
            print(f"ok       {name} ({time.monotonic() - start:.0f} s): {found}", flush=True)
        except MissingError as error:
            print(f"MISSING  {name} ({time.monotonic() - start:.0f} s)", flush=True)
            missing += [f"{name}: {error.lines[0]}", *(f"    {line}" for line in error.lines[1:])]
    if missing:
        print(f"\n{rehearsal.version} is not ready to be released:", *missing, sep="\n  ")
        return 1
    print(f"\n{rehearsal.version} is ready: push the tag v{rehearsal.version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
