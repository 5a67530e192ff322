# SPDX-License-Identifier: Apache-2.0
"""What the compiled kernels promise, read from their machine code; no GPU is needed.

Each rule is a function that looks at one kernel for one target and says what breaks it. What is counted and
what is demanded stand in one record, so that a table of counts and the verdict come from the same reading.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from libattnres.audit import sass
from libattnres.audit.kernel_flow import Discipline, Flow, Parameter, Scenario, follow
from libattnres.audit.sass import Edge, Function, Instruction, Loop

__all__ = [
    "DETAIL_COLUMNS",
    "PARAMETERS",
    "SUMMARY_COLUMNS",
    "Audit",
    "Kernel",
    "audit_binary",
    "audit_cubin",
    "audit_function",
    "compare_targets",
    "details",
    "identify",
    "summary",
]

FORWARD_SIZES = {
    "prefix": 8,
    "delta": 8,
    "blocks": 8,
    "norm_weight": 8,
    "qk_weight": 8,
    "output_norm_weight": 8,
    "output": 8,
    "num_tokens": 8,
    "prefix_stride": 8,
    "delta_stride": 8,
    "blocks_token_stride": 8,
    "blocks_row_stride": 8,
    "output_stride": 8,
    "eps": 4,
    "output_norm_eps": 4,
    "block_write_idx": 4,
    "early": 4,
    "ring_rows": 4,
}
PARAMETER_SIZES = {
    "ForwardParams": FORWARD_SIZES,
    "MergeParams": FORWARD_SIZES | {"bank": 8, "lse": 8, "bank_stride": 8},
    "BankParams": {
        "blocks": 8,
        "norm_weights": 8,
        "qk_weights": 8,
        "bank": 8,
        "lse": 8,
        "blocks_token_stride": 8,
        "blocks_row_stride": 8,
        "norm_weights_stride": 8,
        "qk_weights_stride": 8,
        "bank_site_stride": 8,
        "bank_token_stride": 8,
        "lse_stride": 8,
        "eps": 4,
        "num_tokens": 4,
        "num_blocks": 4,
        "num_sites": 4,
        "parts": 4,
        "sites_per_part": 4,
        "entries_per_group": 4,
    },
}
"""The structs of ``instances.hpp`` and ``two_phase.hpp``, in order; fields are aligned to their size."""
POINTERS = frozenset(
    {"prefix", "delta", "blocks", "norm_weight", "qk_weight", "output_norm_weight", "output",
     "norm_weights", "qk_weights", "bank", "lse"}
)  # fmt: skip


def parameters(sizes: Mapping[str, int]) -> dict[str, Parameter]:
    """Each parameter by its name."""
    found = {}
    offset = 0
    for name, size in sizes.items():
        offset = (offset + size - 1) // size * size
        found[name] = Parameter(offset, size, name in POINTERS)
        offset += size
    return found


PARAMETERS = {struct: parameters(sizes) for struct, sizes in PARAMETER_SIZES.items()}

REGISTERS_PER_SM = 65536
THREADS_PER_SM = 2048
BLOCKS_PER_SM = 32
SHARED_MEMORY_PER_SM = 233472  # of 9.0, 10.0 and 10.3


@dataclass(frozen=True)
class Kind:
    """What the permutations of one kernel have in common."""

    symbol: str
    """Its name in the source, without ``_kernel``."""
    arguments: tuple[str, ...]
    """Template arguments in the order of the declaration."""
    parameters: str
    """The struct of its parameters."""
    discipline: Discipline


FORWARD = Discipline(frozenset({"prefix", "delta", "blocks"}), frozenset({"blocks"}))
MERGE = Discipline(frozenset({"prefix", "delta", "blocks", "bank", "lse"}), frozenset({"bank", "lse"}))
BANK = Discipline(frozenset({"blocks"}))
FLAGS = ("has_output_norm", "static_common_path")
KINDS = {
    "ring": Kind(
        "forward_ring",
        ("hidden_size", "num_sources", "rows_per_stage", "prefixes", *FLAGS),
        "ForwardParams",
        FORWARD,
    ),
    "cluster": Kind(
        "forward_cluster",
        ("hidden_size", "num_sources", "cluster_size", *FLAGS),
        "ForwardParams",
        FORWARD,
    ),
    "floor": Kind("floor", ("hidden_size", "num_sources"), "ForwardParams", FORWARD),
    "merge_ring": Kind(
        "merge_ring", ("hidden_size", "prefixes", "float32_bank", *FLAGS), "MergeParams", MERGE
    ),
    "merge_cluster": Kind(
        "merge_cluster", ("hidden_size", "cluster_size", "float32_bank", *FLAGS), "MergeParams", MERGE
    ),
    "bank": Kind("bank", ("hidden_size", "float32_bank"), "BankParams", BANK),
    "bank_floor": Kind("bank_floor", ("hidden_size", "float32_bank"), "BankParams", BANK),
}
NAME_OF = {kind.symbol: name for name, kind in KINDS.items()}


@dataclass(frozen=True, order=True)
class Kernel:
    """A permutation: the kernel's name and its template arguments in the order of its declaration."""

    name: str
    arguments: tuple[int, ...]

    @property
    def kind(self) -> Kind:
        """What it has in common with its other permutations."""
        return KINDS[self.name]

    def argument(self, name: str, default: int = 0) -> int:
        """A template argument by its name; the default where the kernel has none of that name."""
        return dict(zip(self.kind.arguments, self.arguments, strict=True)).get(name, default)

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.argument("hidden_size")

    @property
    def is_merge(self) -> bool:
        """Whether the bank's share comes from the bank kernel."""
        return self.name.startswith("merge")

    @property
    def is_ring(self) -> bool:
        """Whether rows are streamed through a ring, by blocks that stay."""
        return self.name in ("ring", "merge_ring")

    @property
    def is_floor(self) -> bool:
        """Whether it computes nothing of use."""
        return self.name in ("floor", "bank_floor")

    @property
    def num_sources(self) -> int:
        """N: bank rows and the prefix; a merge has one row for all those of the bank."""
        return self.argument("num_sources", 2)

    @property
    def prefixes(self) -> int:
        """B."""
        return self.argument("prefixes", 1)

    @property
    def cluster_size(self) -> int:
        """Thread blocks of a cluster of the cluster kernels; 0 for the others."""
        return self.argument("cluster_size")

    @property
    def float32_bank(self) -> bool:
        """Whether what the bank kernel leaves is float32."""
        return bool(self.argument("float32_bank"))

    @property
    def has_output_norm(self) -> bool:
        """Whether the output is normalised."""
        return bool(self.argument("has_output_norm"))

    @property
    def static_common_path(self) -> bool:
        """Whether delta, output norm and no write are fixed at compile time."""
        return bool(self.argument("static_common_path"))

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Each parameter by its name."""
        return PARAMETERS[self.kind.parameters]

    def __str__(self) -> str:
        words = [self.name]
        for name, label in (
            ("num_sources", "N"), ("rows_per_stage", "NC"), ("prefixes", "B"), ("cluster_size", "C")
        ):  # fmt: skip
            if name in self.kind.arguments:
                words.append(f"{label}={self.argument(name)}")
        if "float32_bank" in self.kind.arguments:
            words.append("float32" if self.float32_bank else "bfloat16")
        if "has_output_norm" in self.kind.arguments:
            words.append(
                "static" if self.static_common_path else "norm" if self.has_output_norm else "no norm"
            )
        return " ".join(words)


SYMBOL = re.compile(rf"\d({'|'.join(NAME_OF)})_kernelI((?:L[ib]\d+E)+)E")


def identify(symbol: str) -> Kernel | None:
    """The permutation that a mangled name stands for; None for any other function."""
    match = SYMBOL.search(symbol)
    if match is None:
        return None
    return Kernel(NAME_OF[match[1]], tuple(int(value) for value in re.findall(r"L[ib](\d+)E", match[2])))


@dataclass
class Audit:
    """What one kernel is for one target, and what is wrong with it."""

    kernel: Kernel
    target: str
    block_size: int
    registers: int
    stack: int
    local: int
    shared: int
    spills: int
    """Loads and stores of local memory."""
    resident_blocks: int
    """Thread blocks per SM that registers, threads and fixed shared memory allow."""
    counts: dict[str, int] = field(default_factory=dict)
    """Of instructions in the code, by what they do."""
    phases: dict[str, int] = field(default_factory=dict)
    """Instructions that a warp issues for one bank entry, by phase."""
    classes: dict[str, int] = field(default_factory=dict)
    """The same for all consumer phases, by what the instructions do."""
    warp_instructions_per_token: float = 0.0
    """Issued by all warps of a block (ring) or of a cluster, per token."""
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "kernel": self.kernel.name, "arguments": list(self.kernel.arguments)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Audit:
        """From JSON."""
        fields = {name: value for name, value in document.items() if name not in ("kernel", "arguments")}
        return cls(Kernel(document["kernel"], tuple(document["arguments"])), **fields)


def count_instructions(function: Function) -> dict[str, int]:
    """How often what matters occurs in the code."""
    counts: Counter[str] = Counter(
        dict.fromkeys(
            ("bulk copies", "mbarrier inits", "mbarrier arrivals", "mbarrier waits", "grid waits",
             "grid triggers", "block barriers", "remote stores", "packed FMAs", "scalar FMAs",
             "matrix products"), 0
        )
    )  # fmt: skip
    for instruction in function.instructions:
        opcode, modifiers = instruction.opcode, instruction.modifiers
        if opcode == "SYNCS":
            kind = {"EXCH": "inits", "ARRIVE": "arrivals", "PHASECHK": "waits", "CCTL": "inits"}
            counts[f"mbarrier {kind.get(modifiers[0], 'others')}"] += 1
        elif opcode in ("LDG", "STG"):
            counts[f"global {'loads' if opcode == 'LDG' else 'stores'} of {instruction.bits // 8} B"] += 1
        elif opcode in NAMES:
            counts[NAMES[opcode]] += 1
    return dict(sorted(counts.items()))


NAMES = {
    "UBLKCP": "bulk copies",
    "ACQBULK": "grid waits",
    "PREEXIT": "grid triggers",
    "BAR": "block barriers",
    "STAS": "remote stores",
    "FFMA2": "packed FMAs",
    "FMUL2": "packed FMAs",
    "FFMA": "scalar FMAs",
    "FMUL": "scalar FMAs",
    "HMMA": "matrix products",
}


def resident_blocks(usage: sass.Usage, block_size: int) -> int:
    """Thread blocks that an SM can hold, dynamic shared memory left out."""
    warps = (block_size + 31) // 32
    per_warp = (usage.registers * 32 + 255) // 256 * 256
    return min(
        REGISTERS_PER_SM // (warps * per_warp),
        THREADS_PER_SM // block_size,
        BLOCKS_PER_SM,
        SHARED_MEMORY_PER_SM // max(usage.shared, 1),
    )


# --- issued instructions -----------------------------------------------------------------------------


def path_costs(function: Function) -> list[tuple[int, ...]]:
    """Costs by which the usual way through a kernel is the cheapest.

    Every row is stored; then no exchange is made that can be left out, which only a cancelling output norm
    needs; then what lanes publish for others is published; then as few instructions as possible, which leaves
    out the retries of waits and the rescaling of the softmax.
    """
    costs: list[tuple[int, ...]] = []
    for block in function.blocks:
        stores = sum(instruction.opcode in ("STG", "UBLKCP") for instruction in block)
        waits = sum(instruction.is_wait for instruction in block)
        published = sum(
            instruction.opcode in ("STS", "STAS")
            or (instruction.opcode == "SYNCS" and "ARRIVE" in instruction.modifiers)
            for instruction in block
        )
        costs.append((-stores, waits, -published, len(block)))
    return costs


CLASSES = {
    "arithmetic": "FFMA FFMA2 FMUL FMUL2 FADD FADD2 HADD2 HFMA2 HMMA MUFU FMNX FMNMX FMNMX3 FSETP FSEL",
    "conversion": "PRMT F2FP F2F",
    "shared memory": "LDS LDSM STS STAS",
    "global memory": "LDG STG UBLKCP",
    "exchange": "SHFL SYNCS BAR WARPSYNC UCGABAR_ARV UCGABAR_WAIT MEMBAR FENCE VOTE VOTEU ELECT",
}
CLASS_OF = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes.split()}


def class_of(instruction: Instruction) -> str:
    """What an instruction is for."""
    if instruction.unpacks:
        return "conversion"
    return CLASS_OF.get(instruction.opcode, "addresses and control")


def entry_loop(function: Function) -> Loop | None:
    """The loop over bank entries of the threads that compute and store."""
    loops = [
        loop
        for loop in function.loops
        if function.contains(loop, lambda instruction: instruction.opcode == "STG")
    ]
    return max(loops, key=lambda loop: len(loop.blocks), default=None)


def copies(instruction: Instruction) -> bool:
    """Whether it starts a bulk copy."""
    return instruction.opcode == "UBLKCP"


def producer_loop(function: Function) -> Loop | None:
    """The loop over bank entries of the thread that starts the bulk copies."""
    loops = [loop for loop in function.loops if function.contains(loop, copies)]
    return max(loops, key=lambda loop: len(loop.blocks), default=None)


def around(
    function: Function, loop: Loop, edges: set[Edge], costs: Sequence[tuple[int, ...]] | None = None
) -> list[Instruction]:
    """One round of a loop."""
    blocks = function.path(
        loop.header,
        lambda block, successor: successor == loop.header,
        {edge for edge in edges if edge[0] in loop.blocks and edge[1] in loop.blocks},
        costs or path_costs(function),
    )
    return [instruction for block in blocks for instruction in function.blocks[block]]


def producer_instructions(function: Function, kernel: Kernel, flow: Flow) -> int:
    """What the producer issues for one entry, with its loops over rows gone round as often as they run."""
    loop = producer_loop(function)
    if loop is None:
        return 0
    total = len(around(function, loop, flow.edges))
    for inner in function.inner_loops(loop):
        if not function.contains(inner, copies) or not function.contains(inner, lambda i: i.is_wait):
            continue  # a retry, or the lanes of one copy
        sources = [
            flow.loads.get(instruction.address, frozenset())
            for block in inner.blocks
            for instruction in function.blocks[block]
            if copies(instruction)
        ]
        bank = any("blocks" in source for source in sources)
        rounds = kernel.num_sources - 1 if bank else kernel.prefixes
        copies_a_round = len(sources) if bank else 1
        once = len(around(function, inner, flow.edges))
        total += once * (rounds // max(copies_a_round, 1) - 1)
    return total


def split_at_waits(path: Iterable[Instruction], splits: Callable[[Instruction], bool]) -> list[int]:
    """Numbers of instructions between exchanges; the one that waits belongs to what is before it."""
    parts = [0]
    for instruction in path:
        parts[-1] += 1
        if splits(instruction):
            parts.append(0)
    return parts


def count_issued(function: Function, audit: Audit, flow: Flow) -> list[Instruction]:
    """Fill in phases, classes and the instructions per token; returns what a warp issues for an entry."""
    kernel = audit.kernel
    costs = path_costs(function)
    warps = audit.block_size // 32
    if kernel.is_ring:
        loop = entry_loop(function)
        if loop is None:
            audit.problems.append("no loop over bank entries was found")
            return []
        start = function.path(0, lambda block, way: way == loop.header, flow.edges, costs)
        path = around(function, loop, flow.edges)
        parts = split_at_waits(path, lambda instruction: instruction.opcode == "BAR")
        audit.phases["prologue"] = sum(len(function.blocks[block]) for block in start)
        audit.phases["producer"] = producer_instructions(function, kernel, flow)
        names = [f"exchange {index + 1}" for index in range(len(parts) - 1)]
        audit.phases |= dict(zip([*names, "after the last"], parts, strict=True))
        # One warp is the producer's, the others all do the same.
        issued = len(path) * (warps - 1) + audit.phases["producer"]
    else:
        blocks = function.path(
            0, lambda block, way: way is None or not function.successors[block], flow.edges, costs
        )
        path = [instruction for block in blocks for instruction in function.blocks[block]]
        parts = split_at_waits(
            path, lambda instruction: instruction.opcode == "SYNCS" and instruction.is_wait
        )
        names = ["loads and bank sums", "mixing and prefix sums", "output"]
        audit.phases |= dict(zip(names[-len(parts) :], parts, strict=False))
        issued = len(path) * warps * kernel.cluster_size
    audit.classes = classes_of(path)
    audit.warp_instructions_per_token = issued / kernel.prefixes
    return path


def classes_of(path: Iterable[Instruction]) -> dict[str, int]:
    """Numbers of instructions by what they do."""
    return dict(sorted(Counter(class_of(instruction) for instruction in path).items()))


# --- the bank kernel ---------------------------------------------------------------------------------

BANK_CLUSTER_SIZE = 8
BANK_SITES_PER_PART = 24
BANK_ENTRIES_PER_GROUP = 2
"""As in ``cuda/two_phase.hpp``."""
BANK_ROWS = 8
BANK_BLOCK_SIZE = 640


@dataclass(frozen=True)
class Role:
    """What some of the bank kernel's warps do, and which instructions tell them from the others."""

    name: str
    warps: int
    """That do it; of a warp group the rest has nothing to do."""
    threads: int
    """Of the warp groups that it has for itself: they have its number of registers each."""
    marks: tuple[str, ...]
    """What their loop over groups holds, and that of no other role."""


BANK_ROLES = (
    Role("score", 8, 256, ("LDSM",)),
    Role("softmax", 2, 128, ("STAS", "STG")),
    Role("mix", 8, 256, ("HMMA", "STG")),
    Role("producer", 1, 128, ("UBLKCP", "SYNCS")),
)


def count_of(instructions: Iterable[Instruction], *opcodes: str) -> int:
    """How many have one of these opcodes."""
    return sum(instruction.opcode in opcodes for instruction in instructions)


def loop_with(loops: Iterable[Loop], function: Function, *opcodes: str) -> Loop | None:
    """The largest of some loops that has all of these opcodes."""
    found = [
        loop
        for loop in loops
        if all(function.contains(loop, lambda one, opcode=opcode: one.opcode == opcode) for opcode in opcodes)  # type: ignore[misc]
    ]
    return max(found, key=lambda loop: len(loop.blocks), default=None)


def count_bank(function: Function, audit: Audit, flow: Flow) -> None:
    """Fill in what each role's warps issue for a group of entries, and their tensor-core instructions."""
    paths = {}
    for role in BANK_ROLES:
        loop = loop_with(function.loops, function, *role.marks)
        if loop is None:
            audit.problems.append(f"no loop over groups of entries was found that can {role.name}")
            return
        # What is sent to peers is counted by how often it is, not by how often it is unrolled.
        costs = [cost[1:2] + cost[3:] for cost in path_costs(function)] if role.name == "score" else None
        paths[role.name] = around(function, loop, flow.edges, costs)
        audit.phases[role.name] = len(paths[role.name])
        inner = function.inner_loops(loop)
        if role.name == "score":
            audit.phases["score"] += further_sends(function, inner, paths["score"])
        elif role.name == "mix":
            audit.phases["mix"] += further_chunks(function, inner, paths["mix"], audit, flow)
        elif role.name == "producer":
            audit.phases["producer"] += further_copies(function, inner, flow)
    audit.counts["products to score, a warp and group"] = count_of(paths["score"], "HMMA")
    issued = sum(role.warps * audit.phases[role.name] for role in BANK_ROLES)
    audit.classes = classes_of(instruction for path in paths.values() for instruction in path)
    audit.warp_instructions_per_token = issued * BANK_CLUSTER_SIZE / BANK_ENTRIES_PER_GROUP


def further_sends(function: Function, inner: Iterable[Loop], path: Sequence[Instruction]) -> int:
    """Instructions of the sends of sums that a path of one round leaves out."""
    pairs = BANK_ENTRIES_PER_GROUP * BANK_SITES_PER_PART // BANK_CLUSTER_SIZE
    sends = -(-(pairs + 1) * BANK_ROWS // 32)
    loop = loop_with(inner, function, "STAS")
    if loop is None:
        return 0
    body = [instruction for block in loop.blocks for instruction in function.blocks[block]]
    return (sends - count_of(path, "STAS")) * len(body) // count_of(body, "STAS")


def further_chunks(
    function: Function, inner: Iterable[Loop], path: Sequence[Instruction], audit: Audit, flow: Flow
) -> int:
    """Instructions of the chunks of columns that a path of one round leaves out."""
    loop = loop_with(inner, function, "HMMA")
    if loop is None:
        audit.problems.append("no loop over chunks of columns was found")
        return 0
    body = around(function, loop, flow.edges)
    # A chunk of 32 columns is stored for 24 sites, by a warp.
    stores = BANK_SITES_PER_PART // 8 * (2 if audit.kernel.float32_bank else 1)
    chunks = BANK_ENTRIES_PER_GROUP * audit.kernel.hidden_size // BANK_CLUSTER_SIZE // 32 // 8
    a_round = count_of(body, "STG") // stores
    left = chunks - count_of(path, "STG") // stores
    if count_of(body, "STG") % stores or count_of(path, "STG") % stores or not a_round or left % a_round:
        audit.problems.append(f"{count_of(body, 'STG')} stores a round, expected {stores} a chunk of columns")
        return 0
    audit.counts["products to mix, a warp and chunk"] = count_of(body, "HMMA") // a_round
    return left // a_round * len(body)


def further_copies(function: Function, inner: Iterable[Loop], flow: Flow) -> int:
    """Instructions of the copies of rows that a path of one round leaves out."""
    total = 0
    for rounds in (BANK_ENTRIES_PER_GROUP - 1, BANK_ENTRIES_PER_GROUP * (BANK_ROWS - 1)):
        loop = loop_with(inner, function, "UBLKCP")
        if loop is None or len(loop.blocks) == 1:  # the lanes of one copy
            break
        total += rounds * len(around(function, loop, flow.edges))
        inner = function.inner_loops(loop)
    return total


# --- rules -------------------------------------------------------------------------------------------


def local_memory(function: Function, audit: Audit) -> Iterable[str]:
    """No kernel has a stack frame, spills or local arrays."""
    if audit.stack or audit.local or audit.spills:
        yield f"local memory: stack {audit.stack} B, local {audit.local} B, {audit.spills} accesses"


def wide_accesses(function: Function, flows: Sequence[Flow]) -> Iterable[str]:
    """Every access to global memory moves 16 bytes, but the 4 of lse, of which an entry has one number."""
    for instruction in function.of("LDG", "STG", "LD", "ST", "ATOMG", "RED", "REDG", "ATOM"):
        address = instruction.address
        plain = instruction.opcode in ("LDG", "STG")
        places = {name for flow in flows for at in (flow.loads, flow.stores) for name in at.get(address, ())}
        if not plain or instruction.bits not in ((32, 128) if "lse" in places else (128,)):
            mnemonic = ".".join((instruction.opcode, *instruction.modifiers))
            yield f"global access that is not of 16 bytes: {mnemonic} at {address:#x}"


def order(flows: Sequence[Flow], kernel: Kernel) -> Iterable[str]:
    """Waits come before dependent loads, and dependents are released after the last of them."""
    for flow in flows:
        for text, address in flow.problems.items():
            # Nothing depends on a floor kernel, whose every thread releases dependents for itself.
            if not (kernel.is_floor and "are released" in text):
                yield f"{text}, at {address:#x}"
    if not any(flow.waits for flow in flows):
        yield "there is no griddepcontrol.wait"
    if not flows[0].triggers:
        yield "dependents are never released before the end"


def output_norm(function: Function, audit: Audit) -> Iterable[str]:
    """Without an output norm nothing reads its weight or epsilon."""
    if audit.kernel.has_output_norm:
        return
    for name in ("output_norm_weight", "output_norm_eps"):
        if reads(function, audit.kernel, name):
            yield f"{name} is read without HAS_OUTPUT_NORM"


def common_path(function: Function, audit: Audit, flows: Sequence[Flow]) -> Iterable[str]:
    """The static common path decides nothing on delta or write index."""
    if not audit.kernel.static_common_path:
        return
    if reads(function, audit.kernel, "block_write_idx"):
        yield "the static common path reads block_write_idx"
    if any("delta" in flow.compared for flow in flows):
        yield "the static common path tests delta"


def reads(function: Function, kernel: Kernel, name: str) -> bool:
    """Whether any instruction reads a parameter from the constant bank."""
    first = function.parameter_base + kernel.parameters[name].offset
    last = first + kernel.parameters[name].size
    for instruction in function.instructions:
        width = instruction.bits // 8 if instruction.opcode in ("LDC", "LDCU", "ULDC") else 4
        for operand in instruction.operands:
            match = re.search(r"c\[0x0\]\[(0x[0-9a-f]+)\]", operand) if "c[" in operand else None
            if match and int(match[1], 16) < last and int(match[1], 16) + width > first:
                return True
    return False


def unrolled(function: Function, audit: Audit) -> Iterable[str]:
    """Rows are unrolled: within an entry nothing that computes is a loop."""
    loops = [loop for loop in function.loops if function.does_math(loop)]
    if audit.kernel.cluster_size:
        if loops:
            yield "the cluster kernel computes in a loop"
        return
    if len(loops) > 1:
        yield f"{len(loops)} loops compute, expected the one over bank entries"
    for loop in loops:
        if any(function.does_math(inner) for inner in function.inner_loops(loop)):
            yield "the loop over chunks is not unrolled"


def pairs_a_thread(audit: Audit) -> int:
    """Pairs of elements of a row that a thread computes on."""
    kernel = audit.kernel
    threads = audit.block_size - 32 if kernel.is_ring else audit.block_size * kernel.cluster_size
    return kernel.hidden_size // threads // 2


def needed_packed(audit: Audit) -> int:
    """Operations on pairs per entry: three for an element of a bank row, and what the prefix takes.

    Of a merge's bank row only its square is needed.
    """
    kernel = audit.kernel
    bank_rows = kernel.num_sources - 1
    if bank_rows == 0 and not kernel.has_output_norm:
        return 0
    prefix = 3 if not bank_rows else 5  # p.p, p.q; p.mixed; two of the output
    if not bank_rows and not kernel.has_output_norm:
        prefix = 0
    bank = 1 if kernel.is_merge else 3 * bank_rows
    pairs = bank + prefix * kernel.prefixes - (not bank_rows)
    return pairs_a_thread(audit) * pairs


def moves(audit: Audit, path: Sequence[Instruction]) -> Iterable[str]:
    """On the static common path an entry is loaded once, and an update and an output stored per prefix."""
    kernel = audit.kernel
    if not kernel.static_common_path:
        return  # their usual way may be one with a write or without a delta
    stores = 2 * pairs_a_thread(audit) // 4 * kernel.prefixes
    loads = 1 if kernel.is_merge else 0  # lse
    if kernel.cluster_size:
        loads += (2 if kernel.float32_bank else 1) if kernel.is_merge else kernel.num_sources - 1
        loads += 5 if kernel.num_sources > 1 else 3  # prefix, delta and weights, of which a query has two
    for opcode, what, needed in (("STG", "stores", stores), ("LDG", "loads", loads)):
        found = count_of(path, opcode)
        if found != needed:
            yield f"{found} {what} of an entry by a thread, expected {needed}"


def shape_of_bank(function: Function, audit: Audit) -> Iterable[str]:
    """The bank kernel's blocks and clusters are those that the host side launches."""
    if (function.block_size, function.cluster_size) != (BANK_BLOCK_SIZE, BANK_CLUSTER_SIZE):
        yield (
            f"{function.block_size} threads in clusters of {function.cluster_size}, "
            f"expected {BANK_BLOCK_SIZE} in clusters of {BANK_CLUSTER_SIZE}"
        )


def shared_registers(function: Function, audit: Audit) -> Iterable[str]:
    """What the bank kernel's warps take of registers is there, and enough for all that they do."""
    launched = (audit.registers + 7) // 8 * 8
    taken = changes = 0
    for instruction in function.of("USETMAXREG"):
        limit = int(instruction.operands[-1], 16)
        after = list(function.after(instruction))
        opcodes = {one.opcode for one in after}
        taken += limit * next((role.threads for role in BANK_ROLES if opcodes.issuperset(role.marks)), 0)
        changes += 1
        used = 1 + max(one.highest_register for one in after)
        if used > limit:
            yield f"{used} registers are used where warps have {limit}, after {instruction.address:#x}"
    if changes != 3:
        yield f"{changes} changes of the number of registers, expected 3"
    if taken > launched * audit.block_size:
        yield f"{taken} registers are taken, {launched * audit.block_size} launched"


def tensor_cores(audit: Audit) -> Iterable[str]:
    """Scores and weighted sums are products of tensor cores, and no more of them than it takes.

    For 16 of its columns a score warp has a tile of 16 rows, and queries in two parts for three tiles of
    eight sites. To mix eight columns takes two tiles of sites, with two parts of the weights, then the last.
    """
    columns = audit.kernel.hidden_size // BANK_CLUSTER_SIZE
    for what, needed in (
        ("products to score, a warp and group", columns // 8 // 16 * 2 * (BANK_SITES_PER_PART // 8)),
        ("products to mix, a warp and chunk", 32 // 8 * 4),
    ):
        found = audit.counts.get(what, 0)
        if found != needed:
            yield f"{found} {what}, expected {needed}"


def packed(function: Function, audit: Audit) -> Iterable[str]:
    """On 10.0 and later what is done to elements is done to pairs of them."""
    if audit.target == "90a":
        return
    found, needed = audit.counts["packed FMAs"], needed_packed(audit)
    if found < needed:
        yield f"{found} packed multiplications or FMAs, expected at least {needed}"
    # Scores, softmax and output norm are scalar: a few dozen each row, whatever the row's length.
    kernel = audit.kernel
    bound = 40 + 6 * kernel.num_sources + 60 * kernel.prefixes
    if audit.counts["scalar FMAs"] > bound:
        yield f"{audit.counts['scalar FMAs']} scalar multiplications or FMAs, expected at most {bound}"


def scenarios_of(kernel: Kernel) -> list[Scenario]:
    """Launches to follow a kernel under: with reads after the wait, and with early reads and a write."""
    known = [{"early": 0, "block_write_idx": -1}]
    if kernel.kind.discipline.early and not kernel.is_floor:
        known.append({"early": 1, "block_write_idx": -1 if kernel.static_common_path else 0})
    return [
        Scenario({name: value for name, value in one.items() if name == "early" or name in kernel.parameters})
        for one in known
    ]


def audit_function(function: Function, kernel: Kernel, target: str, usage: sass.Usage) -> Audit:
    """Judge one kernel."""
    audit = Audit(
        kernel,
        target,
        function.block_size,
        usage.registers,
        usage.stack,
        usage.local,
        usage.shared,
        function.count("LDL", "STL"),
        resident_blocks(usage, function.block_size),
        count_instructions(function),
    )
    flows = follow(
        function, kernel.parameters, function.parameter_base, scenarios_of(kernel), kernel.kind.discipline
    )
    audit.problems += local_memory(function, audit)
    audit.problems += wide_accesses(function, flows)
    audit.problems += order(flows, kernel)
    if kernel.is_floor:
        return audit
    if kernel.name == "bank":
        audit.problems += shape_of_bank(function, audit)
        audit.problems += shared_registers(function, audit)
        count_bank(function, audit, flows[0])
        audit.problems += tensor_cores(audit)
        return audit
    audit.problems += output_norm(function, audit)
    audit.problems += common_path(function, audit, flows)
    audit.problems += unrolled(function, audit)
    audit.problems += packed(function, audit)
    audit.problems += moves(audit, count_issued(function, audit, flows[0]))
    return audit


def audit_cubin(cubin: Path) -> list[Audit]:
    """Judge every kernel of one image."""
    usages = sass.resource_usage(cubin)
    audits = []
    for symbol, function in sass.disassemble(cubin).items():
        kernel = identify(symbol)
        if kernel is not None:
            audits.append(audit_function(function, kernel, sass.target_of(cubin), usages[symbol]))
    return audits


def audit_binary(
    binary: Path, progress: Callable[[Iterable[list[Audit]], int, str], Iterable[list[Audit]]] | None = None
) -> list[Audit]:
    """Judge every kernel within a library or object file, on all processors."""
    audits = []
    with tempfile.TemporaryDirectory() as folder:
        cubins = sass.extract_cubins(binary, Path(folder))
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            results: Iterable[list[Audit]] = pool.map(audit_cubin, cubins)
            if progress is not None:
                results = progress(results, len(cubins), "images audited")
            for image in results:
                audits += image
    compare_targets(audits)
    return sorted(audits, key=lambda audit: (audit.kernel, audit.target))


MORE_THAN_HOPPER = {"bank": 1.1}
"""What a kernel may issue on another target, times what it does on Hopper, where that is more than once.

The bank kernel's products are the same everywhere, and few of its other instructions have packed forms.
"""


def compare_targets(audits: Sequence[Audit], base: str = "90a") -> None:
    """No target may issue more instructions per token than Hopper's code does, or what is said above."""
    issued: Mapping[Kernel, float] = {
        audit.kernel: audit.warp_instructions_per_token for audit in audits if audit.target == base
    }
    for audit in audits:
        on_base = issued.get(audit.kernel)
        if on_base is None:
            continue
        allowed = on_base * MORE_THAN_HOPPER.get(audit.kernel.name, 1.0)
        if audit.warp_instructions_per_token > allowed:
            audit.problems.append(
                f"{audit.warp_instructions_per_token:g} instructions per token, "
                f"expected at most {allowed:g}, {base} issuing {on_base:g}"
            )


# --- tables ------------------------------------------------------------------------------------------


def extent(values: Iterable[float]) -> str:
    """``"96-128"``, or one number."""
    ordered = sorted(values)
    if not ordered:
        return ""
    first, last = f"{ordered[0]:.0f}", f"{ordered[-1]:.0f}"
    return first if first == last else f"{first}-{last}"


SUMMARY_COLUMNS = (
    "kernel", "target", "kernels", "registers", "resident blocks", "local memory", "packed FMAs",
    "scalar FMAs", "issued per token", "vs 90a", "broken rules",
)  # fmt: skip


def summary(audits: Sequence[Audit]) -> list[tuple[object, ...]]:
    """One row per kernel and target, with the range over its permutations."""
    base = {audit.kernel: audit.warp_instructions_per_token for audit in audits if audit.target == "90a"}
    rows: list[tuple[object, ...]] = []
    for name in dict.fromkeys(audit.kernel.name for audit in audits):
        for target in dict.fromkeys(audit.target for audit in audits):
            mine = [audit for audit in audits if (audit.kernel.name, audit.target) == (name, target)]
            ratios = [
                100 * audit.warp_instructions_per_token / base[audit.kernel]
                for audit in mine
                if base.get(audit.kernel)
            ]
            rows.append(
                (
                    name,
                    target,
                    len(mine),
                    extent(audit.registers for audit in mine),
                    extent(audit.resident_blocks for audit in mine),
                    extent(audit.stack + audit.local + audit.spills for audit in mine),
                    extent(audit.counts["packed FMAs"] for audit in mine),
                    extent(audit.counts["scalar FMAs"] for audit in mine),
                    extent(audit.warp_instructions_per_token for audit in mine),
                    f"{extent(ratios)} %" if ratios and not mine[0].kernel.is_floor else "",
                    sum(len(audit.problems) for audit in mine),
                )
            )
    return rows


DETAIL_COLUMNS = (
    "kernel", "target", "registers", "stack/local/spills", "resident", "shared", "bulk copies",
    "mbarrier init/arrive/wait", "grid wait/trigger", "loads x 16 B", "stores x 16 B", "packed", "scalar",
    "issued by phase", "per token",
)  # fmt: skip


def details(audits: Sequence[Audit]) -> list[tuple[object, ...]]:
    """One row per kernel and target."""
    rows: list[tuple[object, ...]] = []
    for audit in audits:
        counts = Counter(audit.counts)
        rows.append(
            (
                str(audit.kernel),
                audit.target,
                audit.registers,
                f"{audit.stack}/{audit.local}/{audit.spills}",
                audit.resident_blocks,
                audit.shared,
                counts["bulk copies"],
                "/".join(str(counts[f"mbarrier {kind}"]) for kind in ("inits", "arrivals", "waits")),
                f"{counts['grid waits']}/{counts['grid triggers']}",
                counts["global loads of 16 B"],
                counts["global stores of 16 B"],
                counts["packed FMAs"],
                counts["scalar FMAs"],
                ", ".join(f"{phase} {count}" for phase, count in audit.phases.items()),
                f"{audit.warp_instructions_per_token:.0f}",
            )
        )
    return rows
