"""Every setting of Headrace: its place, type, range, default and meaning. Reading the sources is ``base.config``.

A setting exists once, here; the reference page, `config show` and the flags are made from it. A new one needs a reason
why the machine cannot measure it. Plain frozen values: what checks them is ``base.config_check``, and a library for it
would cost the start of every server 0.1 s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from headrace.base.config_check import Rule

Architecture = Literal["decoder-only", "encoder-only", "encoder-decoder"]
Quantization = Literal["none", "int8", "int4"]
Dtype = Literal["bf16", "fp32", "fp16"]

Count = Annotated[int, Rule(ge=1, le=1_000_000)]
Tokens = Annotated[int, Rule(ge=1, le=2**31 - 1)]
Port = Annotated[int, Rule(ge=0, le=65535)]
Duration = Annotated[float, Rule(gt=0, le=86_400, is_finite=True)]
Share = Annotated[float, Rule(gt=0, le=1000, is_finite=True)]
Size = Annotated[int, Rule(ge=1, le=2**40)]
Text = Annotated[str, Rule(min_chars=1, max_chars=4096)]


def _item(default: object, description: str) -> Any:
    return field(default=default, metadata={"description": description})


@dataclass(frozen=True, slots=True)
class InferenceEngine:
    """Which model to run, and how."""

    model_path: Text | None = _item(
        default=None,
        description="Model to serve: folder, file, `hf:org/name[@rev]`, `pypi:name==version` or `demo` (default).",
    )
    architecture: Architecture | None = _item(
        default=None, description="What the model must be; checked against the model's own files."
    )
    engine: Literal["native", "vllm"] = _item(default="native", description="What runs the model.")
    served_name: Text | None = _item(
        default=None, description="Name that requests use, or several with commas; default: made from the model's."
    )
    tensor_parallel_size: Annotated[int, Rule(ge=1, le=1024)] = _item(
        default=1, description="Shards of the model. Native: groups among the threads, so at most `threads`."
    )
    threads: Annotated[int, Rule(ge=1, le=1024)] | None = _item(
        default=None, description="Native threads; default: the cores that this process may use."
    )
    isa: Literal["scalar", "avx2", "avx512", "avx512bf16"] | None = _item(
        default=None, description="Instruction set of the kernels; default: the best that this CPU has."
    )
    quantization: Quantization = _item(default="none", description="Quantisation of the weights when loading.")
    kv_cache_ratio: Annotated[float, Rule(gt=0, le=1, is_finite=True)] = _item(
        default=0.9, description="Share of the memory left after weights and scratch that KV pages may take."
    )
    max_batch_size: Annotated[int, Rule(ge=1, le=4096)] | None = _item(
        default=None, description="Sequences in one step (default 32); with `kernel_config.batch_size` the smaller."
    )
    max_step_tokens: Annotated[int, Rule(ge=32, le=65_536)] = _item(
        default=512, description="Rows of one step: decoding sequences plus prompt tokens of a chunk."
    )
    prefix_cache: bool = _item(
        default=True, description="Keep finished KV pages for later requests with the same beginning."
    )
    thread_share: Share = _item(
        default=1.0, description="Weight of this model's steps where several models share the threads."
    )
    memory_share: Share = _item(
        default=1.0, description="Weight of this model's KV pool where several models share the memory."
    )
    packed_cache_gib: Annotated[float, Rule(ge=0, le=65_536, is_finite=True)] = _item(
        default=32.0,
        description="Disk space for packed weights, which spare the next start the packing; 0 keeps none.",
    )


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Shapes and number formats of the native engine."""

    max_sequence_length: Tokens | None = _item(
        default=None, description="Prompt plus output tokens of a request; default: the model's context."
    )
    batch_size: Annotated[int, Rule(ge=1, le=4096)] | None = _item(
        default=None, description="Sequences in one step; with `inference_engine.max_batch_size` the smaller."
    )
    dtype: Dtype = _item(default="bf16", description="Format of the operands; `fp32` is the exact path.")
    attention_window: Tokens | None = _item(
        default=None,
        description="Sliding window in tokens; ignored with a warning on a model trained with full attention.",
    )
    attention_window_override: bool = _item(
        default=False, description="Use `attention_window` on a full-attention model too; this changes its answers."
    )
    kv_cache_size: Tokens | None = _item(
        default=None, description="KV tokens of all sequences together; with `kv_cache_ratio` the smaller pool."
    )


@dataclass(frozen=True, slots=True)
class Server:
    """Listeners, admission and time-outs of the front."""

    host: Text = _item(default="127.0.0.1", description="Address of the public API.")
    port: Port = _item(default=8000, description="Port of the public API; 0 picks a free one.")
    admin_host: Text = _item(
        default="127.0.0.1", description="Address of the metrics and admin listener; loopback only."
    )
    admin_port: Port = _item(default=8001, description="Port of the metrics and admin listener; 0 picks a free one.")
    accept_open_access: bool = _item(
        default=False,
        description="Serve without keys on an address that other machines reach. Say so only if you mean it.",
    )
    fronts: Annotated[int, Rule(ge=1, le=64)] = _item(default=1, description="Front processes.")
    max_concurrent_requests: Count = _item(default=512, description="Requests that a front runs at once.")
    max_queued_requests: Annotated[int, Rule(ge=0, le=1_000_000)] = _item(
        default=512, description="Requests that wait in a front for their turn; more are answered 503."
    )
    queue_timeout_s: Duration = _item(default=30.0, description="Longest wait before a request starts.")
    first_token_timeout_s: Duration = _item(
        default=30.0, description="Longest wait for the first token, on top of prompt length ÷ measured prefill rate."
    )
    request_timeout_s: Duration = _item(default=600.0, description="Longest life of a request.")
    header_hold_s: Duration = _item(
        default=10.0,
        description="How long a stream's headers wait for the first token, so that early failures keep a status.",
    )
    ping_interval_s: Duration = _item(default=15.0, description="Between comment frames of a silent stream.")
    stalled_reader_timeout_s: Duration = _item(
        default=60.0, description="How long a client may not read before it is cut."
    )
    drain_s: Duration = _item(default=30.0, description="After SIGTERM: time for answers that are not streamed.")
    stream_drain_s: Duration = _item(default=120.0, description="After SIGTERM: time for streams.")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for."""

    max_body_bytes: Size = _item(default=4 * 2**20, description="Size of a request's body.")
    default_completion_tokens: Tokens = _item(default=16, description="`max_tokens` of a completion that names none.")
    default_chat_tokens: Tokens = _item(
        default=4096, description="Cap on `max_tokens` of a chat that names none; else what the context leaves."
    )


@dataclass(frozen=True, slots=True)
class Store:
    """Where state is kept."""

    url: Text | None = _item(
        default=None, description="Database (`sqlite:///…`); default: a SQLite file in the user's state folder."
    )


@dataclass(frozen=True, slots=True)
class Paths:
    """Folders; each has a default from the user's environment (XDG)."""

    model_cache: Text | None = _item(default=None, description="Fetched models; default: the user's cache folder.")
    state: Text | None = _item(default=None, description="State and locks; default: the user's state folder.")
    runtime: Text | None = _item(
        default=None, description="Sockets; default: the user's runtime folder. Keep it short."
    )


@dataclass(frozen=True, slots=True)
class Log:
    """The log on stderr."""

    level: Literal["debug", "info", "warning", "error"] = _item(default="info", description="What is logged.")
    format: Literal["auto", "json", "text"] = _item(
        default="auto", description="Lines for machines or people; `auto` is text on a terminal."
    )


SECTIONS: dict[str, type[Any]] = {
    "inference_engine": InferenceEngine,
    "kernel_config": KernelConfig,
    "server": Server,
    "limits": Limits,
    "store": Store,
    "paths": Paths,
    "log": Log,
}
"""Every section by its name."""

# Limits that are part of the wire's contract and cannot be set; `config show` lists them beside the settings.
FIXED_LIMITS: dict[str, tuple[int | float, str]] = {
    "json_depth": (64, "nesting of a JSON body"),
    "choices": (8, "`n` of a request"),
    "top_logprobs": (20, "`top_logprobs` of a request"),
    "stop_strings": (16, "stop strings of a request"),
    "stop_string_chars": (256, "characters of one stop string"),
    "header_timeout_s": (10.0, "seconds for a client to send its headers"),
    "body_idle_timeout_s": (10.0, "seconds that a client may pause while sending its body"),
    "reader_buffer_bytes": (256 * 2**10, "bytes buffered for a client that does not read"),
}
