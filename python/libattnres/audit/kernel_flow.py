# SPDX-License-Identifier: Apache-2.0
"""In which order a kernel's threads wait for earlier grids, load, store and release dependents.

An abstract interpretation of the machine code: values are known integers, addresses that derive from known
parameters, or unknown. Where a branch depends on something unknown, both ways are gone. Blocks are visited
once for each set of facts about what has happened on the way there, so that a flag such as "has not waited
yet", which the code keeps in a register or predicate, is known whenever it matters.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from libattnres.audit.sass import Edge, Function, Instruction

__all__ = ["Discipline", "Flow", "Parameter", "Scenario", "follow"]


@dataclass(frozen=True)
class Parameter:
    """Where a kernel parameter is: offset within the parameters and size in bytes."""

    offset: int
    size: int
    is_pointer: bool


@dataclass(frozen=True)
class Discipline:
    """Which pointers a kernel may read when."""

    activations: frozenset[str]
    """After ``griddepcontrol.wait``, for an earlier grid may write there; anything else at any time."""
    early: frozenset[str] = frozenset()
    """Those of them that a launch with ``early`` may read before."""


@dataclass(frozen=True)
class Scenario:
    """What is known of the arguments of a launch: parameters by name."""

    known: Mapping[str, int]


Value = int | frozenset[str]
Values = dict[str, Value]


@dataclass(frozen=True)
class Facts:
    """What has happened on the way to a place."""

    waited: bool = False
    landed: bool = False
    """The thread has waited for rows that another thread of the block had copied, which waited itself."""
    loaded_since_barrier: bool = False
    """An activation, by a load that other threads of the block do as well."""
    stored_bank: bool = False
    stored_bank_since_barrier: bool = False
    triggered: bool = False


@dataclass
class Flow:
    """What was found over all ways through a kernel."""

    problems: dict[str, int] = field(default_factory=dict)
    """Text and the address where it was first seen."""
    edges: set[Edge] = field(default_factory=set)
    """The ways that can be gone."""
    waits: set[int] = field(default_factory=set)
    triggers: set[int] = field(default_factory=set)
    loads: dict[int, frozenset[str]] = field(default_factory=dict)
    """Addresses of instructions that load from global memory, with the parameters they load from."""
    stores: dict[int, frozenset[str]] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    """Parameters that a comparison depends on."""


SPECIAL = frozenset({"ACQBULK", "BAR", "PREEXIT", "LDG", "UBLKCP", "STG", "SYNCS"})
FORGETTING = frozenset(
    {"FFMA", "FFMA2", "FMUL", "FMUL2", "FADD", "FADD2", "FMNMX", "FMNMX3", "FSEL", "FSETP", "HADD2", "MUFU",
     "F2FP", "LDS", "LDSM", "HMMA", "LDG", "S2R", "S2UR", "CS2R", "ELECT", "VOTE", "VOTEU", "SYNCS"}
)  # fmt: skip
NO_RESULT = frozenset(
    {"STG", "STS", "STL", "ST", "STAS", "UBLKCP", "BRA", "BAR", "EXIT", "RET", "CALL", "WARPSYNC", "BSSY",
     "ENDCOLLECTIVE", "BSYNC", "NOP", "YIELD", "ACQBULK", "PREEXIT", "FENCE", "MEMBAR", "ERRBAR", "CCTL",
     "CGAERRBAR", "UCGABAR_ARV", "UCGABAR_WAIT", "RED", "REDG", "DEPBAR", "NANOSLEEP"}
)  # fmt: skip
PREDICATE = re.compile(r"!?(U?P\d+|U?PT)$")
REGISTER = re.compile(r"\b(U?R\d+|U?RZ)\b")
WORD = re.compile(r"U?R(?:\d+|Z)")
LITERAL = re.compile(r"-?0x[0-9a-f]+")
CONSTANT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")
POINTER_SIZE = 8


@dataclass(frozen=True)
class Step:
    """An instruction, taken apart once."""

    instruction: Instruction
    guard: str
    negated: bool
    results: tuple[str, ...]
    predicates: tuple[str, ...]
    """Those among the results, in order; PT for one that is dropped."""
    sources: tuple[str, ...]
    """Operands that are read."""
    registers: tuple[str, ...]
    """Registers that are read, with the upper halves of pairs."""
    constants: tuple[int, ...]
    """Offsets within constant bank 0 that are read."""


def following(register: str, by: int = 1) -> str:
    """``"R5"`` after ``"R4"``."""
    name, number = register.split("R")
    return f"{name}R{int(number) + by}"


def result_words(instruction: Instruction) -> int:
    """How many registers the result takes."""
    if instruction.opcode in ("FFMA2", "FMUL2", "FADD2") or "WIDE" in instruction.modifiers:
        return 2
    if instruction.opcode in ("HMMA", "LDSM"):
        return 4
    if instruction.opcode == "CS2R" and "32" not in instruction.modifiers:
        return 2
    return max(1, instruction.bits // 32)


def is_data(instruction: Instruction) -> bool:
    """Whether the result can be neither an address nor a flag."""
    return instruction.opcode in FORGETTING or instruction.unpacks


def written(instruction: Instruction) -> tuple[list[str], list[str], int]:
    """Registers and predicates that an instruction writes, and at which operand those that it reads begin."""
    operands = instruction.operands
    opcode = instruction.opcode
    results: list[str] = []
    predicates: list[str] = []
    at = 0
    if opcode not in NO_RESULT and operands != ("",):
        while at < len(operands) and PREDICATE.match(operands[at]):
            predicates.append(operands[at])
            at += 1
        only_predicates = "SETP" in opcode or opcode.endswith("PLOP3") or opcode == "SYNCS"
        if only_predicates and "PLOP3" in opcode:
            predicates, at = list(operands[:2]), 2
        if not only_predicates and at < len(operands) and WORD.fullmatch(operands[at]):
            register = operands[at]
            if register[-1] != "Z":
                results += [following(register, word) for word in range(result_words(instruction))]
            at += 1
            # Carries out; a carry in comes last.
            while at < len(operands) - 1 and PREDICATE.fullmatch(operands[at]):
                predicates.append(operands[at])
                at += 1
    if opcode == "R2P":
        mask = int(operands[2], 16) if operands[2:] and LITERAL.fullmatch(operands[2]) else 0x7F
        predicates = [f"P{bit}" for bit in range(7) if mask >> bit & 1]
    return results + [name for name in predicates if not name.endswith("PT")], predicates, at


def take_apart(instruction: Instruction) -> Step:
    """Which registers and predicates an instruction reads and writes."""
    opcode = instruction.opcode
    results, predicates, at = written(instruction)
    sources = instruction.operands[at:]
    registers: list[str] = []
    constants: list[int] = []
    if is_data(instruction) and opcode not in SPECIAL:
        sources = ()
    for place, source in enumerate(sources):
        wide = ".64" in source or (instruction.modifiers[:1] == ("WIDE",) and place == 2)
        wide = wide or (opcode == "UBLKCP" and place == 1)
        source = source[source.find("][") + 1 :] if source.startswith("desc") else source
        for register in REGISTER.findall(source):
            if register[-1] != "Z":
                registers += [register, following(register)] if wide else [register]
        if source.startswith(("c[", "-c[")):
            constants += [int(offset, 16) for offset in CONSTANT.findall(source)]
    guard = instruction.guard.lstrip("!")
    return Step(
        instruction,
        guard,
        instruction.guard.startswith("!"),
        tuple(results),
        tuple(predicates),
        sources,
        tuple(registers),
        tuple(constants),
    )


class Interpreter:
    """Walks one kernel under one scenario."""

    def __init__(
        self,
        function: Function,
        parameters: Mapping[str, Parameter],
        base: int,
        scenario: Scenario,
        discipline: Discipline,
    ) -> None:
        self.function = function
        self.discipline = discipline
        self.early = discipline.early if scenario.known["early"] else frozenset()
        self.copies_rows = function.count("UBLKCP") > 0
        self.flow = Flow()
        self.known: dict[int, int] = {}
        self.pointers: dict[int, str] = {}
        self.writes_bank = scenario.known.get("block_write_idx", -1) >= 0
        for name, parameter in parameters.items():
            if name in scenario.known:
                self.known[base + parameter.offset] = scenario.known[name] & 0xFFFFFFFF
            elif parameter.is_pointer:
                self.pointers[base + parameter.offset] = name
                self.pointers[base + parameter.offset + 4] = name

    def run(self, steps: list[list[Step | frozenset[str]]]) -> Flow:
        """Follow every way until nothing new is learnt."""
        states: dict[tuple[int, Facts], Values] = {(0, Facts()): {}}
        work = [(0, Facts())]
        while work:
            place = work.pop()
            block, facts = place
            values = dict(states[place])
            facts, taken = self.walk(steps[block], facts, values)
            for successor in self.ways(block, taken):
                self.flow.edges.add((block, successor))
                next_place = (successor, facts)
                old = states.get(next_place)
                new = values if old is None else join(old, values)
                if new != old:
                    states[next_place] = dict(new)
                    work.append(next_place)
        return self.flow

    def ways(self, block: int, taken: bool | None) -> tuple[int, ...]:
        """Successors, by whether the branch or exit at the end is taken (None: either)."""
        ways = self.function.successors[block]
        last = self.function.blocks[block][-1]
        if taken is None or last.opcode not in ("BRA", "EXIT", "RET"):
            return ways
        if last.opcode == "BRA":
            if len(ways) < 2:
                return ways
            return (ways[1],) if taken else (ways[0],)
        return () if taken else ways

    def walk(
        self, steps: list[Step | frozenset[str]], facts: Facts, values: Values
    ) -> tuple[Facts, bool | None]:
        """Run through a block, changing ``values``; also whether its last branch is taken."""
        taken: bool | None = None
        for step in steps:
            if isinstance(step, frozenset):
                for name in step & values.keys():
                    del values[name]
                continue
            holds = truth(step.guard, values) if step.guard else True
            if holds is not None and step.negated:
                holds = not holds
            opcode = step.instruction.opcode
            if opcode in ("BRA", "EXIT", "RET"):
                taken = self.branch_taken(step, holds, values)
                continue
            if holds is False:
                continue
            if opcode in SPECIAL:
                facts = self.notice(step, facts, values)
            if step.results:
                before = [values.get(name) for name in step.results] if holds is None else []
                if is_data(step.instruction):
                    for name in step.results:
                        values.pop(name, None)
                else:
                    self.assign(step, values)
                for name, old in zip(step.results, before, strict=False):
                    set_value(values, name, either(old, values.get(name)))
            elif opcode == "CALL":
                for name in [name for name, value in values.items() if isinstance(value, int)]:
                    del values[name]
        return facts, taken

    def branch_taken(self, step: Step, holds: bool | None, values: Values) -> bool | None:
        """Whether a branch is taken; a uniform predicate may stand among its operands."""
        if "DIV" in step.instruction.modifiers or "ANY" in step.instruction.modifiers:
            return None
        operand = step.sources[0] if step.sources else ""
        if PREDICATE.match(operand):
            value = truth(operand.lstrip("!"), values)
            if value is not None and operand.startswith("!"):
                value = not value
            if holds is True:
                return value
            return None if value is None or holds is None else holds and value
        return holds

    def notice(self, step: Step, facts: Facts, values: Values) -> Facts:
        """What a wait, barrier, trigger, load or store means for the order."""
        instruction = step.instruction
        opcode, address = instruction.opcode, instruction.address
        if opcode == "ACQBULK":
            self.flow.waits.add(address)
            return replace(facts, waited=True)
        if opcode == "BAR":
            return replace(facts, loaded_since_barrier=False, stored_bank_since_barrier=False)
        if opcode == "PREEXIT":
            self.flow.triggers.add(address)
            if facts.loaded_since_barrier:
                self.problem("dependents are released before other threads have loaded", address)
            if self.writes_bank and (not facts.stored_bank or facts.stored_bank_since_barrier):
                self.problem("dependents are released before the bank row is stored", address)
            return replace(facts, triggered=True)
        if opcode == "SYNCS":
            return replace(facts, landed=True) if self.copies_rows and instruction.is_wait else facts
        if opcode in ("LDG", "UBLKCP"):
            return self.notice_load(step, facts, values)
        if opcode == "STG":
            origin = self.origin(step.registers[:2], step, values)
            self.flow.stores[address] = self.flow.stores.get(address, frozenset()) | origin
            if not facts.waited and not facts.landed:
                self.problem(f"{' or '.join(sorted(origin))} is stored before griddepcontrol.wait", address)
            if "blocks" in origin:
                if facts.triggered:
                    self.problem("a bank row is stored after dependents are released", address)
                return replace(facts, stored_bank=True, stored_bank_since_barrier=True)
        return facts

    def notice_load(self, step: Step, facts: Facts, values: Values) -> Facts:
        instruction = step.instruction
        if instruction.opcode == "UBLKCP":
            source = REGISTER.findall(step.sources[1])[0]
            origin = self.origin((source, following(source)), step, values)
        else:
            origin = self.origin(step.registers, step, values)
        address = instruction.address
        self.flow.loads[address] = self.flow.loads.get(address, frozenset()) | origin
        activations = origin & self.discipline.activations
        waited = facts.waited or (facts.landed and instruction.opcode == "LDG")
        if not origin:
            self.problem("a load from an unknown address", address)
        for name in sorted(activations):
            if name not in self.early and not waited:
                self.problem(f"{name} is loaded before griddepcontrol.wait", address)
        if activations and facts.triggered:
            self.problem("an activation is loaded after dependents are released", address)
        if activations and instruction.opcode == "LDG":
            return replace(facts, loaded_since_barrier=True)
        return facts

    def problem(self, text: str, address: int) -> None:
        self.flow.problems.setdefault(text, address)

    def origin(self, registers: tuple[str, ...], step: Step, values: Values) -> frozenset[str]:
        """The parameters that registers and constants of a step derive from."""
        origin: frozenset[str] = frozenset()
        for register in registers:
            value = values.get(register)
            if isinstance(value, frozenset):
                origin |= value
        for offset in step.constants:
            if offset in self.pointers:
                origin |= {self.pointers[offset]}
        return origin

    def operand(self, text: str, values: Values) -> int | None:
        """Value of a source operand where it is a known integer."""
        text = text.replace(".reuse", "")
        if LITERAL.fullmatch(text):
            return int(text, 16) & 0xFFFFFFFF
        if text in ("RZ", "URZ"):
            return 0
        if match := CONSTANT.fullmatch(text):
            return self.known.get(int(match[1], 16))
        value = values.get(text)
        return value if isinstance(value, int) else None

    def assign(self, step: Step, values: Values) -> None:
        """Give the results of a step their values."""
        instruction = step.instruction
        opcode = instruction.opcode
        if "SETP" in opcode:
            for name in sorted(self.origin(step.registers, step, values)):
                self.flow.compared.setdefault(name, instruction.address)
            for offset in step.constants:
                if offset in self.known:
                    self.flow.compared.setdefault(f"c[{offset:#x}]", instruction.address)
        if opcode in ("LDC", "LDCU", "ULDC") and step.constants:
            for word, name in enumerate(step.results):
                offset = step.constants[0] + 4 * word
                set_value(values, name, self.constant_value(offset))
            return
        known = self.evaluate(step, values)
        if known is not None:
            for name in step.results:
                set_value(values, name, known.get(name))
            return
        origin = self.origin(step.registers, step, values)
        for name in step.results:
            is_predicate = name.lstrip("U").startswith("P")
            set_value(values, name, origin if origin and not is_predicate else None)

    def constant_value(self, offset: int) -> Value | None:
        if offset in self.known:
            return self.known[offset]
        return frozenset({self.pointers[offset]}) if offset in self.pointers else None

    def evaluate(self, step: Step, values: Values) -> dict[str, Value | None] | None:
        """Results of the few instructions that carry flags; None for any other."""
        instruction, sources = step.instruction, step.sources
        opcode, modifiers = instruction.opcode, instruction.modifiers
        if opcode in ("MOV", "UMOV", "R2UR") or (opcode == "IMAD" and modifiers[:1] in (("MOV",), ("U32",))):
            if len(step.results) != 1:
                return None
            source = sources[-1].replace(".reuse", "")
            if opcode == "IMAD" and modifiers[0] == "U32":
                return None
            number = self.operand(source, values)
            if number is not None:
                return {step.results[0]: number}
            moved = values.get(source)
            return {step.results[0]: moved} if moved is not None else None
        if opcode == "HFMA2" and sources[0].startswith("-RZ") and len(sources) == 4:
            return {step.results[0]: halves(sources[2], sources[3])}
        if opcode in ("ISETP", "UISETP"):
            return self.compare(step, values)
        if opcode in ("PLOP3", "UPLOP3"):
            return look_up(step, values)
        if opcode in ("SEL", "USEL"):
            chosen = truth(sources[2].lstrip("!"), values)
            if chosen is None:
                return None
            if sources[2].startswith("!"):
                chosen = not chosen
            return {step.results[0]: self.operand(sources[0 if chosen else 1], values)}
        if opcode == "P2R" and not modifiers and sources[:2] == ("PR", "RZ"):
            kept = [bit for bit in range(7) if int(sources[2], 16) >> bit & 1]
            flags_known = [truth(f"P{bit}", values) for bit in kept]
            if None in flags_known:
                return None
            return {step.results[0]: sum(1 << bit for bit, one in zip(kept, flags_known, strict=True) if one)}
        if opcode == "PRMT":
            numbers = [self.operand(source, values) for source in sources[:3]]
            a, selector, b = numbers
            if a is None or b is None or selector is None:
                return None
            return {step.results[0]: permute(a, selector, b)}
        if opcode == "LOP3" and len(sources) >= 4:
            a, b, c = (self.operand(source, values) for source in sources[:3])
            if a is None or b is None or c is None or not sources[3].startswith("0x"):
                return None
            result = truth_table(a, b, c, int(sources[3], 16))
            words = [name for name in step.results if not name.lstrip("U").startswith("P")]
            flags = [name for name in step.results if name not in words]
            return {**dict.fromkeys(words, result), **dict.fromkeys(flags, int(result != 0))}
        return None

    def compare(self, step: Step, values: Values) -> dict[str, Value | None] | None:
        """ISETP of known integers; the second half of a 64-bit comparison stays unknown."""
        modifiers = step.instruction.modifiers
        if "EX" in modifiers or "AND" not in modifiers:
            return None
        a, b = (self.operand(source, values) for source in step.sources[:2])
        if a is None or b is None or step.sources[2:] not in (("PT",), ("UPT",)):
            return None
        if "U32" not in modifiers:
            a, b = signed(a), signed(b)
        outcome = {
            "EQ": a == b, "NE": a != b, "LT": a < b, "LE": a <= b, "GT": a > b, "GE": a >= b
        }.get(modifiers[0])  # fmt: skip
        if outcome is None or len(step.results) != 1:
            return None
        return {step.results[0]: int(outcome)}


def truth(predicate: str, values: Values) -> bool | None:
    """Value of a predicate; None when unknown."""
    if predicate in ("PT", "UPT"):
        return True
    value = values.get(predicate)
    return bool(value) if isinstance(value, int) else None


def look_up(step: Step, values: Values) -> dict[str, Value | None]:
    """PLOP3: a table over three predicates, of which some may be unknown."""
    inputs: list[list[bool]] = []
    for source in step.sources[:3]:
        value = truth(source.lstrip("!"), values)
        possible = [False, True] if value is None else [value]
        inputs.append([not each for each in possible] if source.startswith("!") else possible)
    outcomes: dict[str, Value | None] = {}
    for name, table in zip(step.predicates, step.sources[3:5], strict=False):
        if name in ("PT", "UPT"):
            continue
        found = {
            int(table, 16) >> (a << 2 | b << 1 | c) & 1
            for a in inputs[0]
            for b in inputs[1]
            for c in inputs[2]
        }
        outcomes[name] = found.pop() if len(found) == 1 else None
    return outcomes


def set_value(values: Values, name: str, value: Value | None) -> None:
    """Assign, or forget."""
    if value is None:
        values.pop(name, None)
    else:
        values[name] = value


def join(a: Values, b: Values) -> Values:
    """What holds on both ways: equal integers; addresses of either."""
    joined: Values = {}
    for name in a.keys() | b.keys():
        set_value(joined, name, either(a.get(name), b.get(name)))
    return joined


def either(one: Value | None, other: Value | None) -> Value | None:
    """What is known of a value that is one of two."""
    if one == other:
        return one
    addresses = [value for value in (one, other) if isinstance(value, frozenset)]
    return frozenset().union(*addresses) if addresses else None


def signed(value: int) -> int:
    """As a signed 32-bit integer."""
    return value - (1 << 32) if value >> 31 else value


def halves(low: str, high: str) -> int | None:
    """The word that two half-precision literals make; HFMA2 prints the upper one first."""
    try:
        return int.from_bytes(struct.pack("<ee", float(high), float(low)), "little")
    except (ValueError, OverflowError):
        return None


def permute(a: int, selector: int, b: int) -> int:
    """PRMT: bytes of a (0 to 3) and b (4 to 7), or only their signs, all over the byte."""
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    result = 0
    for place in range(4):
        choice = selector >> 4 * place & 0xF
        byte = source[choice & 7]
        if choice & 8:
            byte = 0xFF if byte >> 7 else 0
        result |= byte << 8 * place
    return result


def truth_table(a: int, b: int, c: int, table: int) -> int:
    """LOP3: a table over the bits of three words."""
    result = 0
    for index in range(8):
        if table >> index & 1:
            result |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return result & 0xFFFFFFFF


def gather(block: list[Instruction]) -> list[Step | frozenset[str]]:
    """A block taken apart; runs that only make data become the set of registers that they overwrite."""
    gathered: list[Step | frozenset[str]] = []
    overwritten: set[str] = set()
    for instruction in block:
        if not instruction.guard and instruction.opcode not in SPECIAL and is_data(instruction):
            overwritten.update(written(instruction)[0])
            continue
        if overwritten:
            gathered.append(frozenset(overwritten))
            overwritten = set()
        gathered.append(take_apart(instruction))
    if overwritten:
        gathered.append(frozenset(overwritten))
    return gathered


def follow(
    function: Function,
    parameters: Mapping[str, Parameter],
    base: int,
    scenarios: list[Scenario],
    discipline: Discipline,
) -> list[Flow]:
    """Walk a kernel under each scenario; ``base`` is where its parameters start in constant bank 0."""
    steps = [gather(block) for block in function.blocks]
    return [
        Interpreter(function, parameters, base, scenario, discipline).run(steps) for scenario in scenarios
    ]
