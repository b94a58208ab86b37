import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from headrace.base.exits import Exit
from headrace.cli import main
from headrace.cli.deployment import names_of
from headrace.cli.main import make_app
from headrace.cli.models import find_model
from headrace.engine.packed_file import Header, write_packed
from headrace.engine.weights import PackedWeight
from headrace.program.opcodes import Layout
from headrace.registry.cache import publish
from headrace.testing.tiny import write_tiny_llama

COMMANDS = [
    "serve", "pull", "status", "doctor", "models list", "models show", "models verify", "models remove",
    "config show", "config check", "bench engine", "bench quality", "bench serve", "bench report", "bench compare",
    "bench sweep", "bench data", "bench history add", "bench history check",
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folders in a temporary place, and an empty working folder."""
    for name in list(os.environ):
        if name.startswith("HEADRACE_"):
            monkeypatch.delenv(name)
    for kind in ("CACHE", "STATE", "RUNTIME"):
        folder = tmp_path / kind.lower()
        folder.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR" if kind == "RUNTIME" else f"XDG_{kind}_HOME", str(folder))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(make_app(), list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    text = invoke(*command.split(), "--help")

    assert "Usage" in text
    assert "--json" in text


def test_help_of_every_option_is_there() -> None:
    def walk(command: object) -> None:
        for parameter in command.params:  # type: ignore[attr-defined]
            assert parameter.name == "help" or parameter.help, f"{command.name}: {parameter.name}"  # type: ignore[attr-defined]
        for child in getattr(command, "commands", {}).values():
            walk(child)

    walk(typer.main.get_command(make_app()))


def test_config_show_gives_values_with_origins_and_fixed_limits(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("headrace.yaml").write_text("server:\n  port: 9\n")
    monkeypatch.setenv("HEADRACE_SERVER_FRONTS", "2")

    shown = json.loads(invoke("config", "show", "--json"))

    assert shown["settings"]["server.port"] == {"value": 9, "origin": f"{home}/work/headrace.yaml:2"}
    assert shown["settings"]["server.fronts"] == {"value": 2, "origin": "env HEADRACE_SERVER_FRONTS"}
    assert shown["settings"]["kernel_config.dtype"] == {"value": "bf16", "origin": "default"}
    assert shown["fixed_limits"]["json_depth"] == {"value": 64, "origin": "fixed"}


def test_config_show_fits_no_terminal_and_cuts_nothing(home: Path) -> None:
    text = invoke("config", "show")

    assert "inference_engine.tensor_parallel_size" in text
    assert "…" not in text


def test_config_check_tells_settings_that_the_model_contradicts(home: Path, tiny: Path) -> None:
    Path("headrace.yaml").write_text(
        f"inference_engine: {{model_path: {tiny}, max_batch_size: 4}}\n"
        "kernel_config: {batch_size: 2, attention_window: 64}\n"
    )

    checked = json.loads(invoke("config", "check", "--json"))

    assert checked["is_model_checked"]
    assert [warning["key"] for warning in checked["warnings"]] == [
        "kernel_config.batch_size",
        "kernel_config.attention_window",
    ]


def test_config_check_without_the_model_says_so(home: Path) -> None:
    assert "the model is not here" in invoke("config", "check")


def broken_models(home: Path, tiny: Path) -> dict[str, Path]:
    places = {name: home / name for name in ("empty", "truncated", "foreign", "scripted")}
    for name, place in places.items():
        place.mkdir()
        for file in tiny.iterdir() if name != "empty" else ():
            (place / file.name).write_bytes(file.read_bytes())
    weights = places["truncated"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for name, change in (("foreign", {"architectures": ["FooForCausalLM"]}), ("scripted", {"auto_map": {"a": "b.C"}})):
        config = places[name] / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    (home / "wrong").write_text("inference_engine: {architecture: encoder-only}")
    return {**places, "wrong": home / "wrong"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param(["nonsense"], Exit.USAGE, "No such command", id="unknown command"),
        pytest.param(["serve", "--nonsense"], Exit.USAGE, "No such option", id="unknown option"),
        pytest.param(["serve", "--port", "x"], Exit.USAGE, "--port", id="malformed option"),
        pytest.param(["serve", "--port", "70000"], Exit.USAGE, "server.port is 70000", id="option out of range"),
        pytest.param(
            ["config", "check", "--config", "none.yaml"], Exit.USAGE, "none.yaml: cannot be read", id="no file"
        ),
        pytest.param(["serve", "/no/such/model"], Exit.SOURCE, "there is no such file or folder", id="no model"),
        pytest.param(["serve", "hf:not-a-source"], Exit.SOURCE, "is not a hub source", id="malformed source"),
        pytest.param(["models", "show", "none"], Exit.SOURCE, "is not in the cache", id="model not fetched"),
        pytest.param(["serve", "{tiny}", "--engine", "vllm"], Exit.USAGE, "not in this release", id="other engine"),
        pytest.param(["serve", "{tiny}", "--tensor-parallel-size", "99"], Exit.USAGE, "--engine vllm", id="shards"),
        pytest.param(["serve", "{tiny}", "--host", "0.0.0.0"], Exit.USAGE, "no keys are set", id="open address"),
        pytest.param(["serve", "{truncated}"], Exit.MODEL, "model.safetensors", id="truncated weights"),
        pytest.param(["serve", "{foreign}"], Exit.MODEL, "FooForCausalLM", id="unknown family"),
        pytest.param(["serve", "{scripted}"], Exit.MODEL, "none is run", id="model with code"),
        pytest.param(
            ["serve", "{tiny}", "--config", "{wrong}"], Exit.USAGE, "the model is decoder-only", id="other class"
        ),
        pytest.param(["serve", "{empty}"], Exit.MODEL, "neither a .safetensors nor a .gguf", id="empty folder"),
    ],
)
def test_wrong_start_ends_with_one_line_and_its_code(
    home: Path, tiny: Path, arguments: list[str], code: Exit, message: str
) -> None:
    places = broken_models(home, tiny)

    done = headrace(*(word.format(tiny=tiny, **places) for word in arguments))

    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_serve_refuses_to_start_without_the_native_library(home: Path, tiny: Path) -> None:
    code = (
        "import sys; sys.modules['headrace.kernels._native'] = None; from headrace.cli.main import run;"
        f"sys.argv = ['headrace', 'serve', {str(tiny)!r}]; run()"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == Exit.MACHINE
    assert "the native library does not load" in done.stderr


@pytest.mark.parametrize("command", [["serve", "{tiny}"], ["doctor"]], ids=["serve", "doctor"])
def test_another_machine_is_refused_by_name(home: Path, tiny: Path, command: list[str]) -> None:
    words = ["headrace", *(word.format(tiny=tiny) for word in command)]
    code = (
        "import platform, sys; platform.machine = lambda: 'aarch64'; from headrace.cli.main import run;"
        f"sys.argv = {words!r}; run()"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)

    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0
    assert "this machine is aarch64" in said
    assert "NEON" in said


def test_status_without_a_server_is_exit_code_one(home: Path) -> None:
    done = headrace("status", "--json")

    assert done.returncode == Exit.BAD
    assert json.loads(done.stdout) == {"servers": []}


def test_history_of_a_new_machine_is_empty(home: Path) -> None:
    assert json.loads(invoke("status", "--history", "--json")) == {"runs": []}


def fetch(home: Path, tiny: Path, source: str) -> None:
    cache = home / "cache" / "headrace"
    staged = home / "staged"
    for folder in (cache / "models", cache / "refs", staged):
        folder.mkdir(parents=True)
    for file in tiny.iterdir():
        (staged / file.name).write_bytes(file.read_bytes())
    publish(cache, source, staged, name="tiny", revision="main", pins={}, progress=lambda *_: None)


def test_models_are_listed_shown_verified_and_removed(home: Path, tiny: Path) -> None:
    fetch(home, tiny, "hf:org/tiny")

    (listed,) = json.loads(invoke("models", "list", "--json"))
    shown = json.loads(invoke("models", "show", "org/tiny", "--json"))
    verified = json.loads(invoke("models", "verify", "hf:org/tiny", "--json"))
    removed = json.loads(invoke("models", "remove", "org/tiny", "--json"))

    assert listed["source"] == "hf:org/tiny"
    assert shown["spec"]["layers"] == 2
    assert verified["is_good"]
    assert removed["freed_bytes"] > 0
    assert json.loads(invoke("models", "list", "--json")) == []


def test_packed_weights_are_counted_shown_and_removed_with_their_model(home: Path, tiny: Path) -> None:
    fetch(home, tiny, "hf:org/tiny")
    found = find_model(home / "cache" / "headrace", "org/tiny")
    folder = home / "cache" / "headrace" / "packed"
    folder.mkdir()
    for name, digest in (("mine", found.digest), ("other", "0" * 64)):
        with (folder / f"{name}.packed").open("wb") as file:
            weight = PackedWeight(0, Layout.VECTOR_F32, 16, 1, np.zeros(64, np.uint8))
            write_packed(file.fileno(), Header("key", name, digest, "bf16, int4", []), [weight])

    (listed,) = json.loads(invoke("models", "list", "--json"))
    table = invoke("models", "list")
    (shown,) = json.loads(invoke("models", "show", "org/tiny", "--json"))["packed"]
    removed = json.loads(invoke("models", "remove", "org/tiny", "--json"))

    size_bytes = (folder / "other.packed").stat().st_size
    assert abs(listed["packed_bytes"] - size_bytes) < 64
    assert "in 2 files, at most 32" in table
    assert shown["scheme"] == "bf16, int4"
    assert removed["freed_bytes"] > found.size_bytes + listed["packed_bytes"]  # and the manifest
    assert [path.name for path in folder.iterdir()] == ["other.packed"]


def test_altered_model_fails_its_verification(home: Path, tiny: Path) -> None:
    fetch(home, tiny, "hf:org/tiny")
    weights = find_model(home / "cache" / "headrace", "org/tiny").path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(data)

    done = headrace("models", "verify", "org/tiny")

    assert done.returncode == Exit.MODEL
    assert "model.safetensors" in done.stderr


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("demo", ("smollm2-135m-instruct", "demo")),
        ("hf:org/name@main", ("org/name",)),
        ("pypi:pkg==1.0", ("pkg",)),
        ("/models/llama/", ("llama",)),
        ("/models/llama-3.1.gguf", ("llama-3.1",)),
        ("/models/llama-3.1", ("llama-3.1",)),
    ],
)
def test_served_names_come_from_the_source(source: str, names: tuple[str, ...]) -> None:
    assert names_of(source) == names


@pytest.mark.parametrize("name", main.COMMANDS)
def test_command_line_of_one_command_stays_light(name: str) -> None:
    heavy = {"numpy", "pydantic", "sqlalchemy", "structlog", "asyncio"}
    code = f"import sys; from headrace.cli.main import make_app; make_app({name!r}); print(*sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert set(done.stdout.split()) & heavy == set()


def test_server_starts_without_the_other_commands() -> None:
    code = "import sys; from headrace.cli.main import make_app; make_app('serve'); print(*sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    found = {name for name, place in main.COMMANDS.items() if place.partition(":")[0] in done.stdout.split()}
    assert found == {"serve"}
