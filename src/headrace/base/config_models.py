"""``models:`` in the configuration: several models in one deployment, each a name with settings of its own.

    models:
      talk:
        inference_engine: {model_path: demo, thread_share: 2}
      vectors:
        inference_engine: {model_path: /data/minilm}
        server: {max_concurrent_requests: 64}

What stands outside ``models`` holds for all of them; what stands in a model holds for it, wherever the other came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.base.config_yaml import Given, read_sections, walk
from headrace.base.errors import ConfigError

if TYPE_CHECKING:
    import yaml

MAX_NAME_CHARS: Final = 256

# What a model cannot have of its own: these belong to the server as a whole.
_SHARED_ENGINE_KEYS: Final = frozenset({"engine", "packed_cache_gib"})
_OWN_SERVER_KEYS: Final = frozenset(
    {
        "max_concurrent_requests",
        "max_queued_requests",
        "queue_timeout_s",
        "first_token_timeout_s",
        "request_timeout_s",
    }
)
_OWN_LIMITS: Final = frozenset({"default_completion_tokens", "default_chat_tokens"})
# What can only be meant of one model, so it must stand in one.
_ONE_MODEL_KEYS: Final = (
    "inference_engine.model_path",
    "inference_engine.served_name",
    "inference_engine.architecture",
)


def can_be_own(key: str) -> bool:
    """Whether a model may have ``section.name`` for itself."""
    section, name = key.split(".")
    match section:
        case "inference_engine":
            return name not in _SHARED_ENGINE_KEYS
        case "kernel_config":
            return True
        case "server":
            return name in _OWN_SERVER_KEYS
        case "limits":
            return name in _OWN_LIMITS
        case _:
            return False


def read_models(file: Path, node: yaml.Node, keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Given]]]:
    """Yields each model's name and own settings.

    Args:
        node: the value of ``models``.
        keys: every setting, ``section.name``.

    Raises:
        ConfigError: a name that cannot be one, an unknown key, or one that only the whole server has.
    """
    own = [key for key in keys if can_be_own(key)]
    for name, model_node, place in walk(file, node, "models"):
        check_name(name, place)
        given = dict(read_sections(file, model_node, keys, what=f"models.{name}"))
        for key, item in given.items():
            if key not in own:
                raise ConfigError(f"{item.origin}: {key} belongs to the whole server: set it outside models")
        yield name, given


def check_name(name: str, place: str) -> None:
    """Refuses what cannot be a model's name.

    Raises:
        ConfigError: empty, too long, or with characters that no request could name without trouble.
    """
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable() or "," in name or name != name.strip():
        raise ConfigError(
            f"{place}: {name!r} is no model name: 1 to {MAX_NAME_CHARS} printable characters without commas"
        )


def check_models(models: Mapping[str, Mapping[str, Given]], common: Mapping[str, Given]) -> None:
    """Refuses models that cannot be served together.

    Raises:
        ConfigError: none at all, one without a path, a name of two models, or a setting for one model outside of it.
    """
    if not models:
        raise ConfigError("models holds no model: name one, or leave it out")
    for key in _ONE_MODEL_KEYS:
        if key in common:
            raise ConfigError(
                f"{common[key].origin}: {key} can be meant of one model only, and there are models: set it in one of "
                f"{', '.join(models)}"
            )
    owners: dict[str, str] = {}
    for model, given in models.items():
        if "inference_engine.model_path" not in given:
            raise ConfigError(f"models.{model} needs inference_engine.model_path: what shall it serve?")
        served = given.get("inference_engine.served_name")
        for name in dict.fromkeys([model, *split_names(str(served.value) if served else None)]):
            if name in owners:
                raise ConfigError(f"the name {name!r} belongs to models.{owners[name]} and models.{model}: change one")
            owners[name] = model


def split_names(text: str | None) -> tuple[str, ...]:
    """Gives the names in a ``served_name``, each once."""
    return tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
