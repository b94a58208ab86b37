"""From settings to the models to serve: fetched where needed, named, and agreed with their files and this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.output import show_progress
from headrace.cli.settings import model_cache

if TYPE_CHECKING:
    from headrace.base.config import Config
    from headrace.fleet.launch import ModelFacts, Resolved
    from headrace.fleet.server import Model


def resolve_models(settings: Config) -> list[Model]:
    """Gives the models to serve, fetched where needed, each with its part of this machine's memory.

    Raises:
        ConfigError: settings that contradict a model or the machine; a name of two models.
        ModelTooLargeError: they do not fit together, with the arithmetic.
    """
    if not settings.models:
        return [resolve_model(settings)]
    models = [resolve_model(own, name) for name, own in settings.models.items()]
    return share_memory(models)


def resolve_model(settings: Config, name: str | None = None) -> Model:
    """Gives a model to serve, fetched where needed, with the settings that it and this machine allow.

    Args:
        settings: its own.
        name: its canonical name where there are several.
    """
    from headrace.base.log import get_log
    from headrace.registry.sources import resolve as fetch

    source = settings.inference_engine.model_path or "demo"
    with show_progress() as progress:
        path = fetch(source_of(source), cache=model_cache(settings), progress=progress)
    model = agree(settings, path, name)
    log = get_log(__name__)
    for key, message in model.resolved.warnings:
        log.warning("config_warning", key=key if name is None else f"models.{name}.{key}", message=message)
    return model


def find_models(settings: Config) -> tuple[list[Model], list[str]]:
    """Gives those of the settings' models that are on this machine, and the names of the others.

    Several get their parts of the memory when all are here: what one is that is not, nobody knows.

    Raises:
        ConfigError, ModelError: as ``resolve_models``.
    """
    names: dict[str | None, Config] = dict(settings.models.items()) or {None: settings}
    found = {name: path for name, own in names.items() if (path := find_model(own)) is not None}
    models = [agree(names[name], path, name) for name, path in found.items()]
    missing = [name or "the model" for name in names if name not in found]
    return (share_memory(models) if settings.models and not missing else models), missing


def agree(settings: Config, path: Path, name: str | None = None) -> Model:
    """Gives the model at ``path`` with what its settings come to.

    Raises:
        ConfigError: they contradict the model or this machine.
        ModelError: the files are malformed, altered or of a kind that is not run.
    """
    from headrace.base.config_models import split_names
    from headrace.fleet.server import Model

    facts, resolved = resolve_settings(settings, path)
    given = split_names(settings.inference_engine.served_name)
    if name is not None:
        names = tuple(dict.fromkeys((name, *given)))
    else:
        names = given or names_of(settings.inference_engine.model_path or "demo")
    return Model(path, names, settings, resolved, facts.kind)


def share_memory(models: Sequence[Model], available_bytes: int | None = None) -> list[Model]:
    """Gives the models with their parts of the memory.

    Args:
        available_bytes: what there is to share; None measures it.

    Raises:
        ModelTooLargeError: they do not fit together, with the arithmetic of each.
    """
    from headrace.base.errors import ModelTooLargeError
    from headrace.engine.loader import measure
    from headrace.engine.memory import describe_need, format_size, read_available_bytes
    from headrace.fleet.launch import worker_launch
    from headrace.policy.shares import decide

    available = read_available_bytes() if available_bytes is None else available_bytes
    measured = []
    for model in models:
        launch = worker_launch(model.config, model.resolved, model_path=model.path, name=model.names[0], socket_fd=-1)
        measured.append(measure(launch, model.config.inference_engine.memory_share))
    decision = decide([wish for _, wish in measured], available)
    if decision.parts is None:
        each = "; ".join(
            f"{model.names[0]}: {describe_need(needs, wish)}"
            for model, (needs, wish) in zip(models, measured, strict=True)
        )
        raise ModelTooLargeError(
            f"the models do not fit together: {each}; {format_size(sum(wish.least for _, wish in measured))} in all, "
            f"this machine has {format_size(available)} available: leave one out, quantize, or lower "
            "kernel_config.max_sequence_length"
        )
    return [replace(model, memory_bytes=part) for model, part in zip(models, decision.parts, strict=True)]


def models_of(sources: Sequence[str]) -> dict[str, dict[str, object]]:
    """Gives the settings of several models named on the command line, by their names.

    Raises:
        ConfigError: two sources come to the same name.
    """
    from headrace.base.errors import ConfigError

    models: dict[str, dict[str, object]] = {}
    for source in sources:
        name, *others = names_of(source)
        if name in models:
            raise ConfigError(f"{source} would have the name {name} too: give names with `models:` in a file")
        models[name] = {"inference_engine.model_path": source}
        if others:
            models[name]["inference_engine.served_name"] = ",".join(others)
    return models


def resolve_settings(settings: Config, path: Path) -> tuple[ModelFacts, Resolved]:
    """Gives what the model at ``path`` is, and what the settings come to for it on this machine."""
    import os

    from headrace.fleet.launch import read_facts, resolve

    facts = read_facts(path)
    return facts, resolve(settings, facts, num_cpus=len(os.sched_getaffinity(0)))


def find_model(settings: Config) -> Path | None:
    """Gives where the model lies on this machine, or None when it would have to be fetched."""
    from headrace.registry.sources import find_cached

    return find_cached(source_of(settings.inference_engine.model_path or "demo"), cache=model_cache(settings))


def source_of(text: str) -> str:
    """Gives the model source that a command line's MODEL means: ``demo`` is a short name."""
    from headrace.registry.sources import DEMO_SOURCE

    return DEMO_SOURCE if text == "demo" and not Path(text).exists() else text


def names_of(source: str) -> tuple[str, ...]:
    """Gives the names under which a model is served, the canonical one first."""
    if source == "demo":
        return ("smollm2-135m-instruct", "demo")
    if source.startswith("hf:"):
        return (source.removeprefix("hf:").partition("@")[0],)
    if source.startswith("pypi:"):
        return (source.removeprefix("pypi:").partition("==")[0],)
    path = Path(source).resolve()
    return (path.stem if path.suffix in (".gguf", ".safetensors") else path.name,)
