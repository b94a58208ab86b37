"""``headrace doctor``: prints what ``plan.doctor`` found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from headrace.cli.output import JsonOption, print_json, print_table
from headrace.cli.settings import ConfigOption, load_settings

if TYPE_CHECKING:
    from headrace.fleet.server import Model
    from headrace.plan.doctor import Report


def doctor(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Examine this machine: CPU, kernels per instruction, bandwidth, memory, limits; what is wrong and what to do.

    Where the settings have several models, also what each gets of the machine, or why they do not fit.

    Exit code 1 when something keeps Headrace from working as it should.
    """
    import msgspec

    import headrace
    from headrace.base.errors import HeadraceError
    from headrace.cli.config import model_plan, print_memory
    from headrace.cli.deployment import find_models
    from headrace.plan.doctor import Problem, Severity, examine

    loaded = load_settings(config, {})
    settings = loaded.inference_engine
    report = examine(version=headrace.__version__, isa_setting=settings.isa, threads=settings.threads)
    models: list[Model] = []
    if loaded.models:
        try:
            models, _ = find_models(loaded)
        except HeadraceError as error:
            problem = Problem(Severity.BAD, error.message, error.hint or "correct models in the settings")
            report = msgspec.structs.replace(report, problems=[*report.problems, problem])
    if as_json:
        print_json({**msgspec.to_builtins(report), "models": [model_plan(model) for model in models]})
    else:
        if models:
            print_memory(models)
        _print_report(report)
    if not report.is_good:
        raise typer.Exit(1)


def _print_report(report: Report) -> None:
    from headrace.base.units import format_bytes

    cpu, memory = report.cpu, report.memory
    rows = [
        ("headrace", f"{report.version}, Python {report.python}, {report.system}"),
        ("cpu", f"{cpu.model}, {cpu.num_cores} cores, {cpu.num_usable} usable, load {cpu.load:.1f}"),
        ("features", ", ".join(name for name, has in cpu.features.items() if has) or "–"),
        ("memory", f"{format_bytes(memory.total)}, {format_bytes(memory.available)} available"),
        ("open files", str(report.open_files_limit)),
    ]
    if cpu.quota is not None:
        rows.append(("cpu quota", f"{cpu.quota:g} cores"))
    if memory.limit is not None:
        rows.append(("memory limit", format_bytes(memory.limit)))
    if report.kernels is not None:
        rows.append(("instructions", f"{report.kernels.in_use}: {report.kernels.reason}"))
    if report.bandwidth is not None:
        probe = report.bandwidth
        rows.append(
            (
                "bandwidth",
                f"{probe.all_threads / 1e9:.1f} GB/s ({probe.low / 1e9:.1f} to {probe.high / 1e9:.1f}), one thread "
                f"{probe.one_thread / 1e9:.1f}, {probe.mode} mode, barrier {probe.barrier_s * 1e9:.0f} ns",
            )
        )
    print_table(("", "this machine"), rows)
    if report.kernels is not None:
        kernels = report.kernels
        isas = list(next(iter(kernels.table.values())))
        marked = [f"{isa} *" if isa == kernels.in_use else isa for isa in isas]
        print_table(
            ("kernel", *marked),
            [
                (opcode, *(_kernel(isa, names[isa], f"{opcode} ({isa})" in kernels.missing) for isa in isas))
                for opcode, names in kernels.table.items()
            ],
        )
    if not report.problems:
        typer.echo("nothing is wrong")
    for problem in report.problems:
        typer.echo(f"{problem.severity}: {problem.what}\n  {problem.remedy}")


def _kernel(isa: str, name: str | None, is_missing: bool) -> str:
    if is_missing:
        return "missing"
    return "yes" if name == isa else name or "–"
