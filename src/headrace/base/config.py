"""Loads the settings: ``headrace.yaml`` < environment ``HEADRACE_SECTION_KEY`` < flags, each value with its origin.

What the settings are stands in ``base.config_schema``. What they come to on a given machine and model is decided where
both are known (``fleet.launch``). Nothing here is mutated after loading.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from headrace.base.config_check import check_value, members, split
from headrace.base.config_models import check_models
from headrace.base.config_schema import (
    SECTIONS,
    InferenceEngine,
    KernelConfig,
    Limits,
    Log,
    Paths,
    Server,
    Store,
)
from headrace.base.config_yaml import Given
from headrace.base.errors import ConfigError

CONFIG_FILE_NAME: Final = "headrace.yaml"
MAX_FILE_BYTES: Final = 2**20  # a configuration of a megabyte is some other file
ENV_PREFIX: Final = "HEADRACE_"
MODELS: Final = "models"

# Variables that are ours but no settings: the file to read.
_OTHER_ENV: Final = frozenset({"HEADRACE_CONFIG"})
# Short names of settings that people set often by hand.
_ALIASES: Final = {"HEADRACE_ISA": "inference_engine.isa"}
# Kubernetes puts these into every pod beside a service called "headrace"; they mean nothing to us.
_SERVICE_LINK = re.compile(r"^HEADRACE_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_.*)?)$")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as the schema defines it.

    Args:
        key: ``section.name``.
        env: its environment variable.
        default: its default value.
        description: one sentence.
        type_text: its type as people read it.
        annotation: its type and bounds as ``base.config_check`` reads them.
    """

    key: str
    env: str
    default: object
    description: str
    type_text: str
    annotation: object


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, and where each came from.

    Args:
        origins: ``section.name`` → ``default``, ``headrace.yaml:7``, ``env HEADRACE_…`` or ``flag --…``.
        models: of several models in one deployment each one's whole settings, by its canonical name; empty where the
            settings are one model's own.
    """

    inference_engine: InferenceEngine
    kernel_config: KernelConfig
    server: Server
    limits: Limits
    store: Store
    paths: Paths
    log: Log
    origins: Mapping[str, str]
    models: Mapping[str, Config] = field(default_factory=dict)

    def value(self, key: str) -> object:
        """Gives the value of ``section.name``."""
        section, name = key.split(".")
        value: object = getattr(getattr(self, section), name)
        return value

    def is_given(self, key: str) -> bool:
        """Whether somebody set ``section.name``; else it has its default."""
        return self.origins[key] != "default"

    def is_log_json(self, *, is_terminal: bool) -> bool:
        """Whether the log is JSON lines: as set, else when nobody watches."""
        return self.log.format == "json" or (self.log.format == "auto" and not is_terminal)


def list_settings() -> list[Setting]:
    """Gives every setting in the schema's order."""
    return list(_settings())


@cache
def _settings() -> tuple[Setting, ...]:
    found: list[Setting] = []
    for section, kind in SECTIONS.items():
        annotations = typing.get_type_hints(kind, include_extras=True)
        found.extend(
            Setting(
                key=f"{section}.{item.name}",
                env=f"{ENV_PREFIX}{section}_{item.name}".upper(),
                default=item.default,
                description=item.metadata["description"],
                type_text=_type_text(annotations[item.name]),
                annotation=annotations[item.name],
            )
            for item in dataclasses.fields(kind)
        )
    return tuple(found)


def load_config(
    file: Path | None,
    env: Mapping[str, str],
    flags: Mapping[str, object],
    models: Mapping[str, Mapping[str, object]] | None = None,
) -> Config:
    """Reads all three sources and gives one checked, frozen value.

    Args:
        file: the YAML file, or None for none.
        env: the environment; only names that begin with ``HEADRACE_`` are looked at.
        flags: ``section.name`` → value; None means that the flag was not given.
        models: several models named on the command line: name → ``section.name`` → value.

    Raises:
        ConfigError: an unreadable file, an unknown or doubled key, a wrong value; names file, line and nearest key.
    """
    settings = {setting.key: setting for setting in list_settings()}
    given: dict[str, Given] = {}
    own: dict[str, dict[str, Given]] | None = None
    if file is not None:
        found, own = _read_file(file, list(settings))
        given |= found
    given |= _read_env(env, settings)
    for key, value in flags.items():
        assert key in settings, f"flag for the unknown setting {key}"
        if value is not None:
            given[key] = Given(value, f"flag {flag_name(key)}")
    if models:
        if own is not None:
            raise ConfigError(f"{file} has models, and the command line names others: leave out one of them")
        own = {
            name: {key: Given(value, "command line") for key, value in values.items()}
            for name, values in models.items()
        }
    common = _build(given, settings)
    if own is None:
        return common
    check_models(own, given)
    return replace(common, models={name: _build(given | more, settings) for name, more in own.items()})


def _build(given: Mapping[str, Given], settings: Mapping[str, Setting]) -> Config:
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    faults = []
    for key, setting in settings.items():
        if (item := given.get(key)) is None:
            continue
        section, name = key.split(".")
        values[section][name], fault = check_value(item.value, setting.annotation)
        if fault is not None:
            faults.append(f"{item.origin}: {key} is {item.value!r}: {fault}")
    if faults:
        raise ConfigError("\n".join(faults))
    return Config(
        **{section: kind(**values[section]) for section, kind in SECTIONS.items()},
        origins={key: given[key].origin if key in given else "default" for key in settings},
    )


def find_config_file(named: Path | None, env: Mapping[str, str], folder: Path) -> Path | None:
    """Gives the file to read: the named one, else ``HEADRACE_CONFIG``, else ``headrace.yaml`` in ``folder``."""
    if named is not None:
        return named
    if env.get("HEADRACE_CONFIG"):
        return Path(env["HEADRACE_CONFIG"])
    candidate = folder / CONFIG_FILE_NAME
    return candidate if candidate.is_file() else None


def flag_name(key: str) -> str:
    """Gives the flag that sets ``section.name``; every setting that has one is called alike."""
    return "--" + key.split(".")[1].replace("_", "-")


def _read_file(file: Path, keys: Sequence[str]) -> tuple[dict[str, Given], dict[str, dict[str, Given]] | None]:
    """Gives the common settings, and those of each model where the file has ``models``."""
    import yaml  # late: most starts have no file

    from headrace.base.config_models import read_models
    from headrace.base.config_yaml import read_sections

    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{file}: over {MAX_FILE_BYTES} bytes: this is no configuration file")
    try:
        root = yaml.compose(data.decode(), Loader=yaml.SafeLoader)
        if root is None:
            return {}, None
        given = dict(read_sections(file, root, keys, skipped=MODELS))
        (models,) = [value for key, value in root.value if key.value == MODELS] or [None]
        own = None if models is None else dict(read_models(file, models, keys))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 at byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}" if mark else str(file)
        raise ConfigError(f"{place}: not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        first_line = (str(error).splitlines() or ["nested too deeply"])[0]
        raise ConfigError(f"{file}: not YAML: {first_line}") from error
    return given, own


def _read_env(env: Mapping[str, str], settings: Mapping[str, Setting]) -> dict[str, Given]:
    by_env = {setting.env: setting for setting in settings.values()}
    by_env |= {name: settings[key] for name, key in _ALIASES.items()}
    given: dict[str, Given] = {}
    for name in sorted(name for name in env if name.startswith(ENV_PREFIX)):
        if name in _OTHER_ENV or _SERVICE_LINK.match(name):
            continue
        setting = by_env.get(name)
        if setting is None:
            import difflib

            close = difflib.get_close_matches(name, by_env, n=1, cutoff=0.0)
            raise ConfigError(f"environment: unknown variable {name}: the nearest is {close[0]}")
        given[setting.key] = Given(_parse_text(env[name], setting), f"env {name}")
    return given


def _parse_text(text: str, setting: Setting) -> object:
    """Gives the value that an environment variable's text stands for; text stays text where text is wanted."""
    optional = "null" in setting.type_text
    if optional and text in ("", "null"):
        return None
    if setting.type_text.startswith("text") or "`" in setting.type_text:
        return text
    import yaml

    try:
        value: object = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value


def _type_text(annotation: object) -> str:
    parts = [_name_of(part) for part in members(annotation)]
    rules = [rule for part in members(annotation) for rule in split(part)[1]]
    low = high = None
    for rule in rules:
        low = low or _bound(rule.ge, "≥") or _bound(rule.gt, ">")
        high = high or _bound(rule.le, "≤") or _bound(rule.lt, "<")
    bounds = ", ".join(bound for bound in (low, high) if bound and parts[0] not in ("text", "boolean"))
    if bounds:
        parts[0] = f"{parts[0]} {bounds}"
    return " or ".join(parts)


def _name_of(annotation: object) -> str:
    kind, _ = split(annotation)
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    names = {int: "integer", float: "number", bool: "boolean", str: "text", type(None): "null"}
    return names[typing.cast("type", kind)]


def _bound(limit: float | None, sign: str) -> str | None:
    return None if limit is None else f"{sign} {limit:,}".replace(",", " ")
