"""Loading the settings for a command, and making its log and paths from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.base.config import Config

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings file; default: $HEADRACE_CONFIG, else ./headrace.yaml."),
]


def load_settings(
    file: Path | None, flags: Mapping[str, object], models: Mapping[str, Mapping[str, object]] | None = None
) -> Config:
    """Gives the settings of this command, and sets the log up as they say.

    Args:
        models: several models named on the command line, see ``load_config``.
    """
    from headrace.base.config import find_config_file, load_config
    from headrace.base.log import setup_log

    config = load_config(find_config_file(file, os.environ, Path.cwd()), os.environ, flags, models)
    setup_log(config.log.level, is_json=config.is_log_json(is_terminal=sys.stderr.isatty()))
    return config


def model_cache(config: Config) -> Path:
    """Gives the folder of fetched models."""
    from headrace.fleet.launch import model_cache as folder

    return folder(config)
