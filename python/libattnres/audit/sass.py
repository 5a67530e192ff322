# SPDX-License-Identifier: Apache-2.0
"""Machine code of the compiled kernels, as NVIDIA's disassembler prints it: blocks, loops and paths."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

__all__ = [
    "Edge",
    "Function",
    "Instruction",
    "Loop",
    "Usage",
    "cuda_tool",
    "disassemble",
    "extract_cubins",
    "parse",
    "resource_usage",
    "target_of",
]


def cuda_tool(name: str) -> str:
    """A tool of the CUDA toolkit: from PyPI (``nvidia-cuda-<name>``) where installed, else from PATH."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for tool in sorted(Path(root).glob(f"cu*/bin/{name}"), reverse=True):
            return str(tool)
    on_path = shutil.which(name)
    if on_path is None:
        raise FileNotFoundError(
            f"{name}: expected on PATH or from `pip install nvidia-cuda-{name}`, got neither"
        )
    return on_path


def run_tool(*command: str | Path, folder: Path | None = None) -> str:
    """Output of a tool; what it complains about becomes the error."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{Path(command[0]).name}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def extract_cubins(library: Path, folder: Path) -> list[Path]:
    """Write every machine-code image within a library or object file into a folder, the largest first."""
    run_tool(cuda_tool("cuobjdump"), "-xelf", "all", library.resolve(), folder=folder)
    return sorted(folder.glob("*.cubin"), key=lambda path: path.stat().st_size, reverse=True)


def target_of(cubin: Path) -> str:
    """``"100a"``, from the name that :func:`extract_cubins` gave."""
    found = re.search(r"sm_(\w+)\.cubin$", cubin.name)
    if found is None:
        raise ValueError(f"cubin: expected a name that ends with sm_<target>.cubin, got {cubin.name}")
    return found[1]


@dataclass(frozen=True)
class Usage:
    """What a kernel takes, in bytes where it is not registers."""

    registers: int
    stack: int
    shared: int
    """Fixed at compile time, with what the driver reserves."""
    local: int
    constant: int
    """Of bank 0, at whose end the parameters are."""


def resource_usage(binary: Path) -> dict[str, Usage]:
    """Resource usage of the functions of one cubin."""
    usages: dict[str, Usage] = {}
    name = ""
    for line in run_tool(cuda_tool("cuobjdump"), "-res-usage", binary).splitlines():
        if match := re.search(r"Function (\S+?):", line):
            name = match[1]
        elif "REG:" in line:
            values = {key: int(value) for key, value in re.findall(r"(\w+)(?:\[0\])?:(\d+)", line)}
            usages[name] = Usage(
                values["REG"], values["STACK"], values["SHARED"], values["LOCAL"], values.get("CONSTANT", 0)
            )
    return usages


@dataclass(frozen=True)
class Instruction:
    """One machine instruction."""

    address: int
    guard: str
    """``"P0"``, ``"!UP1"``; empty for always."""
    opcode: str
    """Without its modifiers, such as ``"LDG"``."""
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    target: int | None = None
    """Address that a branch, or a divergent collective, goes to."""

    @property
    def bits(self) -> int:
        """Width of a memory access: 32 unless a modifier says otherwise."""
        for modifier in self.modifiers:
            if modifier in ("64", "128", "256"):
                return int(modifier)
            if modifier in ("U8", "S8", "U16", "S16"):
                return int(modifier[1:])
        return 32

    @property
    def highest_register(self) -> int:
        """The highest general register it uses, -1 for none; wide operands are aligned to their width."""
        width = 4 if self.opcode in ("HMMA", "LDSM") else max(2, self.bits // 32)
        named = [int(number) for operand in self.operands for number in re.findall(r"\bR(\d+)", operand)]
        return max((one + width - 1 if one % width == 0 else one | 1 for one in named), default=-1)

    @property
    def is_wait(self) -> bool:
        """Whether threads may stop here for others: an mbarrier, a barrier or a cluster barrier."""
        return self.opcode in ("BAR", "UCGABAR_WAIT") or (
            self.opcode == "SYNCS" and "PHASECHK" in self.modifiers
        )

    @property
    def unpacks(self) -> bool:
        """Whether it takes one bfloat16 of a pair: a shift, a mask or a permutation by 16 bits."""
        if self.opcode in ("SHF", "LOP3", "IMAD"):
            return any(operand in ("0x10", "0xffff0000", "0x10000") for operand in self.operands[1:3])
        # Other permutations also move flags.
        return self.opcode == "PRMT" and ("0x1044" in self.operands or "0x3244" in self.operands)


MATH = frozenset({"FFMA", "FFMA2", "FMUL", "FMUL2", "FADD", "FADD2"})

Edge = tuple[int, int]
"""From one block to another, each by its index."""


@dataclass(frozen=True)
class Loop:
    """A strongly connected set of blocks and where it is entered."""

    header: int
    blocks: frozenset[int]


@dataclass
class Function:
    """One kernel: straight-line blocks of instructions and the ways between them."""

    name: str
    instructions: list[Instruction]
    attributes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """What the assembler noted, such as ``MAX_THREADS``."""
    blocks: list[list[Instruction]] = field(default_factory=list)
    successors: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        leaders = {0}
        for place, instruction in enumerate(self.instructions):
            if instruction.target is not None:
                leaders.add(instruction.target // 16)
            if instruction.opcode in ("BRA", "EXIT", "RET", "CALL", "WARPSYNC", "BRX"):
                leaders.add(place + 1)
        starts = sorted(leader for leader in leaders if leader < len(self.instructions))
        block_at = {start: index for index, start in enumerate(starts)}
        for start, end in zip(starts, [*starts[1:], len(self.instructions)], strict=True):
            self.blocks.append(self.instructions[start:end])
        for index, block in enumerate(self.blocks):
            last = block[-1]
            following = [index + 1] if index + 1 < len(self.blocks) else []
            jump = [block_at[last.target // 16]] if last.target is not None else []
            if last.opcode in ("EXIT", "RET"):
                ways = following if last.guard else []
            elif last.opcode == "BRA":
                conditional = last.guard or len(last.operands) > 1 or "DIV" in last.modifiers
                ways = following + jump if conditional else jump
            elif last.opcode == "WARPSYNC":
                ways = following + jump
            else:  # a call returns
                ways = following
            self.successors.append(tuple(dict.fromkeys(ways)))

    @property
    def cluster_size(self) -> int:
        """Thread blocks of a cluster, where that is fixed at compile time; else 0."""
        return self.attributes.get("CTA_PER_CLUSTER", (0,))[0]

    @property
    def block_size(self) -> int:
        """Threads of a block, as the kernel's launch bounds have it."""
        return self.attributes["MAX_THREADS"][0]

    @property
    def parameter_base(self) -> int:
        """Where the parameters start in constant bank 0."""
        return self.attributes["PARAM_CBANK"][0]

    def count(self, *opcodes: str) -> int:
        """How many instructions have one of these opcodes."""
        return sum(instruction.opcode in opcodes for instruction in self.instructions)

    def of(self, *opcodes: str) -> Iterator[Instruction]:
        """The instructions that have one of these opcodes."""
        return (instruction for instruction in self.instructions if instruction.opcode in opcodes)

    @cached_property
    def loops(self) -> list[Loop]:
        """Outermost loops, in the order of their addresses."""
        return loops_within(range(len(self.blocks)), self.successors)

    def inner_loops(self, loop: Loop) -> list[Loop]:
        """The loops directly within another."""
        inside = [
            tuple(way for way in self.successors[block] if way in loop.blocks and way != loop.header)
            if block in loop.blocks
            else ()
            for block in range(len(self.blocks))
        ]
        return loops_within([loop.header, *sorted(loop.blocks)], inside)

    def contains(self, loop: Loop, wanted: Callable[[Instruction], bool]) -> bool:
        """Whether an instruction of a loop is wanted."""
        return any(wanted(instruction) for block in loop.blocks for instruction in self.blocks[block])

    def does_math(self, loop: Loop) -> bool:
        """Whether a loop computes: not one that waits for a barrier or hands rows to a bulk copy."""
        return self.contains(loop, lambda instruction: instruction.opcode in MATH)

    def after(self, instruction: Instruction) -> Iterator[Instruction]:
        """What can come after an instruction, itself left out."""
        first = next(index for index, block in enumerate(self.blocks) if instruction in block)
        yield from self.blocks[first][self.blocks[first].index(instruction) + 1 :]
        seen, work = {first}, [first]
        while work:
            for way in self.successors[work.pop()]:
                if way not in seen:
                    seen.add(way)
                    work.append(way)
                    yield from self.blocks[way]

    def path(
        self,
        start: int,
        ends: Callable[[int, int | None], bool],
        edges: Collection[Edge],
        cost: Sequence[tuple[int, ...]],
    ) -> list[int]:
        """Blocks of the cheapest way from a block to an end; edges backwards are not gone.

        ``ends(block, successor)`` says whether the way may end with that edge, or at a block that has none
        (``None``).
        """
        order, back = depth_first(start, self.successors, edges)
        best: dict[int, tuple[tuple[int, ...], list[int]]] = {start: (cost[start], [start])}
        finished: list[tuple[tuple[int, ...], list[int]]] = []
        for block in order:
            if block not in best:
                continue
            spent, way = best[block]
            ways = [next_ for next_ in self.successors[block] if (block, next_) in edges]
            if any(ends(block, next_) for next_ in ways) or (not ways and ends(block, None)):
                finished.append((spent, way))
            for next_ in ways:
                if (block, next_) in back or ends(block, next_):
                    continue
                total = tuple(a + b for a, b in zip(spent, cost[next_], strict=True))
                if next_ not in best or total < best[next_][0]:
                    best[next_] = (total, [*way, next_])
        if not finished:
            raise ValueError(f"{self.name}: no way from block {start} to an end")
        return min(finished)[1]


def loops_within(blocks: Iterable[int], successors: Sequence[tuple[int, ...]]) -> list[Loop]:
    """Strongly connected components that are loops (Tarjan's algorithm, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    loops = []
    for root in blocks:
        if root in index:
            continue
        work = [(root, iter(successors[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            block, ways = work[-1]
            for way in ways:
                if way not in index:
                    index[way] = low[way] = len(index)
                    stack.append(way)
                    on_stack.add(way)
                    work.append((way, iter(successors[way])))
                    break
                if way in on_stack:
                    low[block] = min(low[block], index[way])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[block])
                if low[block] == index[block]:
                    members = set()
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        members.add(member)
                        if member == block:
                            break
                    if len(members) > 1 or block in successors[block]:
                        loops.append(Loop(block, frozenset(members)))
    return sorted(loops, key=lambda loop: loop.header)


def depth_first(
    start: int, successors: Sequence[tuple[int, ...]], edges: Collection[Edge]
) -> tuple[list[int], set[Edge]]:
    """Reachable blocks, each before its successors, and the edges that go back to a block on the way."""
    back: set[Edge] = set()
    done: list[int] = []
    state = {start: "open"}
    work = [(start, iter(successors[start]))]
    while work:
        block, ways = work[-1]
        for way in ways:
            if (block, way) not in edges:
                continue
            if way not in state:
                state[way] = "open"
                work.append((way, iter(successors[way])))
                break
            if state[way] == "open":
                back.add((block, way))
        else:
            work.pop()
            state[block] = "done"
            done.append(block)
    return done[::-1], back


LINE = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
LABEL = re.compile(r"(\.L\w+):")
SECTION = re.compile(r"\s*\.section\s+\.(text|nv\.info)\.(\S+?),")
NOTE = re.compile(r"\s*//----- nvinfo : EIATTR_(\w+)")
NUMBER = re.compile(r"\s*/\*\w+\*/\s+\.(?:word|short)\s+(0x[0-9a-f]+)")


def parse(listing: str) -> dict[str, Function]:
    """Functions by their symbols, from the output of ``nvdisasm``."""
    functions: dict[str, Function] = {}
    notes: dict[str, dict[str, tuple[int, ...]]] = {}
    kind = name = note = ""
    labels: dict[str, int] = {}
    lines: list[tuple[int, str, str, str]] = []

    def finish() -> None:
        if lines:
            instructions = [decode(*line, labels) for line in lines]
            functions[name] = Function(name, instructions, notes.get(name, {}))
        labels.clear()
        lines.clear()

    for line in listing.splitlines():
        if match := SECTION.match(line):
            finish()
            kind, name = match[1], match[2]
        elif line.lstrip().startswith(".section\t"):
            finish()
            kind = ""
        elif kind == "text":
            if match := LINE.match(line):
                lines.append((int(match[1], 16), match[2] or "", match[3], match[4]))
            elif match := LABEL.match(line):
                labels[match[1]] = len(lines) * 16
        elif kind:
            if match := NOTE.match(line):
                note = match[1]
            elif match := NUMBER.match(line):
                of_function = notes.setdefault(name, {})
                of_function[note] = (*of_function.get(note, ()), int(match[1], 16))
    finish()
    return functions


def decode(address: int, guard: str, mnemonic: str, operands: str, labels: Mapping[str, int]) -> Instruction:
    """One line of the listing."""
    opcode, *modifiers = mnemonic.split(".")
    target = None
    if "`(" in operands and opcode in ("BRA", "WARPSYNC"):
        # Labels of another section, or arithmetic on them, do not occur in branches.
        found = re.search(r"`\((\.L\w+)\)", operands)
        target = labels[found[1]] if found else None
    return Instruction(
        address, guard, opcode, tuple(modifiers), tuple(part.strip() for part in operands.split(",")), target
    )


def disassemble(cubin: Path) -> dict[str, Function]:
    """Functions of a cubin by their symbols."""
    return parse(run_tool(cuda_tool("nvdisasm"), "--no-dataflow", cubin))
