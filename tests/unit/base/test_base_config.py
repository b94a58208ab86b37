import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.config import MAX_FILE_BYTES, find_config_file, list_settings, load_config
from headrace.base.errors import ConfigError

FRAGMENT = """\
inference_engine:
  model_path: "/data/models/decoder-only-llm"
  architecture: "decoder-only"     # or encoder-only, encoder-decoder; checked against the model itself
  tensor_parallel_size: 2
  kv_cache_ratio: 0.9
  max_batch_size: 32
  quantization: "none"             # int8, int4
kernel_config:
  max_sequence_length: 2048
  batch_size: 64
  dtype: bf16
  attention_window: 1024
  kv_cache_size: 4096
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "headrace.yaml"
    file.write_text(text)
    return file


def test_runbook_fragment_loads_as_it_stands(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, FRAGMENT), {}, {})

    assert config.inference_engine.model_path == "/data/models/decoder-only-llm"
    assert config.inference_engine.max_batch_size == 32
    assert config.kernel_config.batch_size == 64
    assert config.origins["kernel_config.dtype"] == f"{tmp_path}/headrace.yaml:11"


@pytest.mark.parametrize(
    "half", [FRAGMENT.partition("kernel_config")[0], "kernel_config" + FRAGMENT.partition("kernel_config")[2]]
)
def test_each_fragment_loads_alone(tmp_path: Path, half: str) -> None:
    load_config(write(tmp_path, half), {}, {})


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = write(tmp_path, "server: {port: 1, fronts: 2, drain_s: 3}")
    env = {"HEADRACE_SERVER_PORT": "10", "HEADRACE_SERVER_FRONTS": "20"}

    config = load_config(file, env, {"server.port": 100, "server.host": None})

    assert (config.server.port, config.server.fronts, config.server.drain_s) == (100, 20, 3.0)
    assert config.server.host == "127.0.0.1"
    origins = [config.origins[f"server.{name}"] for name in ("port", "fronts", "drain_s", "host")]
    assert origins == ["flag --port", "env HEADRACE_SERVER_FRONTS", f"{file}:1", "default"]
    assert not config.is_given("server.host")
    assert config.value("server.port") == 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server:\n  prot: 1\n", r"headrace\.yaml:2: unknown key server\.prot: did you mean port\?"),
        ("\nsevrer:\n  port: 1\n", r"headrace\.yaml:2: unknown section 'sevrer': did you mean server\?"),
        ("server:\n  dtype: bf16\n", r":2: unknown key server\.dtype: did you mean kernel_config\.dtype\?"),
        ("port: 8000\n", r":1: unknown section 'port': did you mean server\.port\?"),
        ("server:\n  port: 1\n  port: 2\n", r":3: port stands twice, first at .*:2"),
        ("server: {}\nserver: {}\n", r":2: server stands twice"),
        ("server:\n  port: [1]\n", r":2: server\.port takes one value"),
        ("server:\n  port: many\n", r":2: server\.port is 'many': input should be a valid integer"),
        ("server:\n  port: yes\n", r":2: server\.port is True: input should be a valid integer"),
        ("server:\n  port: 70000\n", r":2: server\.port is 70000: input should be less than or equal to 65535"),
        ("server:\n  drain_s: .inf\n", r":2: server\.drain_s is inf"),
        ("server:\n  drain_s: .nan\n", r":2: server\.drain_s is nan"),
        ("server:\n  host: 1\n", r":2: server\.host is 1: input should be a valid string"),
        ("kernel_config:\n  dtype: bf17\n", r":2: kernel_config\.dtype is 'bf17': input should be 'bf16', 'fp32' or"),
        ("server:\n- port\n", r":2: server must be a map"),
        ("hello", r":1: the file must be a map"),
        ("a: b: c", r":1: not YAML"),
        ("server:\n\tport: 1\n", r":2: not YAML"),
        ("? [a]\n: b\n", r":1: a key must be a word"),
        ("server:\n  port: !!python/object/apply:os.system [x]\n", r":2: server\.port takes one value"),
        ("server:\n  host: !!python/name:os.system x\n", r":2: not YAML"),
        ("a: &a [*a]\n", r"unknown section"),
        ("---\nserver: {}\n---\nserver: {}\n", r"not YAML: but found another document"),
    ],
)
def test_wrong_file_names_line_key_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text), {}, {})


def test_every_wrong_value_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "server:\n  port: -1\n  fronts: 0\n"), {}, {})

    assert [line.split(": ")[1].split(" ")[0] for line in caught.value.message.splitlines()] == [
        "server.port",
        "server.fronts",
    ]


@pytest.mark.parametrize("text", ["", "# nothing\n", "server:\n", "{}"])
def test_file_that_sets_nothing_is_good(tmp_path: Path, text: str) -> None:
    config = load_config(write(tmp_path, text), {}, {})

    assert set(config.origins.values()) == {"default"}


def test_missing_binary_and_oversized_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml", {}, {})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path, {}, {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 0"):
        load_config(tmp_path / "binary", {}, {})
    (tmp_path / "big").write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="over 1048576 bytes"):
        load_config(tmp_path / "big", {}, {})


def test_deep_nesting_is_refused_and_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_config(write(tmp_path, "[" * 100_000), {}, {})


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("HEADRACE_SERVER_PORT", "9", "server.port", 9),
        ("HEADRACE_SERVER_DRAIN_S", "5", "server.drain_s", 5.0),
        ("HEADRACE_INFERENCE_ENGINE_QUANTIZATION", "none", "inference_engine.quantization", "none"),
        ("HEADRACE_INFERENCE_ENGINE_SERVED_NAME", "123", "inference_engine.served_name", "123"),
        ("HEADRACE_INFERENCE_ENGINE_THREADS", "", "inference_engine.threads", None),
        ("HEADRACE_INFERENCE_ENGINE_PREFIX_CACHE", "false", "inference_engine.prefix_cache", False),
        ("HEADRACE_KERNEL_CONFIG_DTYPE", "fp32", "kernel_config.dtype", "fp32"),
    ],
)
def test_environment_is_read_by_each_settings_type(name: str, text: str, key: str, value: object) -> None:
    assert load_config(None, {name: text}, {}).value(key) == value


def test_unknown_variable_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown variable HEADRACE_SEVER_PORT: the nearest is HEADRACE_SERVER_PORT"):
        load_config(None, {"HEADRACE_SEVER_PORT": "1"}, {})


def test_variables_of_others_are_left_alone() -> None:
    env = {
        "PATH": "/bin",
        "HEADRACE_CONFIG": "x.yaml",
        "HEADRACE_PORT": "tcp://10.0.0.1:80",
        "HEADRACE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "HEADRACE_SERVICE_HOST": "10.0.0.1",
        "HEADRACE_SERVICE_PORT_HTTP": "80",
    }

    assert set(load_config(None, env, {}).origins.values()) == {"default"}


def test_wrong_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"env HEADRACE_SERVER_PORT: server\.port is 'x'"):
        load_config(None, {"HEADRACE_SERVER_PORT": "x"}, {})


def test_file_is_the_named_one_then_the_variables_then_the_folders(tmp_path: Path) -> None:
    env = {"HEADRACE_CONFIG": "/etc/x.yaml"}

    assert find_config_file(Path("a.yaml"), env, tmp_path) == Path("a.yaml")
    assert find_config_file(None, env, tmp_path) == Path("/etc/x.yaml")
    assert find_config_file(None, {}, tmp_path) is None
    write(tmp_path, "")
    assert find_config_file(None, {}, tmp_path) == tmp_path / "headrace.yaml"


@pytest.mark.parametrize(
    ("setting", "is_terminal", "expected"),
    [("auto", True, False), ("auto", False, True), ("json", True, True), ("text", False, False)],
)
def test_log_is_text_only_where_somebody_watches(setting: str, is_terminal: bool, expected: bool) -> None:
    assert load_config(None, {}, {"log.format": setting}).is_log_json(is_terminal=is_terminal) is expected


def test_every_setting_has_a_description_and_a_variable_of_its_own() -> None:
    settings = list_settings()

    assert all(setting.description.endswith((".", ").")) or setting.description for setting in settings)
    assert len({setting.env for setting in settings}) == len(settings)


MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "drop", "insert"]), st.floats(0, 1, exclude_max=True), st.binary(max_size=8)
    ),
    min_size=1,
    max_size=4,
)


def mutate(raw: bytes, kind: str, at: float, extra: bytes) -> bytes:
    index = int(at * len(raw))
    match kind:
        case "flip" if raw:
            return raw[:index] + bytes([raw[index] ^ 1 << len(extra) % 8]) + raw[index + 1 :]
        case "cut":
            return raw[:index]
        case "drop":
            return raw[:index] + raw[index + 2 * len(extra) :]
        case _:
            return raw[:index] + extra + raw[index:]


@given(mutations=MUTATIONS)
def test_mutated_file_loads_or_is_a_config_error(
    mutations: list[tuple[str, float, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = FRAGMENT.encode()
    for kind, at, extra in mutations:
        raw = mutate(raw, kind, at, extra)
    file = tmp_path_factory.getbasetemp() / "mutated.yaml"
    file.write_bytes(raw)

    with contextlib.suppress(ConfigError):  # any other exception fails the test
        config = load_config(file, {}, {})
        assert 1 <= (config.inference_engine.max_batch_size or 1) <= 4096
