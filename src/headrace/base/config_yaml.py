"""Settings out of YAML, each with the file and line where it stands; what they mean is ``base.config``'s business."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.errors import ConfigError

if TYPE_CHECKING:  # most starts read no file, and the library takes 12 ms to import
    import yaml


@dataclass(frozen=True, slots=True)
class Given:
    """A value, and where somebody set it."""

    value: object
    origin: str


def read_sections(
    file: Path, root: yaml.Node, keys: Sequence[str], *, what: str = "the file", skipped: str | None = None
) -> Iterator[tuple[str, Given]]:
    """Yields ``section.name`` and value of every setting in a map of sections.

    Args:
        keys: every setting that there is.
        what: what the map is, for messages.
        skipped: a section that is read elsewhere.

    Raises:
        ConfigError: no map, or an unknown or doubled key; names file, line and nearest key.
    """
    import yaml

    sections = sorted({key.split(".")[0] for key in keys})
    for section, section_node, place in walk(file, root, what):
        if section == skipped:
            continue
        if section not in sections:
            raise ConfigError(f"{place}: unknown section {section!r}{nearest(section, sections, keys)}")
        if isinstance(section_node, yaml.ScalarNode) and section_node.tag == "tag:yaml.org,2002:null":
            continue  # `server:` with nothing under it
        names = [key.split(".")[1] for key in keys if key.startswith(f"{section}.")]
        for name, value_node, value_place in walk(file, section_node, section):
            if name not in names:
                hint = nearest(name, names, keys)
                raise ConfigError(f"{value_place}: unknown key {section}.{name}{hint}")
            if not isinstance(value_node, yaml.ScalarNode):
                raise ConfigError(f"{value_place}: {section}.{name} takes one value, not a list or a map")
            yield f"{section}.{name}", Given(_scalar(value_node), value_place)


def walk(file: Path, node: yaml.Node, what: str) -> Iterator[tuple[str, yaml.Node, str]]:
    """Yields key, value and place of every entry of a map.

    Raises:
        ConfigError: it is no map, a key is no word, or stands twice.
    """
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{file}:{node.start_mark.line + 1}: {what} must be a map of `key: value` lines")
    seen: dict[str, str] = {}
    for key_node, value_node in node.value:
        place = f"{file}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{place}: a key must be a word")
        key = str(key_node.value)
        if key in seen:
            raise ConfigError(f"{place}: {key} stands twice, first at {seen[key]}")
        seen[key] = place
        yield key, value_node, place


def _scalar(node: yaml.ScalarNode) -> object:
    import yaml

    constructor = yaml.SafeLoader("")
    try:
        value: object = constructor.construct_object(node)
    finally:
        constructor.dispose()
    return value


def nearest(name: str, candidates: Sequence[str], keys: Sequence[str]) -> str:
    """Gives the hint behind an unknown name: the nearest one, here or in another section."""
    import difflib

    here = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75)
    if here:
        return f": did you mean {here[0]}?"
    by_name = {key.split(".")[1]: key for key in keys}
    elsewhere = difflib.get_close_matches(name, by_name, n=1, cutoff=0.75)
    if elsewhere:
        return f": did you mean {by_name[elsewhere[0]]}?"
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.0)
    return f": the nearest is {close[0]}" if close else ""
