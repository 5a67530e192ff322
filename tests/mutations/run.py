#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Take each defence of records.py away and see that its test fails.

    python tests/mutations/run.py [--output FILE] [--gpu] [NAME ...]

Works on a copy of the tree, never on the tree itself. A test must pass on the copy as it is, fail with the
mutation, and not for want of a build. C++ needs CMake, Ninja and a compiler; Python tests run against the
installed libattnres with the copy's Python files over it. ``--gpu`` runs the mutations of kernels instead: it
needs a GPU, and builds the package anew for each by ``pip install --no-build-isolation``.
Exit status 1 when a mutation survives.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from records import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 900  # seconds for one build or test


class BuildError(Exception):
    """A copy that does not build says nothing about a test."""


class Copy:
    """A copy of the working tree with what its tests run on."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self.build_folder = folder / "build"
        self.site = folder / "site"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)

    def run(self, command: Sequence[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, command)),
            cwd=self.root,
            env={**os.environ, "CCACHE_BASEDIR": str(self.root), "CCACHE_NOHASHDIR": "1", **environment},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
        )

    def require(self, command: Sequence[str | Path], **environment: str) -> None:
        result = self.run(command, **environment)
        if result.returncode != 0:
            raise BuildError((result.stdout + result.stderr)[-2000:])

    def program(self, mutation: Mutation) -> str:
        return mutation.test.split()[0].replace("replay_", "fuzz_")

    def build(self, mutation: Mutation) -> None:
        if mutation.gpu:
            shutil.rmtree(self.site, ignore_errors=True)
            # Without kernels for other GPUs, which would take most of the time.
            pip = [sys.executable, "-m", "pip", "install", ".", "--no-deps", "--no-build-isolation"]
            folders = ["--target", str(self.site), "-C", f"build-dir={self.build_folder}"]
            self.require([*pip, *folders], ATTNRES_CUDA_TARGETS="90a")
        elif mutation.is_python:
            self.lay_python_over_installed()
        else:
            if not (self.build_folder / "build.ninja").exists():
                defines = ("ATTNRES_CUDA=OFF", "ATTNRES_BUILD_TESTS=ON", "CMAKE_BUILD_TYPE=Release")
                options = [f"-D{define}" for define in defines]
                self.require(["cmake", "-G", "Ninja", "-S", self.root, "-B", self.build_folder, *options])
            self.require(["cmake", "--build", self.build_folder, "--target", self.program(mutation)])

    def lay_python_over_installed(self) -> None:
        package = self.site / "libattnres"
        if not package.exists():
            spec = importlib.util.find_spec("libattnres")
            if spec is None or spec.origin is None:
                raise BuildError("libattnres: expected an installed one, got none")
            shutil.copytree(Path(spec.origin).parent, package)
        shutil.copytree(self.root / "python/libattnres", package, dirs_exist_ok=True)

    def test_fails(self, mutation: Mutation) -> bool:
        if mutation.is_python:
            command: list[str | Path] = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
            result = self.run(
                [*command, mutation.test], PYTHONPATH=str(self.site), PYTHONDONTWRITEBYTECODE="1"
            )
            if result.returncode not in (0, 1):  # 1: tests failed; all else is no answer
                raise BuildError((result.stdout + result.stderr)[-2000:])
            return result.returncode == 1
        program, *case = mutation.test.split()
        folder = "fuzz" if program.startswith("replay_") else "cpp"
        if folder == "fuzz":
            case = [f"tests/fuzz/corpus/{program.removeprefix('replay_')}"]
        executable = self.build_folder / "tests" / folder / self.program(mutation)
        return self.run([executable, *case]).returncode != 0

    def passes_unchanged(self, mutation: Mutation) -> str:
        """Nothing when the test passes on the copy as it is; otherwise why its failure would say nothing."""
        found = (self.root / mutation.file).read_text().count(mutation.old)
        if found != 1:
            return f"stale: found {found} times in {mutation.file}"
        try:
            # Kernels take long, and those of the unchanged copy are the same for every mutation.
            if not (mutation.gpu and self.site.exists()):
                self.build(mutation)
            return "stale: the test fails without the mutation" if self.test_fails(mutation) else ""
        except (BuildError, subprocess.TimeoutExpired) as error:
            return f"stale: {error}"

    def judge(self, mutation: Mutation) -> str:
        """The verdict on a test that passes unchanged: killed, survived, or what kept it from answering."""
        path = self.root / mutation.file
        source = path.read_text()
        try:
            path.write_text(source.replace(mutation.old, mutation.new))
            self.build(mutation)
            return "killed" if self.test_fails(mutation) else "survived"
        except (BuildError, subprocess.TimeoutExpired) as error:
            return f"stale: {error}"
        finally:
            path.write_text(source)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations to run; all without one")
    parser.add_argument(
        "--gpu", action="store_true", help="the mutations that need a GPU, instead of the others"
    )
    parser.add_argument("--output", type=Path, help="where to write the summary")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"expected names among records.py, got {', '.join(sorted(unknown))}")
    chosen = [m for m in MUTATIONS if m.gpu == options.gpu and (not options.names or m.name in options.names)]
    if not chosen:
        parser.error("expected mutations of kernels with --gpu and others without, got none to run")
    records = []
    with tempfile.TemporaryDirectory(prefix="attnres_mutations_") as folder:
        copy = Copy(Path(folder))
        stale = {mutation.name: copy.passes_unchanged(mutation) for mutation in chosen}
        for mutation in chosen:
            start = time.monotonic()
            verdict = stale[mutation.name] or copy.judge(mutation)
            seconds = round(time.monotonic() - start, 1)
            print(
                f"{verdict.partition(':')[0]:9} {mutation.name:24} {mutation.test} ({seconds} s)", flush=True
            )
            if verdict.startswith("stale"):
                print(f"  {verdict}", flush=True)
            records.append(
                {
                    "name": mutation.name,
                    "defence": mutation.defence,
                    "file": mutation.file,
                    "test": mutation.test,
                    "verdict": verdict,
                    "seconds": seconds,
                }
            )
    killed = sum(record["verdict"] == "killed" for record in records)
    print(f"{killed} of {len(records)} mutations made their test fail")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        summary = {
            "date": datetime.date.today().isoformat(),
            "failed as they must": f"{killed} of {len(records)}",
            "mutations": records,
        }
        options.output.write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if killed == len(records) else 1


if __name__ == "__main__":
    sys.exit(main())
