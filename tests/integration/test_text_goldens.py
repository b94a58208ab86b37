"""The 15 golden vocabularies token for token, and the 70 chat templates as transformers renders them.

Both come from llama.cpp's own tests, see scripts/fetch-goldens; what transformers made of the templates is committed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.registry.cache import default_cache_path
from headrace.registry.formats.gguf import open_gguf
from headrace.testing.chats import CASES, NOW, fingerprint, variables_of
from headrace.text.sandbox import Sandbox, SandboxError, SandboxLimits
from headrace.text.tokenizer import Tokenizer

FOLDER = default_cache_path() / "goldens/llama-cpp-python-0.3.36"
SEPARATOR = "\n__ggml_vocab_test__\n"
VOCABULARIES = [
    "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm",
    "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
]  # fmt: skip
LOSSY = ("bert-bge",)  # drops case and white space
TEMPLATES: dict[str, dict[str, str | None]] = json.loads(
    (Path(__file__).parents[1] / "golden/templates.json").read_text()
)

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the golden vocabularies are not in the cache")


@pytest.mark.parametrize("name", VOCABULARIES)
def test_golden_vocabulary_is_token_exact(name: str) -> None:
    path = FOLDER / f"ggml-vocab-{name}.gguf"
    tokenizer = Tokenizer.from_gguf(open_gguf(path).metadata)
    with path.with_suffix(".gguf.inp").open(encoding="utf-8", newline="") as file:
        texts = file.read().split(SEPARATOR)
    lines = path.with_suffix(".gguf.out").read_text("utf-8").split("\n")[: len(texts)]

    found = [tokenizer.encode(text, add_special=False) for text in texts]

    assert len(texts) >= 46
    assert found == [[int(word) for word in line.split()] for line in lines]
    if name not in LOSSY:
        assert [tokenizer.decode(ids, skip_special=False) for ids in found] == texts


def test_65_templates_render_the_plain_chat_and_5_refuse_it() -> None:
    renders = {name: cases["chat"] is not None for name, cases in TEMPLATES.items()}

    assert len(renders) == 70
    assert sum(renders.values()) == 65
    assert {path.name for path in (FOLDER / "templates").glob("*.jinja")} == set(renders)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_template_renders_as_transformers_does(name: str) -> None:
    sandbox = Sandbox({"": (FOLDER / "templates" / name).read_text("utf-8")}, SandboxLimits(cpu_s=5.0))
    found: dict[str, str | None] = {}
    try:
        sandbox.load()
        for case in CASES:
            try:
                found[case] = fingerprint(sandbox.render("", variables_of(CASES[case]), list(NOW)))
            except SandboxError:
                found[case] = None
    finally:
        sandbox.close()

    assert found == TEMPLATES[name]
