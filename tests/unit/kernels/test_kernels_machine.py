"""What the native library says about this machine, and the choice of instruction set."""

from __future__ import annotations

import pytest

from headrace.base.errors import MachineError
from headrace.kernels import vm
from headrace.program.cost import Arithmetic
from headrace.program.opcodes import Opcode


def test_scalar_is_always_available_and_comes_first() -> None:
    assert vm.available_isas()[0] == "scalar"


def test_avx2_is_used_where_the_cpu_has_it() -> None:
    features = vm.cpu_features()

    has_avx2 = features["avx2"] and features["fma"] and features["f16c"]
    assert ("avx2" in vm.available_isas()) == has_avx2


@pytest.mark.parametrize("isa", vm.available_isas())
def test_no_opcode_runs_on_a_stand_in(isa: str) -> None:
    assert vm.kernel_names(isa) == dict.fromkeys(Opcode, isa)


def test_kernel_names_of_an_unknown_table_are_an_error() -> None:
    with pytest.raises(MachineError, match="sse2"):
        vm.kernel_names("sse2")


def test_the_environment_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vm.ISA_VARIABLE, "scalar")

    assert vm.best_isa() == "scalar"


def test_an_unavailable_choice_is_an_error_that_names_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vm.ISA_VARIABLE, "avx9000")

    with pytest.raises(MachineError, match="scalar"):
        vm.best_isa()


def test_probes_return_plausible_figures() -> None:
    bandwidth = vm.probe_bandwidth(1 << 22, 2, 0.01)
    barrier = vm.probe_barrier(2)
    peaks = [vm.probe_peak(isa, kind, 1, 0.002) for isa in vm.available_isas() for kind in Arithmetic]

    assert 1e8 < bandwidth < 1e13
    assert 1e-9 < barrier < 1.0
    assert all(1e7 < peak < 1e14 for peak in peaks)
