"""Proves that a program is one that the VM may run: a builder's mistake is found here, before any memory is touched.

``faults`` returns what is wrong and never raises, ``verify`` raises for the first fault. ``verify_lowered`` is the same
for the program's binary form.

Rules (each has a mutant in the tests):
    table       weights and buffers stand at their own index, have unique names and roles, and sizes that fit
    arity       an instruction has exactly the fields of its opcode
    range       enumerators exist, counts are positive, numbers are finite, references are inside their tables
    shape       weights and buffers have the shapes that the instruction implies
    order       phases never fall; embedding first, head last and once; nothing is computed and never used
    read        nothing is read before an earlier phase wrote it
    phase       inside a phase, nothing touches what another instruction writes; no instruction reads what it writes
    kv          a layer's pages are appended once, and read only in later phases, with the same head shape
    digest      the digest is that of the content
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from headrace.program.domains import domain_read, domain_written
from headrace.program.ir import NONE, Instruction, Program, effect, kv_read, kv_written, result, seal, weights_read
from headrace.program.opcodes import (
    FIELDS,
    GROUP,
    LANES,
    STEP_PAGES,
    Activation,
    Domain,
    Epilogue,
    Norm,
    Opcode,
    Pooling,
    prepared_width,
)

_I32_MAX = 2**31 - 1
_WEIGHT_KINDS = ("matrix", "vector", "rope")


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken rule, and where."""

    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}: {self.message}"


class ProgramError(Exception):
    """A program breaks a rule. It is a bug of the code that built it, whatever the model's files said."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


def verify(program: Program) -> None:
    """Returns when the program keeps every rule.

    Raises:
        ProgramError: names the first rule that is broken, and where.
    """
    for fault in faults(program):
        raise ProgramError(fault)


def faults(program: Program) -> list[Fault]:
    """Returns everything that is wrong, most basic first. Rules that need sound fields wait until the fields are."""
    found = [*_tables(program)]
    for number, item in enumerate(program.instructions):
        found += _fields(program, where_of(number, item), item)
    if found:
        return found
    for number, item in enumerate(program.instructions):
        found += _shapes(program, where_of(number, item), item)
    return [*found, *_order(program), *_flow(program), *_domains(program), *_kv(program), *_digest(program)]


def where_of(number: int, item: Instruction) -> str:
    """Returns how a fault names an instruction."""
    name = item.opcode.name if isinstance(item.opcode, Opcode) else str(item.opcode)
    return f"instruction {number} ({name})"


# Tables


def _tables(program: Program) -> Iterator[Fault]:
    roles: set[str] = set()
    names: set[str] = set()
    for position, weight in enumerate(program.weights):
        where = f"weight {position} ({weight.name})"
        if weight.index != position:
            yield Fault("table", where, f"says that its index is {weight.index}")
        if weight.kind not in _WEIGHT_KINDS:
            yield Fault("table", where, f"kind {weight.kind!r} is none of {_WEIGHT_KINDS}")
            continue
        if not (0 < weight.n <= _I32_MAX and 0 < weight.k <= _I32_MAX):
            yield Fault("table", where, f"shape [{weight.n}, {weight.k}] is out of range")
            continue
        if weight.kind == "matrix" and weight.k % GROUP:
            yield Fault("table", where, f"{weight.k} inputs are no multiple of {GROUP}")
        if weight.kind == "vector" and weight.k != 1:
            yield Fault("table", where, f"a vector has k = 1, not {weight.k}")
        if (weight.kind == "rope") != (not weight.parts) or (weight.kind == "rope") != (weight.rope is not None):
            yield Fault("table", where, "a rotary table has frequencies and no parts, everything else has parts")
        if weight.kind == "rope" and weight.k % 2:
            yield Fault("table", where, f"{weight.k} elements do not turn in pairs")
        if weight.parts and sum(part.n for part in weight.parts) != weight.n:
            yield Fault("table", where, f"parts have {sum(part.n for part in weight.parts)} rows, not {weight.n}")
        if any(part.n <= 0 for part in weight.parts):
            yield Fault("table", where, "a part has no rows")
        if weight.interleave not in (0, LANES):
            yield Fault("table", where, f"interleave {weight.interleave} is neither 0 nor {LANES}")
        elif weight.interleave and len(weight.parts) % 2:
            yield Fault("table", where, f"{len(weight.parts)} interleaved parts are no pairs")
        elif weight.interleave and (len({part.n for part in weight.parts}) != 1 or weight.parts[0].n % LANES):
            yield Fault("table", where, f"interleaved parts must have equal rows, a multiple of {LANES}")
        for role in (part.role for part in weight.parts):
            if role in roles:
                yield Fault("table", where, f"role {role} is in two places")
            roles.add(role)
        if weight.name in names:
            yield Fault("table", where, "name is used twice")
        names.add(weight.name)
    # What the last instruction writes nobody reads: it may be as narrow as it is (scores of a few classes). Nor need
    # logits be whole tiles.
    ends = {
        item.values.get("input" if item.values.get("weight") == NONE else "out") for item in program.instructions[-1:]
    }
    buffer_names: set[str] = set()
    for position, buffer in enumerate(program.buffers):
        where = f"buffer {position} ({buffer.name})"
        if buffer.index != position:
            yield Fault("table", where, f"says that its index is {buffer.index}")
        if not 0 < buffer.width <= _I32_MAX or (buffer.width % LANES and position not in ends):
            yield Fault("table", where, f"width {buffer.width} is no positive multiple of {LANES}")
        if buffer.name in buffer_names:
            yield Fault("table", where, "name is used twice")
        buffer_names.add(buffer.name)


# Fields of one instruction

_POSITIVE = frozenset(
    {"width", "k", "n", "heads", "kv_heads", "head_size", "vocab", "hidden", "experts", "top_k"},
)
_FLAGS = frozenset({"is_renormalised", "is_bidirectional", "is_normalised"})
_NOT_NEGATIVE = frozenset({"window", "position_offset", "rotary_size"})
_OPTIONAL_WEIGHTS = frozenset({"bias", "norm_weight", "norm_bias", "rope", "positions", "types", "q_norm", "k_norm"})
_OPTIONAL_BUFFERS = frozenset({"keys", "values", "up"})
_POSITIVE_FLOATS = frozenset({"norm_eps", "qk_norm_eps"})
_NOT_NEGATIVE_FLOATS = frozenset({"softcap"})
_ENUMERATORS: dict[str, type[IntEnum]] = {
    "norm": Norm,
    "epilogue": Epilogue,
    "activation": Activation,
    "domain": Domain,
    "pooling": Pooling,
}


def _fields(program: Program, where: str, item: Instruction) -> Iterator[Fault]:
    if not isinstance(item.opcode, Opcode) or item.opcode not in FIELDS:
        yield Fault("arity", where, f"opcode {item.opcode!r} does not exist")
        return
    wanted = {field.name for field in FIELDS[item.opcode]}
    if wanted != set(item.values):
        yield Fault("arity", where, f"fields {sorted(wanted ^ set(item.values))} are missing or unknown")
        return
    if not isinstance(item.phase, int) or not 0 <= item.phase <= _I32_MAX:
        yield Fault("range", where, f"phase {item.phase!r}")
    for field in FIELDS[item.opcode]:
        value = item.values[field.name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            yield Fault("range", where, f"{field.name} is {value!r}")
        elif field.type == "f32":
            is_low = (field.name in _POSITIVE_FLOATS and value <= 0) or (
                field.name in _NOT_NEGATIVE_FLOATS and value < 0
            )
            if is_low or abs(value) > 3.4e38:
                yield Fault("range", where, f"{field.name} is {value!r}")
        elif not isinstance(value, int) or abs(value) > _I32_MAX:
            yield Fault("range", where, f"{field.name} is {value!r}, not a 32-bit integer")
        else:
            is_optional = item.opcode is Opcode.HEAD and field.name == "weight"
            if not (is_optional and value == NONE):
                yield from _integer(program, where, field.name, field.type, value)


def _integer(program: Program, where: str, name: str, kind: str, value: int) -> Iterator[Fault]:
    if value == NONE and name in _OPTIONAL_BUFFERS:
        return
    if kind == "buffer" and not 0 <= value < len(program.buffers):
        yield Fault("range", where, f"{name} is {value}, there are {len(program.buffers)} buffers")
    if kind == "weight" and not (value == NONE and name in _OPTIONAL_WEIGHTS) and not 0 <= value < len(program.weights):
        yield Fault("range", where, f"{name} is {value}, there are {len(program.weights)} weights")
    if (name in _POSITIVE and value <= 0) or (name in _NOT_NEGATIVE and value < 0):
        yield Fault("range", where, f"{name} is {value}")
    if name == "layer" and not (value == STEP_PAGES or 0 <= value < program.spec.layers):
        yield Fault("range", where, f"layer is {value}, the model has {program.spec.layers}")
    if name in _ENUMERATORS and value not in set(_ENUMERATORS[name]):
        yield Fault("range", where, f"{name} {value} does not exist")
    if name in _FLAGS and value not in (0, 1):
        yield Fault("range", where, f"{name} is {value}")


# Shapes


def _shapes(program: Program, where: str, item: Instruction) -> Iterator[Fault]:
    """Yields references whose shape is not the one that the instruction implies."""

    def weight(name: str, kind: str, n: int | None, k: int) -> Iterator[Fault]:
        index = item.integer(name)
        if index == NONE:
            return
        found = program.weights[index]
        if found.kind != kind or (n is not None and found.n != n) or found.k != k:
            rows = "positions" if n is None else n
            yield Fault("shape", where, f"{name} is {found.kind} [{found.n}, {found.k}], expected {kind} [{rows}, {k}]")

    def buffer(name: str, width: int) -> Iterator[Fault]:
        index = item.integer(name)
        if index != NONE and (found := program.buffers[index]).width != width:
            yield Fault("shape", where, f"{name} is {found.name} of width {found.width}, expected {width}")

    def prologue(k: int) -> Iterator[Fault]:
        is_prepared = item.integer("norm") == Norm.PREPARED
        yield from buffer("input", prepared_width(k) if is_prepared else k)
        if is_prepared and item.opcode is not Opcode.LINEAR:
            yield Fault("shape", where, "reads prepared rows, which only LINEAR can")
        yield from weight("norm_weight", "vector", k, 1)
        yield from weight("norm_bias", "vector", k, 1)
        if item.integer("norm") in (Norm.NONE, Norm.PREPARED) and item.integer("norm_weight") != NONE:
            yield Fault("shape", where, "has a norm weight but no norm")
        if item.integer("norm") != Norm.LAYER and item.integer("norm_bias") != NONE:
            yield Fault("shape", where, "has a norm bias but no layer norm")

    def rotation() -> Iterator[Fault]:
        size, rotary = item.integer("head_size"), item.integer("rotary_size")
        yield from weight("rope", "rope", None, rotary)
        if rotary > size or (rotary > 0) != (item.integer("rope") != NONE):
            yield Fault("shape", where, f"{rotary} elements turn of a head of {size}")
        yield from weight("q_norm", "vector", size, 1)
        yield from weight("k_norm", "vector", size, 1)
        yield from buffer("q_out", item.integer("heads") * size)
        yield from _heads(where, item)

    def interleaved(name: str, pairs: int) -> Iterator[Fault]:
        source = program.weights[item.integer(name)] if item.integer(name) != NONE else None
        if source is not None and source.interleave != (LANES if pairs else 0):
            yield Fault("shape", where, f"{source.name}: exactly a gated product reads interleaved parts")
        elif source is not None and pairs and len(source.parts) != 2 * pairs:
            yield Fault("shape", where, f"{source.name} has {len(source.parts)} parts, expected {2 * pairs}")

    match item.opcode:
        case Opcode.EMBED:
            width = item.integer("width")
            yield from weight("table", "matrix", program.spec.vocab_size, width)
            yield from buffer("out", width)
            yield from weight("types", "matrix", None, width)
            yield from weight("positions", "matrix", None, width)
            offset = item.integer("position_offset")
            if (index := item.integer("positions")) == NONE:
                if offset:
                    yield Fault("shape", where, "has an offset but no positions")
            elif program.weights[index].n < program.spec.context_tokens + offset:
                need = f"{program.spec.context_tokens} + {offset}"
                yield Fault("shape", where, f"positions has {program.weights[index].n} rows, the context needs {need}")
        case Opcode.LINEAR:
            n, k = item.integer("n"), item.integer("k")
            yield from weight("weight", "matrix", n, k)
            yield from weight("bias", "vector", n, 1)
            yield from prologue(k)
            is_glu = item.integer("epilogue") == Epilogue.GLU
            yield from buffer("out", n // 2 if is_glu else n)
            for name in ("weight", "bias"):
                yield from interleaved(name, int(is_glu))
        case Opcode.QKV:
            heads, kv_heads, size = item.integer("heads"), item.integer("kv_heads"), item.integer("head_size")
            n = (heads + 2 * kv_heads) * size
            yield from weight("weight", "matrix", n, item.integer("k"))
            yield from weight("bias", "vector", n, 1)
            yield from prologue(item.integer("k"))
            yield from rotation()
        case Opcode.ROTATE:
            heads, kv_heads, size = item.integer("heads"), item.integer("kv_heads"), item.integer("head_size")
            is_whole = item.integer("keys") == NONE
            yield from buffer("q", (heads + (2 * kv_heads if is_whole else 0)) * size)
            yield from buffer("keys", kv_heads * size)
            yield from buffer("values", kv_heads * size)
            if is_whole != (item.integer("values") == NONE):
                yield Fault("shape", where, "keys and values stand beside the queries, or behind them")
            yield from rotation()
        case Opcode.ATTENTION:
            width = item.integer("heads") * item.integer("head_size")
            yield from buffer("q", width)
            yield from buffer("out", width)
            yield from _heads(where, item)
            if item.integer("is_bidirectional") and item.integer("layer") != STEP_PAGES:
                yield Fault("shape", where, "sees later positions, which the pages of a layer may not have yet")
        case Opcode.HEAD:
            yield from weight("weight", "matrix", item.integer("vocab"), item.integer("k"))
            yield from prologue(item.integer("k"))
            is_bare = item.integer("norm") == Norm.NONE and item.integer("k") == item.integer("vocab")
            if item.integer("weight") == NONE and not is_bare:
                yield Fault("shape", where, "without a weight the input is the logits, and has no norm")
            if item.integer("vocab") != program.spec.vocab_size:
                yield Fault("shape", where, f"vocab is not the model's {program.spec.vocab_size}")
        case Opcode.NORM:
            yield from prologue(item.integer("k"))
            yield from buffer("out", item.integer("k"))
            is_plain = item.integer("norm") == Norm.NONE
            if item.integer("epilogue") == Epilogue.GLU or (is_plain and item.integer("epilogue") != Epilogue.ADD):
                yield Fault("shape", where, "must norm and store, or add")
        case Opcode.PREPARE:
            k = item.integer("k")
            yield from weight("weight", "matrix", None, k)
            yield from buffer("input", k)
            yield from buffer("out", prepared_width(k))
        case Opcode.GATE:
            for name in ("gate", "up", "out"):
                yield from buffer(name, item.integer("width"))
        case Opcode.PICK:
            for name in ("input", "out"):
                yield from buffer(name, item.integer("k"))
        case Opcode.POOL:
            yield from prologue(item.integer("k"))
            yield from buffer("out", item.integer("k"))
        case Opcode.MOE:
            k, hidden, experts = item.integer("k"), item.integer("hidden"), item.integer("experts")
            yield from prologue(k)
            yield from buffer("out", k)
            yield from weight("router", "matrix", experts, k)
            yield from weight("gate_up", "matrix", experts * 2 * hidden, k)
            yield from weight("down", "matrix", experts * k, hidden)
            yield from interleaved("gate_up", experts)
            for name in ("router", "down"):
                yield from interleaved(name, 0)
            if item.integer("top_k") > experts:
                yield Fault("shape", where, f"a row takes {item.integer('top_k')} of {experts} experts")


def _heads(where: str, item: Instruction) -> Iterator[Fault]:
    if item.integer("heads") % item.integer("kv_heads"):
        yield Fault("shape", where, "query heads are no multiple of KV heads")
    if item.integer("head_size") % GROUP:
        yield Fault("shape", where, f"head size is no multiple of {GROUP}")


# Order and data flow


def _order(program: Program) -> Iterator[Fault]:
    opcodes = [item.opcode for item in program.instructions]
    if Opcode.HEAD in opcodes[:-1]:
        yield Fault("order", "program", "must end with HEAD where it has one")
    if not opcodes or opcodes[0] is not Opcode.EMBED:
        yield Fault("order", "program", "must start with EMBED")
    phase = 0
    for number, item in enumerate(program.instructions):
        if item.phase < phase:
            yield Fault("order", where_of(number, item), f"phase {item.phase} follows phase {phase}")
        phase = item.phase
    used = {index for item in program.instructions for index in weights_read(item)}
    for weight in program.weights:
        if weight.index not in used:
            yield Fault("order", f"weight {weight.index} ({weight.name})", "is never used")


_READS_FIRST = frozenset({Opcode.MOE})
"""Opcodes that have read all of their input before they write anything: input and output may be one buffer."""


def _flow(program: Program) -> Iterator[Fault]:
    written_at: dict[int, int] = {}
    unread: dict[int, str] = {}
    for number, item in enumerate(program.instructions):
        where, seen = where_of(number, item), effect(item)
        for index in (*seen.reads, *seen.updates):
            name = program.buffers[index].name
            if index not in written_at:
                yield Fault("read", where, f"{name} is read before it is written")
            unread.pop(index, None)
        for index in seen.reads if item.opcode not in _READS_FIRST else ():
            if index in (*seen.updates, *seen.writes):
                yield Fault("phase", where, f"reads {program.buffers[index].name} while it writes it")
        for index in seen.writes:
            if index in unread:
                yield Fault("order", unread[index], f"{program.buffers[index].name} is overwritten before it is read")
        for index in (*seen.updates, *seen.writes):
            written_at[index] = item.phase
            unread[index] = where
    for index in (NONE if (left := result(program)) is None else left, *program.kept):
        unread.pop(index, None)
    for index, where in unread.items():
        yield Fault("order", where, f"{program.buffers[index].name} is never read")
    yield from _hazards(program)


def _domains(program: Program) -> Iterator[Fault]:
    """Yields instructions that read rows of another domain than they have, or prepared rows as plain ones."""
    domains: dict[int, Domain] = {}
    prepared: set[int] = set()
    for number, item in enumerate(program.instructions):
        domain = domain_read(item)
        seen = effect(item)
        reads_prepared = item.values.get("norm") == Norm.PREPARED
        for index in (*seen.reads, *seen.updates):
            if (index in prepared) != (reads_prepared and index in seen.reads):
                yield Fault("shape", where_of(number, item), f"{program.buffers[index].name} is not what PREPARE gives")
        for index in seen.writes:
            (prepared.add if item.opcode is Opcode.PREPARE else prepared.discard)(index)
        for index in (*seen.reads, *seen.updates):
            if domains.get(index, domain) != domain:
                found = domains[index].name
                yield Fault("shape", where_of(number, item), f"{program.buffers[index].name} has one row for {found}")
        for index in seen.writes:
            domains[index] = domain_written(item)


def _hazards(program: Program) -> Iterator[Fault]:
    """Yields pairs of instructions of one phase of which one writes what the other touches, in either order."""
    by_phase: dict[int, list[tuple[str, set[int], set[int]]]] = {}
    for number, item in enumerate(program.instructions):
        seen = effect(item)
        changes = {*seen.updates, *seen.writes}
        touches = changes | set(seen.reads)
        for other, other_changes, other_touches in by_phase.setdefault(item.phase, []):
            if shared := (changes & other_touches) | (touches & other_changes):
                names = ", ".join(program.buffers[index].name for index in sorted(shared))
                yield Fault("phase", where_of(number, item), f"shares {names} with {other} in phase {item.phase}")
        by_phase[item.phase].append((where_of(number, item), changes, touches))


def _kv(program: Program) -> Iterator[Fault]:
    appended: dict[int, Instruction] = {}
    pool: tuple[int, int] | None = None
    unread: set[int] = set()
    last_read: int | None = None  # phase, of the step's own pages
    for number, item in enumerate(program.instructions):
        where = where_of(number, item)
        shape = [item.values.get(name) for name in ("kv_heads", "head_size")]
        if (layer := kv_written(item)) is not None:
            if layer in appended and (layer != STEP_PAGES or layer in unread):
                yield Fault("kv", where, f"layer {layer} is appended twice")
            if layer == STEP_PAGES and last_read is not None and last_read >= item.phase:
                yield Fault("kv", where, "pages of the step are read and written in one phase")
            unread.add(layer)
            appended[layer] = item
            if pool is not None and pool != tuple(shape):
                yield Fault("kv", where, f"pages of shape {shape} in a pool of {list(pool)}")
            pool = pool or (item.integer("kv_heads"), item.integer("head_size"))
        if (layer := kv_read(item)) is not None:
            unread.discard(layer)
            last_read = item.phase if layer == STEP_PAGES else last_read
            writer = appended.get(layer)
            if writer is None or writer.phase >= item.phase:
                yield Fault("kv", where, f"layer {layer} is read before its pages are appended")
            elif shape != [writer.values["kv_heads"], writer.values["head_size"]]:
                yield Fault("kv", where, f"layer {layer} is read as {shape}")
            elif writer.values["q_out"] != item.values["q"]:
                yield Fault("kv", where, f"layer {layer} is read with the queries of another instruction")
    for layer in range(program.spec.layers):
        if layer not in appended and STEP_PAGES not in appended:
            yield Fault("kv", "program", f"layer {layer} is never appended")


def _digest(program: Program) -> Iterator[Fault]:
    if seal(program).digest != program.digest:
        yield Fault("digest", "program", "is not the digest of this content")
