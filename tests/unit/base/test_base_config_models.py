"""``models:`` in the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.config import Config, load_config
from headrace.base.errors import ConfigError

TWO = """
inference_engine:
  max_batch_size: 8
kernel_config: {dtype: fp32}
models:
  org/talk:
    inference_engine: {model_path: demo, served_name: "chat, talk", thread_share: 2}
    kernel_config:
      max_sequence_length: 512
  vectors:
    inference_engine: {model_path: /data/minilm, max_batch_size: 4}
    server: {max_concurrent_requests: 3}
    limits: {default_chat_tokens: 7}
"""


def load(folder: Path, text: str, **flags: object) -> Config:
    file = folder / "headrace.yaml"
    file.write_text(text)
    return load_config(file, {}, {key.replace("__", "."): value for key, value in flags.items()})


def test_each_model_has_the_common_settings_and_its_own(tmp_path: Path) -> None:
    config = load(tmp_path, TWO, server__port=9)

    talk, vectors = config.models["org/talk"], config.models["vectors"]
    assert list(config.models) == ["org/talk", "vectors"]
    assert (talk.inference_engine.max_batch_size, vectors.inference_engine.max_batch_size) == (8, 4)
    assert talk.kernel_config.dtype == vectors.kernel_config.dtype == "fp32"
    assert (talk.kernel_config.max_sequence_length, vectors.kernel_config.max_sequence_length) == (512, None)
    assert (talk.server.max_concurrent_requests, vectors.server.max_concurrent_requests) == (512, 3)
    assert talk.server.port == vectors.server.port == 9
    assert (talk.inference_engine.thread_share, vectors.limits.default_chat_tokens) == (2, 7)
    assert vectors.origins["server.max_concurrent_requests"] == f"{tmp_path / 'headrace.yaml'}:12"
    assert vectors.origins["kernel_config.dtype"] == f"{tmp_path / 'headrace.yaml'}:4"


def test_settings_without_models_have_none(tmp_path: Path) -> None:
    assert load(tmp_path, "inference_engine: {model_path: demo}").models == {}


def test_models_of_the_command_line_are_like_those_of_the_file() -> None:
    sources = {"a": {"inference_engine.model_path": "demo"}, "b": {"inference_engine.model_path": "/b"}}

    config = load_config(None, {"HEADRACE_KERNEL_CONFIG_DTYPE": "fp32"}, {}, sources)

    assert [model.inference_engine.model_path for model in config.models.values()] == ["demo", "/b"]
    assert {model.kernel_config.dtype for model in config.models.values()} == {"fp32"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: {}", "holds no model"),
        ("models: [demo]", ":1: models must be a map"),
        ("models:\n  a: demo", ":2: models.a must be a map"),
        ("models:\n  a: {kernel_config: {dtype: bf16}}", "models.a needs inference_engine.model_path"),
        ("models:\n  a:\n    inference_engine: {model_pth: demo}", ":3: unknown key .*did you mean model_path"),
        ("models:\n  a:\n    engines: {model_path: demo}", ":3: unknown section 'engines'"),
        ("models:\n  a:\n    server: {port: 9}", ":3: server.port belongs to the whole server"),
        ("models:\n  a:\n    store: {url: x}", ":3: store.url belongs to the whole server"),
        ("models:\n  a:\n    inference_engine: {model_path: demo, threads: 0}", "threads is 0"),
        ("models:\n  a:\n    inference_engine: {model_path: demo, thread_share: 0}", "thread_share is 0"),
        ("models:\n  'a,b': {inference_engine: {model_path: demo}}", ":2: 'a,b' is no model name"),
        ("models:\n  '': {inference_engine: {model_path: demo}}", "is no model name"),
        ("models:\n  a: {}\n  a: {}", ":3: a stands twice"),
        ("models:\n  a: {}\nmodels:\n  b: {}", ":3: models stands twice"),
        (TWO.replace('"chat, talk"', "vectors"), "the name 'vectors' belongs to models.org/talk and models.vectors"),
        (TWO.replace("max_batch_size: 8", "model_path: demo"), ":3: .*model_path can be meant of one model only"),
        (TWO.replace("max_batch_size: 8", "served_name: x"), "served_name can be meant of one model only"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, text)


def test_a_flag_that_names_one_model_is_refused_beside_several(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"flag --model-path: .*set it in one of org/talk, vectors"):
        load(tmp_path, TWO, inference_engine__model_path="demo")
    with pytest.raises(ConfigError, match="the command line names others"):
        load_config(tmp_path / "headrace.yaml", {}, {}, {"a": {"inference_engine.model_path": "demo"}})
