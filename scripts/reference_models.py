"""The page of models for ``scripts/reference``: families, formats and how each is tested, from registries and tests.

What is tested is read out of the tests themselves, from the parameters that they are run with; a test that was renamed
makes this fail rather than promise too much.
"""

from __future__ import annotations

import ast
import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from headrace.engine.quantize import PACKABLE, QUANTIZATIONS, choose_layout
from headrace.program.families.registry import FAMILIES, GGUF_FAMILIES, HF_FAMILIES
from headrace.testing.tiny_families import CASES, ENCODERS
from headrace.text.styles import known_pre_tokenizers

TESTS = Path(__file__).parents[1] / "tests"
GOLDENS = "integration/test_family_goldens.py"
ENCODER_GOLDENS = "integration/test_encoder_goldens.py"
CONTRACT = "integration/test_family_determinism.py"
PACKING = "unit/kernels/test_kernels_pack.py"
LOADING = "unit/engine/test_engine_weights_native.py"
ABOUT_FAMILIES = f"""
Cases are tiny random models whose logits (or vectors) on the exact path are held against transformers, relative error
at most 1e-4 (`tests/{GOLDENS}`, `tests/{ENCODER_GOLDENS}`). *GGUF cases* are the same models as llama.cpp's converter
writes them. *Every instruction set*: the same on each that the machine has, scalar included; other cases run on its
best. *Contract*: a request's tokens do not depend on batch, chunks, cache or threads (`tests/{CONTRACT}`).
"""
ABOUT_FORMATS = """
How a matrix is stored, and the layout that it is packed to as it is and under `quantization: int8` and `int4`.
`int4` keeps embedding, head, q, k and v at Q8, and in models narrower than 1024 `o` and `down` too ([decision
21](../decisions/0021-int4-keeps-eight-bits.md)). `dtype: fp32` packs everything as F32. Every layout has kernels on
scalar, AVX2, AVX-512 and AVX-512 BF16 (`headrace doctor` shows them; `tests/differential` holds each instruction set
that the machine has against the reference).
"""
ABOUT_VOCABULARIES = """
`tokenizer.json`, `tokenizer.model` (SentencePiece BPE and Unigram), `tekken.json`, and GGUF's own: `gpt2`, `llama`,
`gemma4`, `t5`, `bert`. Pre-tokenizers of `gpt2` vocabularies: {}. Tested token by token against llama.cpp's 15 golden
vocabularies (`tests/integration/test_text_goldens.py`) and against SentencePiece and mistral-common
(`tests/unit/text/test_text_tokenizer_files.py`).
"""
Table = Callable[[tuple[str, ...], list[tuple[str, ...]]], str]


@cache
def module(file: str) -> ast.Module:
    return ast.parse((TESTS / file).read_text())


def parameters(file: str, test: str, argument: str) -> list[str]:
    """Returns what ``argument`` of a parametrized test is run with."""
    for node in module(file).body:
        if isinstance(node, ast.FunctionDef) and node.name == test:
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and getattr(decorator.args[0], "value", None) == argument:
                    return list(evaluate(file, decorator.args[1]))
    sys.exit(f"tests/{file} has no {test} with the parameter {argument!r}: scripts/reference_models.py must follow")


def evaluate(file: str, node: ast.expr) -> Any:
    """Returns the value of a test's list of parameters; names are the module's own or those of ``testing``."""
    known: dict[str, object] = {"CASES": CASES, "ENCODERS": ENCODERS}
    for statement in module(file).body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        value = getattr(statement, "value", None)
        if not isinstance(target, ast.Name) or value is None:
            continue
        if isinstance(value, ast.Dict):  # its values may be anything; the keys are what a test is run with
            known[target.id] = [ast.literal_eval(key) for key in value.keys if key is not None]
        elif isinstance(value, ast.Set | ast.List | ast.Tuple):
            with contextlib.suppress(ValueError):  # not plain values: no list of parameters that is read here
                known[target.id] = ast.literal_eval(value)
    known["CONVERTED"] = json.loads((TESTS / "golden/families_gguf.json").read_text())
    return eval(compile(ast.Expression(node), file, "eval"), known)  # our own tests


def prose(text: str) -> str:
    return " ".join(text.split()) + "\n"


def case_family(case: str) -> str:
    config: Mapping[str, Any] = {**CASES, **ENCODERS}[case]
    return HF_FAMILIES[config["architectures"][0]].NAME


def of_family(name: str, cases: list[str]) -> str:
    found = sorted({case for case in cases if case_family(case) == name})
    return ", ".join(found) or "–"


def models(table: Table) -> str:
    exact = parameters(GOLDENS, "test_logits_are_those_of_transformers", "case")
    encoders = parameters(ENCODER_GOLDENS, "test_vectors_are_those_of_transformers", "case")
    converted = json.loads((TESTS / "golden/families_gguf.json").read_text())
    gguf = list(converted)
    every_isa = [*parameters(GOLDENS, "test_every_instruction_set_gives_the_same_model", "case"), *encoders]
    contract = parameters(CONTRACT, "test_a_family_keeps_the_contract", "case")
    contract += parameters(ENCODER_GOLDENS, "test_a_text_alone_has_the_same_bits_as_in_company", "case")
    families = []
    for name in sorted(FAMILIES):
        hf = [f"`{key}`" for key, family in HF_FAMILIES.items() if name == family.NAME]
        own = [key for key, family in GGUF_FAMILIES.items() if name == family.NAME]
        # Mixtral, for one, is written under llama's name.
        shared = [converted[case]["architecture"] for case in gguf if case_family(case) == name]
        in_gguf = [f"`{key}`" for key in dict.fromkeys([*own, *shared])]
        families.append(
            (
                name,
                ", ".join(hf) or "–",
                ", ".join(in_gguf) or "–",
                of_family(name, [*exact, *encoders]),
                of_family(name, gguf),
                of_family(name, every_isa),
                "yes" if of_family(name, contract) != "–" else "–",
            )
        )
    bit_exact = parameters(PACKING, "test_every_gguf_type_dequantises_bit_for_bit_as_the_reference_does", "kind")
    loaded = parameters(LOADING, "test_packed_weights_hold_the_stored_values", "kind")
    formats = []
    for kind in PACKABLE:
        layouts = [
            choose_layout([kind], "bf16", quantization, has_eight_bits=False).name for quantization in QUANTIZATIONS
        ]
        is_packed = kind.startswith(("AWQ", "GPTQ"))
        where = "safetensors" if is_packed else "safetensors, GGUF" if kind in ("F32", "F16", "BF16") else "GGUF"
        tested = []
        if kind in bit_exact:
            tested.append(f"bit for bit as the `gguf` package (`tests/{PACKING}`)")
        if kind in loaded:
            tested.append(f"a whole file loads with its values (`tests/{LOADING}`)")
        if is_packed:
            tested.append("as its four bits say, act-ordered or not (`tests/unit/engine/test_engine_packed_linear.py`)")
        formats.append((kind, where, *layouts, "; ".join(tested) or "–"))
    columns = ("family", "config.json", "GGUF", "safetensors cases", "GGUF cases", "every instruction set", "contract")
    return "\n".join(
        [
            "# Models\n",
            "What the native engine runs. Anything else is refused by name; `--engine vllm` may run it.\n",
            "## Families\n",
            prose(ABOUT_FAMILIES),
            table(columns, families),
            "## Weight formats\n",
            prose(ABOUT_FORMATS),
            table(("stored", "files", "as it is", "int8", "int4", "tested"), formats),
            "## Vocabularies\n",
            prose(ABOUT_VOCABULARIES.format(", ".join(f"`{name}`" for name in known_pre_tokenizers()))),
        ]
    )
