"""From settings to the models to serve: fetched where needed, named, and agreed with their files and this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.output import show_progress
from headrace.cli.settings import model_cache

if TYPE_CHECKING:
    from headrace.base.config import Config
    from headrace.fleet.launch import ModelFacts, Resolved
    from headrace.fleet.server import Model


def resolve_model(settings: Config) -> Model:
    """Gives the model to serve, fetched where needed, with the settings that it and this machine allow."""
    from headrace.base.log import get_log
    from headrace.fleet.server import Model
    from headrace.registry.sources import resolve as fetch

    source = settings.inference_engine.model_path or "demo"
    with show_progress() as progress:
        path = fetch(source_of(source), cache=model_cache(settings), progress=progress)
    facts, resolved = resolve_settings(settings, path)
    log = get_log(__name__)
    for key, message in resolved.warnings:
        log.warning("config_warning", key=key, message=message)
    name = settings.inference_engine.served_name
    names = tuple(dict.fromkeys(part.strip() for part in (name or "").split(",") if part.strip()))
    return Model(path, names or names_of(source), settings, resolved, facts.kind)


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
