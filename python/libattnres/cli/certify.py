# SPDX-License-Identifier: Apache-2.0
"""``libattnres certify``: everything that shows whether the native kernels are right and fast on this GPU.

Runs ``verify``, checks for races, ``bench``, ``walk`` and ``tune`` on one device and writes one JSON and one
Markdown file, so that somebody without such a device can judge it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import libattnres
from libattnres import reference
from libattnres.cli import metadata
from libattnres.cli import report as tables
from libattnres.cli.console import Console
from libattnres.cli.verify import native_plans
from libattnres.cli.workload import COMMON, VARIANTS, Buffers, Shape, chosen_device, refuse_debug_build

HELP = "verify, race checks, bench, walk and tune on this GPU, with one report to judge it by"

DEFAULT_OUTPUT = Path("libattnres-certificate")
LONG_BATCH = 8192
"""Tokens of the race checks: dozens for each SM, as in a prefill."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--quick", action="store_true", help="a small part of everything")
    parser.add_argument("--device", metavar="cuda:N", help="GPU to certify (default: the current one)")
    parser.add_argument(
        "--output",
        type=Path,
        default=DEFAULT_OUTPUT,
        metavar="PATH",
        help="write PATH.json and PATH.md (default libattnres-certificate)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random values (default 0)")


@dataclass(frozen=True)
class Part:
    """One command of this program that is run as a part."""

    command: str
    options: tuple[str, ...]
    quick: tuple[str, ...]
    """Options with ``--quick``."""


PARTS = (
    Part("verify", ("--backend", "native"), ("--backend", "native", "--quick")),
    Part(
        "bench",
        ("--variants", "--sm-side", "--cpu", "--backend", "native", "triton", "--tokens", "1", "16", "128",
         "1024", "8192", "--blocks", "1", "4", "8"),
        ("--sm-side", "--cpu", "--backend", "native", "triton", "--tokens", "1", "128", "1024", "8192",
         "--blocks", "1", "8"),
    ),
    Part("walk", ("--tokens", "1", "16", "128", "8192"), ("--tokens", "1", "128", "--no-shares")),
    Part(
        "tune",
        ("--tokens", "1", "8", "16", "32", "64", "128", "256", "1024", "4096", "--blocks", "1", "4", "8"),
        ("--tokens", "1", "64", "1024", "--blocks", "8"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One race or determinism check."""

    what: str
    calls: int
    errors: tuple[str, ...]


class RaceChecks:
    """Calls whose bits must be equal however, whenever and beside whatever they run."""

    def __init__(self, device: torch.device, quick: bool, seed: int) -> None:
        self.device = device
        self.quick = quick
        self.seed = seed
        self.repeats = 8 if quick else 40

    def all(self) -> Iterator[Check]:
        """Every check, one after another."""
        plans = [("auto", None), *native_plans()]
        for num_blocks in (8,) if self.quick else (8, 7, 1):
            buffers = self.buffers(Shape(LONG_BATCH, num_blocks))
            for label, plan in plans:
                for pdl in ("early",) if self.quick else ("early", "wait", "off"):
                    yield self.repeated(buffers, label, plan, pdl)
        for variant in VARIANTS:
            yield self.repeated(self.buffers(Shape(LONG_BATCH, 8, variant)), "auto", None, "early")
        for num_tokens in (1, 16, 128, LONG_BATCH):
            yield self.in_a_graph(num_tokens)
            yield self.on_two_streams(num_tokens)
        yield self.alone_and_in_a_batch()

    def buffers(self, shape: Shape, count: int = 1) -> Buffers:
        """Arguments of a shape."""
        return Buffers(shape, count, self.device, self.seed)

    def call(
        self, buffers: Buffers, index: int = 0, plan: libattnres.Plan | None = None, pdl: str = "wait"
    ) -> None:
        """Run one call of the native backend."""
        libattnres.attn_res(
            *buffers.arguments(index), out=buffers.out[index], backend="native", plan=plan, pdl=pdl
        )

    @staticmethod
    def restore(buffers: Buffers, before: torch.Tensor) -> None:
        """Bring prefixes back and make outputs NaN."""
        buffers.prefix.copy_(before)
        buffers.out.fill_(float("nan"))

    def repeated(self, buffers: Buffers, label: str, plan: libattnres.Plan | None, pdl: str) -> Check:
        """The same call again and again: the same bits of output, prefix and bank."""
        what = f"{describe(buffers.shape)}, {label}, {pdl}: run again and again"
        before = buffers.prefix.clone()
        errors: list[str] = []
        first: list[torch.Tensor] = []
        calls = 0
        try:
            for _ in range(self.repeats):
                self.restore(buffers, before)
                if pdl == "early":
                    torch.cuda.synchronize(self.device)
                self.call(buffers, plan=plan, pdl=pdl)
                calls += 1
                results = [buffers.out, buffers.prefix]
                if buffers.shape.variant.writes:
                    results.append(buffers.blocks[:, :, buffers.shape.num_blocks])
                if not first:
                    first = [result.clone() for result in results]
                    if bool(first[0].isnan().any()):
                        errors.append("part of the output was not written")
                    continue
                for name, result, wanted in zip(("output", "prefix", "bank"), results, first, strict=False):
                    if not reference.same_bits(result, wanted):
                        errors.append(f"run {calls}: the {name} has other bits")
        except libattnres.UnsupportedError as error:
            what += f" (refused: {error})"
        finally:
            self.restore(buffers, before)
        return Check(what, calls, tuple(dict.fromkeys(errors)))

    def in_a_graph(self, num_tokens: int) -> Check:
        """Back to back in a CUDA graph, with the edges of programmatic launch, as one by one."""
        count = 16 if num_tokens < LONG_BATCH else 4
        buffers = self.buffers(Shape(num_tokens, 8), count)
        before = buffers.prefix.clone()
        errors = []
        for pdl in ("early", "wait"):
            self.restore(buffers, before)
            for index in range(count):
                torch.cuda.synchronize(self.device)
                self.call(buffers, index, pdl=pdl)
            alone = (buffers.out.clone(), buffers.prefix.clone())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for index in range(count):
                    self.call(buffers, index, pdl=pdl)
            self.restore(buffers, before)
            torch.cuda.synchronize(self.device)
            graph.replay()
            torch.cuda.synchronize(self.device)
            if not all(map(reference.same_bits, (buffers.out, buffers.prefix), alone)):
                errors.append(f"{pdl}: a replay gave other bits")
        return Check(f"{num_tokens} tokens, 8 blocks: {count} calls in one graph", 4 * count, tuple(errors))

    def on_two_streams(self, num_tokens: int) -> Check:
        """Two chains of calls at the same time as one after the other."""
        buffers = self.buffers(Shape(num_tokens, 8), 8)
        before = buffers.prefix.clone()
        self.restore(buffers, before)
        for index in range(8):
            self.call(buffers, index)
        alone = (buffers.out.clone(), buffers.prefix.clone())
        self.restore(buffers, before)
        torch.cuda.synchronize(self.device)
        streams = [
            torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        for index in range(8):
            with torch.cuda.stream(streams[index % 2]):
                self.call(buffers, index)
        torch.cuda.synchronize(self.device)
        same = all(map(reference.same_bits, (buffers.out, buffers.prefix), alone))
        errors = () if same else ("side by side they gave other bits",)
        return Check(f"{num_tokens} tokens, 8 blocks: two streams side by side", 16, errors)

    def alone_and_in_a_batch(self) -> Check:
        """A batch-invariant token alone and among thousands."""
        buffers = self.buffers(Shape(LONG_BATCH, 8))
        before = buffers.prefix.clone()
        options: dict[str, Any] = {"backend": "native", "batch_invariant": True}
        libattnres.attn_res(*buffers.arguments(0), out=buffers.out[0], **options)
        whole = buffers.out[0].clone()
        self.restore(buffers, before)
        prefix, delta, blocks, *rest = buffers.arguments(0)
        errors = []
        tokens = (0, 1, 131, 132, 4095, LONG_BATCH - 1)
        for token in tokens:
            own = slice(token, token + 1)
            output = libattnres.attn_res(prefix[own].clone(), delta[own], blocks[own], *rest, **options)
            if not reference.same_bits(output, whole[own]):
                errors.append(f"token {token} has other bits alone")
        return Check("batch-invariant tokens, alone and in a batch", 1 + len(tokens), tuple(errors))


def describe(shape: Shape) -> str:
    """A shape in words."""
    variant = "" if shape.variant is COMMON else f", {shape.variant.name}"
    return f"{shape.num_tokens} tokens, {shape.num_blocks} blocks{variant}"


def race_checks(device: torch.device, quick: bool, seed: int, console: Console) -> dict[str, Any]:
    """Run all checks; a CUDA error ends them and is one of the failures."""
    checks: list[Check] = []
    failures = []
    try:
        for check in RaceChecks(device, quick, seed).all():
            checks.append(check)
            failures += [f"{check.what}: {error}" for error in check.errors]
    except RuntimeError as error:
        failures.append(f"after {len(checks)} checks: {type(error).__name__}: {error}")
    calls = sum(check.calls for check in checks)
    if calls == 0:
        failures.append("no call was served")
    console.line(f"{len(checks)} race checks of {calls} calls, {len(failures)} failures")
    return {
        "passed": not failures,
        "failures": failures,
        "calls": calls,
        "checks": [asdict(check) for check in checks],
    }


def run_part(part: Part, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run another command as its own command line would; what it raises is its failure."""
    module = import_module(f"libattnres.cli.{part.command}")
    parser = argparse.ArgumentParser(prog=f"libattnres {part.command}")
    module.add_arguments(parser)
    options = list(part.quick if args.quick else part.options)
    known = {action.dest for action in parser._actions}
    if "seed" in known:
        options += ["--seed", str(args.seed)]
    if "device" in known:
        options += ["--device", str(args.device)]
    console.line(f"\n=== libattnres {part.command} {' '.join(options)}")
    parsed = parser.parse_args(options)
    try:
        with tempfile.TemporaryDirectory() as folder:
            if part.command == "tune":  # the report holds the plan
                parsed.output = Path(folder) / "plan.txt"
            status, results = module.run(parsed, console)
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        status, results = 1, {"failures": [f"{type(error).__name__}: {error}"]}
    return {**results, "command_line": " ".join((part.command, *options)), "passed": status == 0}


def supported_device(name: str | None) -> torch.device:
    """The GPU to certify; an error that says why where there is none."""
    probe = libattnres.probe()
    if not probe.devices or not torch.cuda.is_available():
        raise libattnres.UnsupportedError(
            f"device: expected a GPU of compute capability {supported_capabilities()}, got none: "
            f"{probe.backends['native']}"
        )
    device = chosen_device(name or "cuda")
    if device.type != "cuda":
        raise ValueError(f"--device: expected cuda or cuda:N, got {name}")
    status = next((entry for entry in probe.devices if entry.index == device.index), None)
    if status is None or not status.native:
        what = "one that is visible" if status is None else "one with native kernels"
        got = device if status is None else f"{status.name}: {status.reason}"
        raise libattnres.UnsupportedError(f"--device: expected {what}, got {got}")
    return device


def supported_capabilities() -> str:
    """Those of the targets that are built in; where there are none, of those that can be."""
    targets = libattnres.probe().built_targets or ("90a", "100a", "103a")
    numbers = [target.rstrip("a") for target in targets]
    return ", ".join(f"{number[:-1]}.{number[-1]}" for number in numbers)


def run(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Run every part, write both files; status 1 when anything was wrong."""
    refuse_debug_build()
    started = time.monotonic()
    args.device = supported_device(args.device)
    parts: dict[str, dict[str, Any]] = {}
    with torch.cuda.device(args.device):
        libattnres.warmup()
        runs: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            (part.command, lambda part=part: run_part(part, args, console))  # type: ignore[misc]
            for part in PARTS
        ]
        runs.insert(1, ("races", lambda: race_checks(args.device, args.quick, args.seed, console)))
        for name, run_it in runs:
            part_started = time.monotonic()
            parts[name] = run_it()
            parts[name]["seconds"] = round(time.monotonic() - part_started, 1)
    results = {
        "quick": args.quick,
        "passed": all(part["passed"] for part in parts.values()),
        "seconds": round(time.monotonic() - started, 1),
        "device": str(args.device),
        "gpu": metadata.gpu_state(args.device),
        "environment": metadata.environment(),
        "parts": parts,
    }
    document = {"command": "certify", "metadata": metadata.collect(), **results}
    json_path, text_path = with_suffix(args.output, ".json"), with_suffix(args.output, ".md")
    metadata.write_json(json_path, "certify", results)
    text_path.write_text(markdown(document), encoding="utf-8")
    console.table("certificate", SUMMARY_COLUMNS, summary(document))
    console.line(f"{'PASSED' if results['passed'] else 'FAILED'} in {results['seconds']:.0f} s")
    console.line(f"wrote {json_path} and {text_path}")
    return int(not results["passed"]), results


def with_suffix(path: Path, suffix: str) -> Path:
    """``PATH.json`` also where the name has a dot in it."""
    return path.with_name(path.name + suffix)


# --- the report ----------------------------------------------------------------------------------------

SUMMARY_COLUMNS = ("part", "verdict", "seconds", "what was done")


def summary(document: dict[str, Any]) -> list[tuple[object, ...]]:
    """One row per part."""
    parts = document["parts"]
    done = {
        "verify": lambda part: (
            f"{sum(row['checks'] for row in part.get('results', ()))} calls against float64"
        ),
        "races": lambda part: f"{part['calls']} calls in {len(part['checks'])} checks of equal bits",
        "bench": lambda part: f"{len(part.get('rows', ()))} measurements",
        "walk": lambda part: f"{len(part.get('rows', ()))} steps of 187 calls",
        "tune": lambda part: f"{len(part.get('results', ()))} calls, {changed(part)} with another kernel",
    }
    return [
        (name, "passed" if part["passed"] else "FAILED", part["seconds"], done[name](part))
        for name, part in parts.items()
    ]


def changed(tune: dict[str, Any]) -> int:
    """How many calls a tuned plan gives another kernel."""
    return sum(entry["present"] != entry["tuned"] for entry in tune.get("results", ()))


def markdown(document: dict[str, Any]) -> str:
    """The report as Markdown; a function of the JSON alone."""
    parts, known = document["parts"], document["metadata"]
    bench = {"rows": [], **document, **parts["bench"], "command": "bench", "metadata": known}
    walk = {**parts["walk"], "command": "walk"}
    blocks: list[str] = [
        "# libattnres certificate",
        f"**{'PASSED' if document['passed'] else 'FAILED'}**{' (--quick)' if document['quick'] else ''} in "
        f"{document['seconds']:.0f} s on " + tables.machine({**bench, "gpu": document["gpu"]}),
        tables.markdown(SUMMARY_COLUMNS, summary(document)),
    ]
    failures = [
        f"- {name}: {failure}" for name, part in parts.items() for failure in part.get("failures", ())
    ]
    if failures:
        blocks += ["## What is wrong", "\n".join(failures[:100])]
    blocks += [
        "## Where it ran",
        tables.markdown(("what", "value"), machine_rows(document)),
        "## Right",
        "Every compiled kernel forced in turn, against float64; errors as parts of their bounds.",
        tables.markdown(
            ("plan", "calls", "relative L2", "worst element", "wrong"),
            [
                (row["plan"], row["checks"], row["worst_rel_l2"], row["worst_element"], row["failures"])
                for row in parts["verify"].get("results", ())
            ],
        ),
        "## Fast",
        "Microseconds of a call, CUDA graph, cold L2. The floor kernel moves the same bytes and computes "
        "nothing that needs another thread.",
        tables.latency(bench),
    ]
    for title, text in (
        ("The other calls; the time should follow the bytes.", tables.variants(bench)),
        ("Microseconds per token and SM, bank rows in L2: the SM's own side.", tables.sm_side(bench)),
        ("Microseconds of the CPU per call.", tables.cpu(bench)),
        ("One step of the model, 187 calls with producer kernels between.", tables.walk(walk)),
        ("Where the time of a step goes.", tables.walk_shares(walk)),
    ):
        if text:
            blocks += [title, text]
    blocks += ["## Would another plan be faster?", tuned_text(parts["tune"])]
    commands = [part["command_line"] for part in parts.values() if "command_line" in part]
    lines = [
        "libattnres certify" + (" --quick" if document["quick"] else ""),
        *(f"libattnres {c}" for c in commands),
    ]
    blocks += ["## To repeat it", "The whole, and its parts:", "```\n" + "\n".join(lines) + "\n```"]
    return "\n\n".join(block for block in blocks if block) + "\n"


def machine_rows(document: dict[str, Any]) -> list[tuple[object, ...]]:
    """What the results depend on."""
    known, gpu = document["metadata"], document["gpu"]
    index = int(document["device"].partition(":")[2] or 0)
    device = known["devices"][index] if index < len(known["devices"]) else {}
    rows: Sequence[tuple[str, object]] = (
        ("GPU", gpu.get("name")),
        ("compute capability", device.get("compute_capability")),
        ("compiled object", device.get("target")),
        ("SMs", gpu.get("num_sms")),
        ("memory, bytes", gpu.get("memory_bytes")),
        ("L2, bytes", gpu.get("l2_bytes")),
        ("SM clock now / at most, MHz", f"{gpu.get('sm_clock_mhz')} / {gpu.get('max_sm_clock_mhz')}"),
        ("memory clock, MHz", gpu.get("memory_clock_mhz")),
        ("power limit, W", gpu.get("power_limit_w")),
        ("temperature, C", gpu.get("temperature_c")),
        ("other processes on it", gpu.get("other_processes")),
        ("driver", f"{known.get('driver')} (CUDA {known.get('driver_cuda')})"),
        ("CUDA runtime", known.get("runtime_cuda")),
        ("built for", " ".join(known.get("built_targets", ()))),
        ("plain copy, GB/s", document["parts"]["bench"].get("copy_gb_per_s")),
        ("CPU", known.get("cpu")),
        ("variables", ", ".join(f"{k}={v}" for k, v in document["environment"].items()) or "none"),
    )
    return [(name, str(value)) for name, value in rows if value is not None]


def tuned_text(tune: dict[str, Any]) -> str:
    """Where a plan made on this GPU differs from the one in force."""
    if not tune.get("results"):
        return "Not tuned."
    rows = [
        (entry["reads"], entry["num_blocks"], entry["tokens"], entry["present"], entry["present_us"],
         entry["tuned"], entry["tuned_us"], f"{entry['gain']:+.1%}")
        for entry in tune["results"]
        if entry["present"] != entry["tuned"]
    ]  # fmt: skip
    text = f"{len(rows)} of {len(tune['results'])} measured calls would take another kernel than they do."
    table = tables.markdown(("reads", "blocks", "tokens", "in force", "us", "tuned", "us", "gain"), rows)
    return f"{text}\n\n{table}\n\nThe plan file:\n\n```\n{tune['plan_file'].rstrip()}\n```"
