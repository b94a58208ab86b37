import json
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.base.log import get_log, setup_log


def test_event_is_one_json_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    setup_log("info")

    get_log("headrace.x").info("request_finished", ttft_ms=1.5, note="line\nbreak\x1b[0m")

    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    event = json.loads(err)
    assert (event["event"], event["ttft_ms"], event["level"]) == ("request_finished", 1.5, "info")
    assert "\x1b" not in err


def test_level_filters_and_a_later_set_up_reaches_older_loggers(capsys: pytest.CaptureFixture[str]) -> None:
    setup_log("warning")
    log = get_log("headrace.x")
    log.info("front_started")
    assert capsys.readouterr().err == ""

    setup_log("debug")
    log.debug("front_started")

    assert "front_started" in capsys.readouterr().err


@pytest.mark.parametrize("is_json", [True, False])
def test_secrets_and_prompts_are_hidden(capsys: pytest.CaptureFixture[str], is_json: bool) -> None:
    setup_log("info", is_json=is_json)

    get_log("headrace.x").info("request_failed", api_key="sk-canary", prompt="canary", messages=["canary"])

    assert "canary" not in capsys.readouterr().err


def test_unknown_level_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'loud' is unknown: use one of debug, info, warning, error"):
        setup_log("loud")


@pytest.mark.parametrize("is_json", [True, False])
def test_an_event_with_strange_values_stays_one_line(capsys: pytest.CaptureFixture[str], is_json: bool) -> None:
    setup_log("info", is_json=is_json)

    get_log("headrace.x").info("request_finished", reason="a\nb\x1b[2J", path=Path("/x"), text_length=float("nan"))

    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert "/x" in err


def test_exception_brings_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    setup_log("info")

    try:
        raise ValueError("canary")
    except ValueError:
        get_log("headrace.x").exception("engine_error", num_rows=3)

    event = json.loads(capsys.readouterr().err)
    assert (event["level"], event["num_rows"]) == ("error", 3)
    assert event["exception"].endswith("ValueError: canary")
