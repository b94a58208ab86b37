"""The text side of a model on disk, from both kinds of files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.base.errors import ContextLengthError, ModelFormatError, RequestError
from headrace.gateway.kit import load_kit
from headrace.gateway.render import Renderer
from headrace.protocol.openai import parse_chat, parse_completion
from headrace.testing.tiny import write_tiny_gguf, write_tiny_llama

CHAT = b'{"model":"m","messages":[{"role":"user","content":"Hi \xc3\xa9"}]}'


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
async def test_a_chat_becomes_its_template_in_tokens(tmp_path: Path, kind: str) -> None:
    kit = load_kit(write_tiny_llama(tmp_path) if kind == "safetensors" else write_tiny_gguf(tmp_path / "m.gguf"))

    with ThreadPoolExecutor(1) as executor:
        prompts = await Renderer(kit, executor).render(parse_chat(CHAT), 512)
    text = b"".join(map(kit.tokenizer.token_bytes, prompts[0].ids)).decode()
    kit.close()

    assert text == "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n"


async def test_an_echoed_prompt_knows_where_its_tokens_start(tmp_path: Path) -> None:
    kit = load_kit(write_tiny_llama(tmp_path))
    request = parse_completion('{"model":"m","prompt":"Grass é","echo":true,"logprobs":1}'.encode())

    with ThreadPoolExecutor(1) as executor:
        prompt = (await Renderer(kit, executor).render(request, 512))[0]
    kit.close()

    assert prompt.text == "Grass é"
    assert len(prompt.offsets) == len(prompt.ids)
    assert list(prompt.offsets) == sorted(prompt.offsets)
    assert prompt.offsets[0] == 0


async def test_ids_given_by_the_client_are_taken_as_they_are(tmp_path: Path) -> None:
    kit = load_kit(write_tiny_llama(tmp_path))

    with ThreadPoolExecutor(1) as executor:
        prompts = await Renderer(kit, executor).render(parse_completion(b'{"model":"m","prompt":[[5,6],[7]]}'), 512)
    kit.close()

    assert [prompt.ids for prompt in prompts] == [[5, 6], [7]]


async def test_a_text_beyond_any_context_is_refused_before_it_is_tokenised(tmp_path: Path) -> None:
    kit = load_kit(write_tiny_llama(tmp_path))
    request = parse_completion(b'{"model":"m","prompt":"' + b"a" * 100_000 + b'"}')

    with ThreadPoolExecutor(1) as executor, pytest.raises(ContextLengthError) as caught:
        await Renderer(kit, executor).render(request, 512)
    kit.close()

    assert "maximum context length is 512 tokens" in caught.value.message
    assert "100000" in caught.value.message


async def test_a_model_without_template_refuses_conversations(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    kit = load_kit(folder)

    with ThreadPoolExecutor(1) as executor, pytest.raises(RequestError) as caught:
        await Renderer(kit, executor).render(parse_chat(CHAT), 512)
    kit.close()

    assert caught.value.param == "messages"


def test_a_model_without_tokenizer_is_no_model(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    (folder / "tokenizer.json").unlink()

    with pytest.raises(ModelFormatError):
        load_kit(folder)
