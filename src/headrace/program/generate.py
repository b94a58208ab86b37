"""Writes ``csrc/gen/opcodes.h`` from the opcode table. ``--check`` only says whether the file is fresh."""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.program import opcodes as table

HEADER_PATH = Path(__file__).parents[3] / "csrc" / "gen" / "opcodes.h"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.lower().split("_"))


def _enum(name: str, members: list[tuple[str, int]]) -> list[str]:
    rows = [f"  k{_camel(member)} = {value}," for member, value in members]
    return [f"enum class {name} : int32_t {{", *rows, "};", ""]


def _struct(name: str, fields: list[tuple[str, str, str]]) -> list[str]:
    rows = [f"  {c_type} {field};  // {meaning}" for field, c_type, meaning in fields]
    return [f"struct {name} {{", *rows, "};", ""]


def render() -> str:
    """Returns the header's text."""
    c_scalar = {"i32": "int32_t", "f32": "float", "u64": "uint64_t"}
    out = [
        "// Generated from program/opcodes.py by `python -m headrace.program.generate`. Do not edit.",
        "#pragma once",
        "",
        "#include <cstdint>",
        "#include <cstring>",
        "",
        "namespace headrace {",
        "",
        f"inline constexpr int32_t kRecordBytes = {table.RECORD_BYTES};",
        f"inline constexpr int32_t kBlockTokens = {table.BLOCK_TOKENS};",
        f"inline constexpr int32_t kLanes = {table.LANES};",
        f"inline constexpr int32_t kGroup = {table.GROUP};",
        f"inline constexpr int32_t kMaxLogprobs = {table.MAX_LOGPROBS};",
        f"inline constexpr int32_t kStepPages = {table.STEP_PAGES};",
        f"inline constexpr int32_t kOpcodeCount = {max(table.Opcode) + 1};",
        "",
    ]
    for enum in (
        table.Opcode,
        table.Norm,
        table.Epilogue,
        table.Activation,
        table.Domain,
        table.Pooling,
        table.Layout,
        table.KvType,
    ):
        out += _enum(enum.__name__, [(member.name, int(member)) for member in enum])
    header = [(f.name, table.C_TYPES[f.type], f.meaning) for f in table.HEADER]
    for opcode, fields in table.FIELDS.items():
        # 8-byte fields go first so that the packed Python form and the C++ form agree without padding.
        ordered = table.ordered(fields)
        name = _camel(opcode.name) + "Record"
        out += _struct(name, header + [(f.name, table.C_TYPES[f.type], f.meaning) for f in ordered])
        out += [f"static_assert(sizeof({name}) <= kRecordBytes);", ""]
    out += [
        "// One instruction as it lies in memory; `as` views it as the struct of its opcode.",
        "struct alignas(kRecordBytes) Record {",
        "  unsigned char bytes[kRecordBytes];",
        "  Opcode opcode() const {",
        "    int32_t value;",
        "    std::memcpy(&value, bytes, sizeof value);",
        "    return static_cast<Opcode>(value);",
        "  }",
        "  int32_t phase() const {",
        "    int32_t value;",
        "    std::memcpy(&value, bytes + 4, sizeof value);",
        "    return value;",
        "  }",
        "  template <typename T>",
        "  T as() const {",
        "    T value;",
        "    std::memcpy(&value, bytes, sizeof value);",
        "    return value;",
        "  }",
        "};",
        "",
    ]
    for name, rows in (("OutputRow", table.OUTPUT_FIELDS), ("ResultRow", table.RESULT_FIELDS)):
        out += _struct(name, [(f, c_scalar[t], m) for f, t, m in table.ordered_rows(rows)])
        size = sum(8 if t == "u64" else 4 for _, t, _ in rows)
        size += -size % (8 if any(t == "u64" for _, t, _ in rows) else 4)
        out += [f"static_assert(sizeof({name}) == {size});", ""]
    out += ["}  // namespace headrace", ""]
    return "\n".join(out)


def main() -> int:
    """Writes the header, or with ``--check`` returns 1 when it is stale."""
    text = render()
    if "--check" in sys.argv[1:]:
        fresh = HEADER_PATH.exists() and HEADER_PATH.read_text() == text
        if not fresh:
            sys.stderr.write(f"{HEADER_PATH} is stale: run python -m headrace.program.generate\n")
        return 0 if fresh else 1
    HEADER_PATH.parent.mkdir(parents=True, exist_ok=True)
    HEADER_PATH.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
