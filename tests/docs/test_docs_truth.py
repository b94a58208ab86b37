"""The documents tell the truth: what they name exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from headrace.base.catalogue import EVENTS, METRICS
from headrace.base.config import list_settings, load_config
from headrace.base.config_schema import SECTIONS
from headrace.cli.main import make_app

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def known_commands() -> dict[str, set[str]]:
    """Command path → its options."""
    found: dict[str, set[str]] = {}

    def walk(command: object, path: str) -> None:
        found[path] = {option for parameter in command.params for option in parameter.opts}  # type: ignore[attr-defined]
        for name, child in getattr(command, "commands", {}).items():
            walk(child, f"{path} {name}")

    walk(typer.main.get_command(make_app()), "headrace")
    return found


def code_of(text: str) -> Iterator[str]:
    """Gives the lines of code blocks and the inline code of a page."""
    in_fence = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            in_fence = not in_fence
        elif in_fence or line.startswith("    "):
            yield line
        else:
            yield from re.findall(r"`([^`]+)`", line)


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_commands_and_their_options_exist(page: Path) -> None:
    commands = known_commands()
    for code in code_of(page.read_text()):
        for words in re.findall(r"(?:^|[\s/])headrace ((?:[\w./:=@-]+ ?)*)", code.partition(" #")[0]):
            path = "headrace"
            rest = words.split()
            while rest and f"{path} {rest[0]}" in commands:
                path += f" {rest.pop(0)}"
            has_children = any(other.startswith(f"{path} ") for other in commands)
            if path == "headrace" and rest and not rest[0].startswith("-"):
                assert not has_children or not rest[0].isalpha(), f"{page.name}: `headrace {words}` is no command"
            for option in (word for word in rest if word.startswith("--")):
                known = commands[path] | {"--help", "--json"}
                assert option in known, f"{page.name}: {path} has no {option}"


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_files_and_scripts_named_exist(page: Path) -> None:
    for code in code_of(page.read_text()):
        for name in re.findall(r"(?:^|[\s`])((?:scripts|tests|docs|src)/[\w./-]+)", code):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_settings_and_metrics_named_exist(page: Path) -> None:
    keys = {setting.key for setting in list_settings()}
    sections = "|".join(SECTIONS)
    for code in code_of(page.read_text()):
        for key in re.findall(rf"(?<![\w./])((?:{sections})\.[a-z_]+)\b(?!\.)", code):
            assert key in keys or key.rpartition(".")[2] in ("py", "frames"), f"{page.name} names the setting {key}"
        for name in re.findall(r"\bheadrace_[a-z_]+\b", code):
            assert name in METRICS, f"{page.name} names the metric {name}"


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_yaml_examples_load(page: Path, tmp_path: Path) -> None:
    for index, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)):
        if set(yaml.safe_load(block)) <= SECTIONS.keys():
            file = tmp_path / f"{index}.yaml"
            file.write_text(block)
            load_config(file, {}, {})


def test_generated_reference_is_fresh() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "reference"), "--check"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


def logged_events(source: Path) -> Iterator[str]:
    """Gives the first argument of every ``log.level("…")`` call."""
    for node in ast.walk(ast.parse(source.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("debug", "info", "warning", "error", "exception")
            and "log" in ast.unparse(node.func.value).lower()
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


def test_every_event_that_is_logged_stands_in_the_catalogue() -> None:
    logged = {(event, source.name) for source in SOURCES for event in logged_events(source)}

    unknown = sorted((event, name) for event, name in logged if event not in EVENTS)

    assert logged
    assert unknown == []


def test_no_setting_is_unused() -> None:
    text = "\n".join(source.read_text() for source in SOURCES if source.name != "config_schema.py")

    unused = [s.key for s in list_settings() if not re.search(rf"\.{s.key.split('.')[1]}\b", text)]

    assert unused == []
