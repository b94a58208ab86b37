import socket
import stat
from pathlib import Path

import pytest

from headrace.base.errors import AddressInUseError, ConfigError, MachineError
from headrace.fleet.sockets import (
    is_loopback,
    open_listeners,
    open_unix_listener,
    private_folder,
    runtime_folder,
    state_folder,
)


def test_port_zero_gives_a_free_port_and_its_url() -> None:
    (listener,) = open_listeners("127.0.0.1", 0, setting="server.port")

    with listener.socket, socket.create_connection((listener.host, listener.port)):
        assert listener.url == f"http://127.0.0.1:{listener.port}"


def test_port_in_use_names_the_port_and_the_setting() -> None:
    (taken,) = open_listeners("127.0.0.1", 0, setting="server.port")

    with taken.socket, pytest.raises(AddressInUseError, match=rf"port {taken.port} .* another server\.port"):
        open_listeners("127.0.0.1", taken.port, setting="server.port")


@pytest.mark.parametrize("host", ["no such host", "256.1.1.1", "203.0.113.7"])
def test_host_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(ConfigError):
        open_listeners(host, 0, setting="server.port")


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("0.0.0.0", False)]
)
def test_loopback_is_told_from_the_rest(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_unix_socket_is_for_this_user_alone_and_replaces_a_dead_one(tmp_path: Path) -> None:
    open_unix_listener(tmp_path / "w.sock").close()

    with open_unix_listener(tmp_path / "w.sock"):
        assert stat.S_IMODE((tmp_path / "w.sock").stat().st_mode) == 0o600


def test_socket_path_over_the_limit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120)

    with pytest.raises(ConfigError, match=r"the limit is 107: set paths\.runtime"):
        open_unix_listener(path)


def test_private_folder_is_made_0700(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "a" / "b")

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)

    with pytest.raises(MachineError, match="chmod 700"):
        private_folder(tmp_path / "open")


def test_link_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(MachineError, match="not a folder of this user"):
        private_folder(tmp_path / "link")


def test_folders_follow_the_environment(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}

    assert runtime_folder(None, env) == tmp_path / "headrace"
    assert state_folder(None, env) == tmp_path / "state" / "headrace"
    assert runtime_folder(str(tmp_path / "own"), env) == tmp_path / "own"
