"""``headrace config``: what the settings are, where each came from, and whether they hold."""

from __future__ import annotations

import typer

from headrace.cli.output import JsonOption, print_json, print_table
from headrace.cli.settings import ConfigOption, load_settings

app = typer.Typer(help="Show and check the settings.", no_args_is_help=True)


@app.command()
def show(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Print every setting with its value and origin, and the limits that cannot be set."""
    from headrace.base.config import list_settings
    from headrace.base.config_schema import FIXED_LIMITS

    loaded = load_settings(config, {})
    settings = list_settings()
    if as_json:
        values = {item.key: {"value": loaded.value(item.key), "origin": loaded.origins[item.key]} for item in settings}
        fixed = {name: {"value": value, "origin": "fixed"} for name, (value, _) in FIXED_LIMITS.items()}
        print_json({"settings": values, "fixed_limits": fixed})
        return
    rows = [(item.key, _text(loaded.value(item.key)), loaded.origins[item.key]) for item in settings]
    rows += [(f"({name})", _text(value), "fixed") for name, (value, _) in FIXED_LIMITS.items()]
    print_table(("setting", "value", "origin"), rows)


@app.command()
def check(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Check the settings, and against the model where it is on this machine; exit code 2 when something is wrong."""
    from headrace.cli.deployment import find_model, resolve_settings

    loaded = load_settings(config, {})
    path = find_model(loaded)
    warnings = resolve_settings(loaded, path)[1].warnings if path is not None else ()
    if as_json:
        print_json(
            {
                "is_good": True,
                "is_model_checked": path is not None,
                "warnings": [{"key": key, "message": message} for key, message in warnings],
            }
        )
        return
    for key, message in warnings:
        typer.echo(f"warning: {key}: {message}")
    typer.echo(
        "the settings are good" if path else "the settings are good; the model is not here to check them against"
    )


def _text(value: object) -> str:
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
