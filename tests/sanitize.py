#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run NVIDIA's compute-sanitizer over the C++ tests of the kernels, and summarise what it reports.

    python tests/sanitize.py [--output docs/reliability/sanitizer.json]

Needs a GPU, compute-sanitizer, nvcc, g++ and an installed libattnres; the test programs are compiled against
that. Each tool first gets a program with a fault of its kind, which it must report. Then memcheck, racecheck,
synccheck and initcheck run over tests/cpp/test_device_forward.cpp: every N with every NC, B and cluster size,
every kernel of the two phases, and blocks that walk many tokens. The exit status is 1 when anything is
reported that is not explained here.

What racecheck is not believed about. It takes a bulk copy for a store of the thread that issued it. It
does not know that the copy's bytes, when they complete a barrier, order it before the reads of whoever waited
there, nor that a warp's ``__syncwarp`` orders the loads of all its lanes before the one lane's arrival that
hands a row slot back. So it reports the ring's slots as races between the copy and the loads. A report is set
aside only when one side is the bulk copy instruction itself and the other a load, both read from the machine
code at the reported offsets; their number stays in the summary. Every other pair is an error: partial sums,
queries and whatever else is stored by ordinary instructions. The order of copies and loads has a test of its
own, tests/python/test_ring_order.py, which spoils a slot before it is filled again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
OPTIONS = {
    "memcheck": ["--padding", "512"],  # guards between allocations, so that an overrun hits none of them
    "racecheck": ["--racecheck-report", "analysis", "--racecheck-indirect-barrier-dependency"],
    "synccheck": [],
    "initcheck": [],
}
JUDGED = (
    "sampled_permutations_match_float64",
    "persistent_blocks_walk_many_tokens",
    "both_phases_match_float64",
    "both_phases_walk_many_tokens",
)
CASES = {
    "memcheck": JUDGED,
    "racecheck": JUDGED,
    "synccheck": JUDGED,
    # The others write all of their memory before the call, so there is nothing to find in them.
    "initcheck": ("sampled_permutations_read_only_what_they_must", "both_phases_read_only_what_they_must"),
}
BULK_COPY = "UBLKCP"
LOADS = ("LDS", "LDSM")  # LDSM: ldmatrix
TIMEOUT = 900  # seconds for one program under one tool
KEPT = 20  # reports that the summary quotes

RACE = re.compile(r"Race reported between (Write|Read) access at (.+)$")
OTHER_SIDE = re.compile(r"^\s+and (Write|Read) access at (.+?)(?: \[(\d+) hazards?\])?$")
PLACE = re.compile(
    r"(?:(?P<function>[^\s+]+)\+0x(?P<offset>[0-9a-f]+)|0x(?P<offset2>[0-9a-f]+) in (?P<function2>\S+))"
)
REPORT = re.compile(
    r"Invalid|Misaligned|Uninitialized|Barrier error|Program hit|Leaked|Internal|FATAL|Error:|Warning:"
)
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z0-9_.]+)")
FUNCTION = re.compile(r"^\s*Function : (\S+)")


@dataclasses.dataclass(frozen=True)
class Access:
    """One side of a race: an instruction of a kernel."""

    kind: str
    function: str
    offset: int


@dataclasses.dataclass(frozen=True)
class Race:
    """A pair of accesses that racecheck found unordered."""

    first: Access
    second: Access
    hazards: int


@dataclasses.dataclass
class Outcome:
    """What one tool said about one program."""

    tool: str
    case: str
    seconds: float
    exit_status: int
    reported: int | None
    """The number in the tool's own summary line; None without one."""
    errors: list[str]
    """Reports that nothing explains, and whatever else went wrong."""
    set_aside: int = 0
    """Pairs of a bulk copy and a load."""
    output: str = dataclasses.field(default="", repr=False)

    @property
    def ok(self) -> bool:
        return not self.errors

    def as_dict(self) -> dict[str, object]:
        return {
            "tool": self.tool,
            "case": self.case,
            "seconds": round(self.seconds, 1),
            "reported": self.reported,
            "set_aside": self.set_aside,
            "errors": len(self.errors),
            "examples": self.errors[:KEPT],
        }


@functools.cache
def toolkit() -> Path:
    """The folder of the CUDA toolkit, from the compiler itself: the one on PATH may be a wrapper."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    plan = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=True
    )
    found = re.search(r"^#\$ TOP=(.+)$", plan.stderr, re.MULTILINE)
    if found is None:
        raise FileNotFoundError(f"nvcc: expected one that says where its toolkit is, got {nvcc}")
    return Path(found[1].strip()).resolve()


def find_tool(name: str) -> str:
    """A program of the CUDA toolkit: its own, on PATH, or where Triton brings one."""
    folders = [toolkit() / "bin", toolkit() / "compute-sanitizer"]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(Path(triton.origin).parent / "backends/nvidia/bin")
    for folder in folders:
        if (folder / name).is_file():
            return str(folder / name)
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"{name}: expected it in {toolkit()}, with Triton or on PATH, got none")
    return path


def find_package() -> Path:
    """The folder of the installed package, without importing it."""
    spec = importlib.util.find_spec("libattnres")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("libattnres: expected it to be installed, got none")
    return Path(spec.origin).parent


def compile_tests(package: Path, folder: Path) -> tuple[Path, Path]:
    """The C++ test program against the installed library, and the program of faults."""
    nvcc, cuda = find_tool("nvcc"), toolkit()
    test, faults = folder / "test_device_forward", folder / "sanitizer_faults"
    libraries = [path for name in ("lib64", "lib") if (path := cuda / name).is_dir()]
    commands = [
        [
            "g++",
            "-std=c++20",
            "-O2",
            "-g",
            f"-I{package / 'include'}",
            f"-I{cuda / 'include'}",
            str(ROOT / "tests/cpp/test_device_forward.cpp"),
            "-o",
            str(test),
            f"-L{package / 'lib'}",
            "-lattnres",
            f"-Wl,-rpath,{package / 'lib'}",
            *(f"-L{path}" for path in libraries),
            "-lcudart_static",
            "-ldl",
            "-lrt",
            "-lpthread",
        ],
        [
            nvcc,
            "-O1",
            "-lineinfo",
            "-arch=native",
            str(ROOT / "tests/cpp/sanitizer_faults.cu"),
            "-o",
            str(faults),
        ],
    ]
    running = [subprocess.Popen(command) for command in commands]
    for process in running:
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return test, faults


def parse_access(kind: str, place: str) -> Access | None:
    """An access as racecheck prints it, in either of its two notations."""
    found = PLACE.search(place)
    if found is None:
        return None
    function = found["function"] or found["function2"]
    return Access(kind, function, int(found["offset"] or found["offset2"], 16))


def parse_races(output: str) -> tuple[list[Race], list[str]]:
    """The races of a report, and the lines that look like one and were not understood."""
    races: list[Race] = []
    unclear: list[str] = []
    first: Access | None = None
    for line in output.splitlines():
        text = line.removeprefix("=========")
        if "Race reported between" in text:
            found = RACE.search(text)
            first = None if found is None else parse_access(found[1], found[2])
            if first is None:
                unclear.append(text.strip())
        elif (other := OTHER_SIDE.search(text)) is not None:
            second = parse_access(other[1], other[2])
            if first is None or second is None:
                unclear.append(text.strip())
            else:
                races.append(Race(first, second, int(other[3] or 1)))
        elif "hazard detected" in text or "FATAL" in text or "Internal Sanitizer Error" in text:
            unclear.append(text.strip())
    return races, unclear


def parse_reports(output: str) -> list[str]:
    """Everything that a tool other than racecheck printed as an error: its first lines."""
    lines = [
        line.removeprefix("=========").strip() for line in output.splitlines() if line.startswith("=====")
    ]
    reports = []
    for index, line in enumerate(lines):
        if REPORT.match(line):
            reports.append(" | ".join(lines[index : index + 3]))
    return reports


def disassemble(library: Path, functions: Iterable[str]) -> dict[tuple[str, int], str]:
    """The opcode at every offset of some kernels."""
    names = ",".join(sorted(set(functions)))
    if not names:
        return {}
    listing = subprocess.run(
        [find_tool("cuobjdump"), "-sass", "-arch", gpu_architecture(), "-fun", names, str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    opcodes: dict[tuple[str, int], str] = {}
    function = ""
    for line in listing.splitlines():
        if (header := FUNCTION.match(line)) is not None:
            function = header[1]
        elif (found := INSTRUCTION.match(line)) is not None:
            opcodes[function, int(found[1], 16)] = found[2]
    return opcodes


def gpu_architecture() -> str:
    """Such as sm_90a."""
    capability = query_gpu("compute_cap").replace(".", "")
    return f"sm_{capability}a"


def query_gpu(field: str) -> str:
    """What nvidia-smi says of the first GPU."""
    answer = subprocess.run(
        ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    return answer.stdout.splitlines()[0].strip()


def is_copy_and_load(race: Race, opcodes: dict[tuple[str, int], str]) -> bool:
    """Whether one side is a bulk copy into a row slot and the other a load from it."""
    sides = {}
    for access in (race.first, race.second):
        opcode = opcodes.get((access.function, access.offset), "")
        sides[opcode.split(".")[0]] = access.kind
    return any(sides == {BULK_COPY: "Write", load: "Read"} for load in LOADS)


def describe(access: Access, opcodes: dict[tuple[str, int], str]) -> str:
    """For the summary."""
    opcode = opcodes.get((access.function, access.offset), "?")
    return f"{access.kind} by {opcode} at {access.function}+{access.offset:#x}"


def judge_races(output: str, library: Path) -> tuple[list[str], int]:
    """The races that stand, and how many were set aside."""
    races, errors = parse_races(output)
    opcodes = disassemble(
        library, (access.function for race in races for access in (race.first, race.second))
    )
    set_aside = 0
    for race in races:
        if is_copy_and_load(race, opcodes):
            set_aside += 1
        else:
            errors.append(
                f"{describe(race.first, opcodes)}, {describe(race.second, opcodes)}: {race.hazards} hazards"
            )
    return errors, set_aside


def run_tool(tool: str, program: Path, case: str) -> Outcome:
    """One program under one tool; its errors are not judged yet."""
    command = [find_tool("compute-sanitizer"), "--tool", tool, *OPTIONS[tool], "--demangle", "no"]
    command += ["--print-limit", "100000", "--show-backtrace", "no", str(program), case]
    started = time.monotonic()
    try:
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT, check=False
        )
        output, status = result.stdout, result.returncode
    except subprocess.TimeoutExpired as expired:
        output, status = (expired.stdout or b"").decode(errors="replace"), -1
    seconds = time.monotonic() - started
    summary = SUMMARY.findall(output)
    return Outcome(tool, case, seconds, status, int(summary[-1]) if summary else None, [], output=output)


def check_case(tool: str, program: Path, case: str, library: Path) -> Outcome:
    """One test case under one tool, judged."""
    outcome = run_tool(tool, program, case)
    if tool == "racecheck":
        outcome.errors, outcome.set_aside = judge_races(outcome.output, library)
        accounted = outcome.set_aside + len(outcome.errors) > 0
    else:
        outcome.errors = parse_reports(outcome.output)
        accounted = bool(outcome.errors)
    if outcome.reported is None:
        outcome.errors.append(f"no summary line, exit status {outcome.exit_status}")
    elif outcome.reported > 0 and not accounted:
        outcome.errors.append(f"{outcome.reported} reports that were not understood")
    if not re.search(rf"^ok\s+{case}$", outcome.output, re.MULTILINE):
        outcome.errors.append("the test case itself did not pass, or was skipped")
    return outcome


def check_fault(tool: str, program: Path) -> Outcome:
    """A fault that the tool must report."""
    outcome = run_tool(tool, program, tool)
    outcome.case = "a known fault"
    if not outcome.reported:
        last = outcome.output.strip().splitlines()[-1:] or ["nothing"]
        outcome.errors.append(f"the tool did not report it; it ended with: {last[0]}")
    if tool == "racecheck" and not parse_races(outcome.output)[0]:
        outcome.errors.append("its report was not understood")
    if tool != "racecheck" and not parse_reports(outcome.output):
        outcome.errors.append("its report was not understood")
    return outcome


def show(outcome: Outcome) -> None:
    """One line, and what was found."""
    note = f", {outcome.set_aside} bulk copies set aside" if outcome.set_aside else ""
    print(
        f"{'ok' if outcome.ok else 'FAILED':<7}{outcome.tool:<10} {outcome.case}: "
        f"{outcome.reported} reported{note} ({outcome.seconds:.0f} s)",
        flush=True,
    )
    for error in outcome.errors[:KEPT]:
        print(f"       {error}")


def version_of(program: str) -> str:
    """The line with the version number."""
    text = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return next((line.strip() for line in text.splitlines() if "ersion" in line), text.strip())


def main() -> int:
    """Compile, run, summarise."""
    parser = argparse.ArgumentParser(description="compute-sanitizer over the C++ tests of the kernels")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/reliability/sanitizer.json")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this tool (repeatable)")
    parser.add_argument("--binary", type=Path, help="a test_device_forward that is built already")
    parser.add_argument(
        "--library", type=Path, help="the libattnres.so it uses; that of the package by default"
    )
    parser.add_argument("--jobs", type=int, default=4, help="programs at a time on the GPU")
    parser.add_argument("--logs", type=Path, help="keep each tool's whole output in this folder")
    options = parser.parse_args()
    tools = options.tool or TOOLS
    with tempfile.TemporaryDirectory() as folder:
        package = find_package()
        test, faults = compile_tests(package, Path(folder))
        test = options.binary or test
        library = options.library or package / "lib/libattnres.so"
        outcomes: list[Outcome] = []

        def conclude(pending: list[concurrent.futures.Future[Outcome]]) -> None:
            for future in pending:
                outcomes.append(future.result())
                show(outcomes[-1])
                if options.logs is not None:
                    options.logs.mkdir(parents=True, exist_ok=True)
                    name = f"{outcomes[-1].tool}-{outcomes[-1].case.replace(' ', '_')}.txt"
                    (options.logs / name).write_text(outcomes[-1].output)

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            conclude([pool.submit(check_fault, tool, faults) for tool in tools])
            # The silence of a tool that misses a known fault means nothing.
            working = [outcome.tool for outcome in outcomes if outcome.ok]
            conclude(
                [
                    pool.submit(check_case, tool, test, case, library)
                    for tool in working
                    for case in CASES[tool]
                ]
            )
    document = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "device": query_gpu("name"),
        "driver": query_gpu("driver_version"),
        "compute_sanitizer": version_of(find_tool("compute-sanitizer")),
        "options": {tool: OPTIONS[tool] for tool in tools},
        "ok": all(outcome.ok for outcome in outcomes),
        "runs": [outcome.as_dict() for outcome in outcomes],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
