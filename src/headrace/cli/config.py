"""``headrace config``: what the settings are, where each came from, and whether they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from headrace.cli.output import JsonOption, print_json, print_table
from headrace.cli.settings import ConfigOption, load_settings

if TYPE_CHECKING:
    from headrace.base.config import Config, Setting
    from headrace.fleet.server import Model

app = typer.Typer(help="Show and check the settings.", no_args_is_help=True)


@app.command()
def show(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Print every setting with its value and origin, and the limits that cannot be set."""
    from headrace.base.config import list_settings
    from headrace.base.config_schema import FIXED_LIMITS

    loaded = load_settings(config, {})
    settings = list_settings()

    def own(model: Config) -> list[Setting]:
        return [item for item in settings if model.origins[item.key] != loaded.origins[item.key]]

    def values_of(config: Config, items: Iterable[Setting]) -> dict[str, dict[str, object]]:
        return {item.key: {"value": config.value(item.key), "origin": config.origins[item.key]} for item in items}

    if as_json:
        fixed = {name: {"value": value, "origin": "fixed"} for name, (value, _) in FIXED_LIMITS.items()}
        models = {name: values_of(model, own(model)) for name, model in loaded.models.items()}
        print_json({"settings": values_of(loaded, settings), "models": models, "fixed_limits": fixed})
        return
    rows = [(item.key, _text(loaded.value(item.key)), loaded.origins[item.key]) for item in settings]
    for name, model in loaded.models.items():
        rows += [(f"models.{name}.{i.key}", _text(model.value(i.key)), model.origins[i.key]) for i in own(model)]
    rows += [(f"({name})", _text(value), "fixed") for name, (value, _) in FIXED_LIMITS.items()]
    print_table(("setting", "value", "origin"), rows)


@app.command()
def check(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Check the settings, and against the models that are on this machine; exit code 2 when something is wrong.

    Of several models it says what part of the memory and the threads each gets.
    """
    from headrace.cli.deployment import find_models

    loaded = load_settings(config, {})
    models, missing = find_models(loaded)
    warnings = [
        (f"models.{model.names[0]}.{key}" if loaded.models else key, message)
        for model in models
        for key, message in model.resolved.warnings
    ]
    if as_json:
        print_json(
            {
                "is_good": True,
                "is_model_checked": not missing,
                "models": [model_plan(model) for model in models],
                "warnings": [{"key": key, "message": message} for key, message in warnings],
            }
        )
        return
    for key, message in warnings:
        typer.echo(f"warning: {key}: {message}")
    if loaded.models and models:
        print_memory(models)
    if not missing:
        typer.echo("the settings are good")
    elif loaded.models:
        typer.echo(f"the settings are good; not here to be checked: {', '.join(missing)}")
    else:
        typer.echo("the settings are good; the model is not here to check them against")


def model_plan(model: Model) -> dict[str, object]:
    """Gives what a model gets of this machine, for JSON."""
    return {
        "names": model.names,
        "kind": model.kind,
        "threads": model.resolved.threads,
        "thread_share": model.config.inference_engine.thread_share,
        "memory_bytes": model.memory_bytes,
    }


def print_memory(models: Sequence[Model]) -> None:
    """Prints what each of several models gets of this machine."""
    from headrace.base.units import format_bytes

    total = sum(model.config.inference_engine.thread_share for model in models)
    rows = [
        (
            ", ".join(model.names),
            str(model.kind),
            "–" if model.memory_bytes is None else format_bytes(model.memory_bytes),
            str(model.resolved.threads),
            f"{100 * model.config.inference_engine.thread_share / total:.0f} %",
        )
        for model in models
    ]
    print_table(("model", "kind", "memory", "threads", "share when all are busy"), rows)


def _text(value: object) -> str:
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
