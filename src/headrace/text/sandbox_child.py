"""The process that renders chat templates: a program of its own, started by ``sandbox``, fed over standard input.

Templates come with models and models come from strangers. This process holds nothing worth taking: no model, no
request but the one being rendered, no open file but the socket to its parent. Before a template is touched it gives up
opening files, starting processes and writing files; each job has a limit of CPU time, memory and output. A job that
stays in C code past its time is killed by the kernel, and the parent starts another child.

The environment is the one that transformers gives to chat templates (its names, whitespace rules and sandbox), less
the filter ``attr`` and the global ``lipsum``. Only the standard library and jinja2 are imported.

A message is a 4-byte big-endian length and a JSON object: ``load`` or ``render`` in, what was found or an ``error`` and
its ``message`` out. End of input ends the process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# Names that the template's caller sets or that the environment provides; everything else free is the template's own.
_PROVIDED: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)

_HEADER: Final = struct.Struct(">I")
_MAX_MESSAGE_CHARS: Final = 2000

_MARK: Final = "hR7mark"
_PROBE_CALL: Final = {"id": "call12345", "type": "function"}
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"k": {"type": "string", "description": "A key."}}},
    },
}


class _OutOfTime(BaseException):
    """CPU time is up. Not an Exception, so that nothing on the way answers it."""


class _OutOfOutput(BaseException):
    """The text is longer than allowed."""


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}``: marks the assistant's tokens for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own way to declare them)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers: names set inside stay inside.
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` for templates: builds dictionaries and leads nowhere else."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` for templates, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that a template may use the name `self`
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes for HTML, which a prompt must not be.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object = "") -> NoReturn:
    raise _Refused(str(message))


def build_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Gives the environment in which chat templates are written to run."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    del environment.filters["attr"]
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class Renderer:
    """Compiled templates by name, and what was found out about each."""

    def __init__(self) -> None:
        self._environment = build_environment()
        self._templates: dict[str, jinja2.Template] = {}

    def load(self, sources: dict[str, str], now: list[int], probe_chars: int) -> dict[str, Any]:
        """Compiles ``sources`` and gives, for each, its free variables and the forms of messages that it takes."""
        found: dict[str, Any] = {}
        for name, source in sources.items():
            free = jinja2.meta.find_undeclared_variables(self._environment.parse(source))
            self._templates[name] = self._environment.from_string(source)
            found[name] = {
                "variables": sorted(free - _PROVIDED - self._environment.globals.keys()),
                **self._probe(name, now, probe_chars),
            }
        return found

    def render(self, name: str, variables: dict[str, Any], now: list[int], limit_chars: int) -> str:
        """Renders the template; stops as soon as the text is longer than ``limit_chars``."""
        moment = datetime(*now)  # type: ignore[arg-type]  # noqa: DTZ001 (local time as the parent sees it)
        parts: list[str] = []
        total = 0
        for part in self._templates[name].generate(strftime_now=moment.strftime, **variables):
            parts.append(part)
            total += len(part)
            if total > limit_chars:
                raise _OutOfOutput
        return "".join(parts)

    def _probe(self, name: str, now: list[int], limit_chars: int) -> dict[str, bool]:
        def shown(messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
            variables = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
            special = {"bos_token": "", "eos_token": "", "pad_token": "", "unk_token": ""}
            try:
                return self.render(name, variables | special, now, limit_chars)
            except Exception:  # noqa: BLE001 (a template may fail in any way on a form that it does not take)
                return ""

        def call(arguments: object) -> str:
            function = {"name": "probe_tool", "arguments": arguments}
            turns: list[dict[str, Any]] = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [{**_PROBE_CALL, "function": function}]},
                {"role": "tool", "tool_call_id": "call12345", "name": "probe_tool", "content": "b"},
            ]
            return shown(turns, [_PROBE_TOOL])

        text = shown([{"role": "user", "content": _MARK}])
        parts = shown([{"role": "user", "content": [{"type": "text", "text": _MARK}]}])
        # Python's own spelling of a dict means that the template wanted a string.
        as_object, as_string = call({"k": _MARK}), call(json.dumps({"k": _MARK}))
        is_object_good = _MARK in as_object and "{'k'" not in as_object
        return {
            "wants_parts": _MARK not in text and _MARK in parts,
            "wants_string_arguments": not is_object_good and _MARK in as_string,
            "takes_tools": "probe_tool" in shown([{"role": "user", "content": "a"}], [_PROBE_TOOL]),
        }


def _raise_out_of_time(_signal: int, _frame: object) -> None:
    raise _OutOfTime


def _limit_process() -> None:
    """Gives up what rendering never needs. The socket on descriptor 0 stays."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, _raise_out_of_time)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # open descriptors go on working, new ones cannot be had


def _import_all(renderer: Renderer) -> None:
    """Makes jinja2 and the codecs import what they import on first use: later no file can be opened."""
    source = r"{{ '\u00e9' | pprint }}{{ [1] | tojson }}{{ strftime_now('%A %Z') }}{{ missing.name }}"
    renderer.load({"": source}, [2026, 1, 1], 1000)
    with suppress(jinja2.UndefinedError):
        renderer.render("", {}, [2026, 1, 1], 1000)


class _Limits:
    """CPU time and memory limits around one job.

    ``ITIMER_PROF`` interrupts Python code; code that stays in C is killed by ``ITIMER_VIRTUAL`` at twice the time.
    """

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)  # read again for every job, when nothing can be opened

    @contextmanager
    def __call__(self, cpu_s: float, memory_bytes: int) -> Iterator[None]:
        pages = int(os.pread(self._statm, 64, 0).split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory_bytes, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, 2 * cpu_s)
        signal.setitimer(signal.ITIMER_PROF, cpu_s, cpu_s / 4)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def answer(renderer: Renderer, limits: _Limits, job: dict[str, Any]) -> dict[str, Any]:
    """Does one job and says how it went; the error kinds are those of ``sandbox.JobError``."""
    try:
        with limits(job["cpu_s"], job["memory_bytes"]):
            if job["do"] == "load":
                return {"loaded": renderer.load(job["sources"], job["now"], job["limit_chars"])}
            return {"text": renderer.render(job["name"], job["variables"], job["now"], job["limit_chars"])}
    except _OutOfTime:
        return {"error": "time", "message": ""}
    except _OutOfOutput:
        return {"error": "output", "message": ""}
    except MemoryError:
        return {"error": "memory", "message": ""}
    except _Refused as fault:
        return {"error": "refused", "message": str(fault)[:_MAX_MESSAGE_CHARS]}
    except jinja2.TemplateSyntaxError as fault:
        return {"error": "syntax", "message": f"line {fault.lineno}: {fault.message}"[:_MAX_MESSAGE_CHARS]}
    except Exception as fault:  # noqa: BLE001 (this process's edge: a template may fail in any way)
        return {"error": "failed", "message": f"{type(fault).__name__}: {fault}"[:_MAX_MESSAGE_CHARS]}


def serve(link: socket.socket) -> None:
    """Answers jobs until the parent closes its end."""
    limits, renderer = _Limits(), Renderer()
    _import_all(renderer)
    _limit_process()
    stream = link.makefile("rwb")
    while len(header := stream.read(_HEADER.size)) == _HEADER.size:
        job = json.loads(stream.read(_HEADER.unpack(header)[0]))
        data = json.dumps(answer(renderer, limits, job)).encode("ascii")
        stream.write(_HEADER.pack(len(data)) + data)
        stream.flush()


if __name__ == "__main__":
    serve(socket.socket(fileno=0))
