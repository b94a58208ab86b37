import pytest

from headrace.base.clock import ManualClock, SystemClock
from headrace.base.errors import AddressInUseError, ConfigError, HeadraceError, ModelFormatError, OverloadedError
from headrace.base.exits import Exit, exit_code_of, is_permanent
from headrace.base.ids import is_sane_id, new_request_id
from headrace.base.units import format_bytes, format_duration, parse_size


def test_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(5.0)

    clock.advance(2.5)

    assert clock.now_s() == 7.5
    assert clock.wall_s() == 1_700_000_002.5


def test_system_clock_does_not_go_back() -> None:
    clock = SystemClock()

    assert clock.now_s() <= clock.now_s()


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("512", 512), ("4 MiB", 4 * 2**20), ("1.5GB", 1_500_000_000), (" 2 KiB ", 2048)]
)
def test_size_is_parsed(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "many", "-1", "1 XB", "1 kib", "1e3"])
def test_nonsense_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_quantities_are_readable() -> None:
    assert [format_bytes(size) for size in (5, 1536, 3 * 2**30, 2**50)] == ["5 B", "1.5 KiB", "3.0 GiB", "1024.0 TiB"]
    assert [format_duration(s) for s in (8.5e-4, 0.0125, 3.2, 245, 7380)] == [
        "850 µs",
        "12.5 ms",
        "3.2 s",
        "4 min 05 s",
        "2 h 03 min",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("req-1", True), ("a.b:c_d", True), ("", False), ("a b", False), ("é", False), ("x" * 129, False)],
)
def test_client_ids_are_taken_over_only_when_harmless(text: str, expected: bool) -> None:
    assert is_sane_id(text) is expected


def test_new_ids_differ_and_are_sane() -> None:
    first, second = new_request_id(), new_request_id()

    assert first != second
    assert is_sane_id(first)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), Exit.USAGE),
        (ModelFormatError("x"), Exit.MODEL),
        (AddressInUseError("x"), Exit.ADDRESS_IN_USE),
        (OverloadedError("x"), Exit.BAD),
    ],
)
def test_exit_code_follows_the_error(error: HeadraceError, code: Exit) -> None:
    assert exit_code_of(error) is code


def test_only_faults_that_stay_are_permanent() -> None:
    assert [code for code in Exit if is_permanent(code)] == [Exit.USAGE, Exit.MODEL, Exit.MACHINE]
    assert not is_permanent(-9)
