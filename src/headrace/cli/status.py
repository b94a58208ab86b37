"""``headrace status``: the servers that run here, their processes, and the runs before."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.output import JsonOption, print_json, print_table
from headrace.cli.settings import ConfigOption, load_settings

if TYPE_CHECKING:
    from headrace.fleet.status import ServerStatus


def status(
    config: ConfigOption = None,
    history: Annotated[bool, typer.Option("--history", help="List the latest runs instead.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the servers of this user on this machine: processes, states, restarts, ports.

    Exit code 1 when none runs, or one has a process in a crash loop.
    """
    from headrace.base.errors import HeadraceError
    from headrace.fleet.sockets import runtime_folder
    from headrace.fleet.status import ChildState, list_control_sockets, read_status

    settings = load_settings(config, {})
    if history:
        _show_history(settings.store.url, settings.paths.state, as_json=as_json)
        return
    servers = []
    for path in list_control_sockets(runtime_folder(settings.paths.runtime, os.environ)):
        try:
            servers.append(read_status(path))
        except HeadraceError:
            continue  # the socket of a server that was killed
    if as_json:
        print_json({"servers": servers})
    elif not servers:
        typer.echo("no server runs here; start one with `headrace serve`")
    for server in servers if not as_json else ():
        _print_server(server)
    is_bad = any(child.state is ChildState.CRASH_LOOP for server in servers for child in server.children)
    if not servers or is_bad:
        raise typer.Exit(1)


def _print_server(server: ServerStatus) -> None:
    from headrace.base.units import format_duration

    typer.echo(
        f"{', '.join(server.models)} at {', '.join(server.urls)}: {server.state}, up {format_duration(server.uptime_s)}"
    )
    rows = []
    for child in server.children:
        work = ""
        if child.worker is not None:
            beat = child.worker
            used = beat.total_blocks - beat.free_blocks - beat.evictable_blocks
            work = f"{beat.num_running} running, {beat.num_waiting} waiting, KV {used}/{beat.total_blocks}"
            if beat.state == "loading":
                work = f"loading {100 * beat.progress_ratio:.0f} % {beat.stage}".rstrip()
        rows.append(
            (
                child.name,
                child.model or "–",
                str(child.pid or "–"),
                child.state,
                str(child.restarts),
                child.last_exit or "–",
                work,
            )
        )
    print_table(("process", "model", "pid", "state", "restarts", "last exit", "work"), rows)


def _show_history(url: str | None, state: str | None, *, as_json: bool) -> None:
    from datetime import UTC, datetime

    from headrace.base.units import format_duration
    from headrace.cli.history import open_store
    from headrace.store.runs import list_runs

    runs = list_runs(open_store(url, state), limit=20)
    if as_json:
        print_json({"runs": runs})
        return
    rows = []
    for run in runs:
        started = datetime.fromtimestamp(run.started_at_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
        is_over = run.ended_at_s is not None
        lasted = format_duration(run.ended_at_s - run.started_at_s) if run.ended_at_s is not None else "–"
        rows.append((started, run.model, str(run.port), lasted, str(run.exit_code) if is_over else "–"))
    print_table(("started (UTC)", "model", "port", "lasted", "exit"), rows)
