import json
import os
import select
import signal
import sys
from pathlib import Path

from headrace.fleet.process import Child, ChildSpec, WaitingChild, describe_exit, scrub_env


def spec(code: str, *, launch: bytes = b"{}", pass_fds: tuple[int, ...] = ()) -> ChildSpec:
    return ChildSpec("child", "worker", (sys.executable, "-S", "-c", code), launch, pass_fds)


def wait(child: Child) -> int:
    assert select.select([child.pidfd], [], [], 30)[0]
    return child.reap()


def test_environment_is_an_allow_list() -> None:
    env = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "XDG_CACHE_HOME": "/c",
        "OPENAI_API_KEY": "sk",
        "AWS_SECRET": "s",
        "HF_TOKEN": "t",
    }

    assert scrub_env(env) == {"PATH": "/bin", "LC_ALL": "C", "XDG_CACHE_HOME": "/c"}


def test_child_reads_its_launch_from_the_descriptor_and_sees_no_secret(tmp_path: Path) -> None:
    report = tmp_path / "report"
    code = (
        "import os, sys; launch = os.read(int(sys.argv[2]), 1000).decode();"
        f"open({str(report)!r}, 'w').write(launch + str(sorted(os.environ)))"
    )

    child = Child(spec(code, launch=json.dumps({"a": 1}).encode()), {"PATH": "/bin", "OPENAI_API_KEY": "sk"})

    assert wait(child) == 0
    assert report.read_text().startswith('{"a": 1}')
    assert "OPENAI_API_KEY" not in report.read_text()


def test_child_has_no_descriptor_but_those_passed(tmp_path: Path) -> None:
    extra = os.open(tmp_path, os.O_RDONLY)
    report = tmp_path / "report"
    code = (
        f"import os, sys; open({str(report)!r}, 'w').write(' '.join(os.listdir('/proc/self/fd')) + ' ' + sys.argv[2])"
    )

    child = Child(spec(code), {})
    wait(child)
    os.close(extra)

    *fds, launch_fd = report.read_text().split()
    # 0 to 2, the launch, and the two that listing and writing take.
    assert len(set(fds) - {"0", "1", "2", launch_fd}) <= 2


def test_child_killed_by_a_signal_is_described() -> None:
    child = Child(spec("import signal; signal.pause()"), {})

    child.send_signal(signal.SIGKILL)
    code = wait(child)

    assert describe_exit(code) == "signal SIGKILL"
    assert describe_exit(3) == "exit 3"


def test_signal_to_an_ended_child_is_ignored() -> None:
    child = Child(spec("pass"), {})
    assert select.select([child.pidfd], [], [], 30)[0]
    os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)

    child.send_signal(signal.SIGTERM)

    assert child.reap() == 0


def test_child_leads_a_session_of_its_own() -> None:
    child = Child(spec("import signal; signal.pause()"), {})

    assert os.getsid(child.pid) == child.pid
    child.send_signal(signal.SIGKILL)
    wait(child)


READ_ALL = "import os, sys; data = os.fdopen(int(sys.argv[2]), 'rb').read();"


def test_waiting_child_goes_on_with_the_launch_that_it_is_told(tmp_path: Path) -> None:
    report = tmp_path / "report"
    told = spec(READ_ALL + f"open({str(report)!r}, 'wb').write(data)", launch=b"x" * 200_000)  # more than a pipe holds
    waiting = WaitingChild(told.command, told.pass_fds, {})

    child = Child(told, {}, waiting)
    waiting.close()

    assert wait(child) == 0
    assert report.read_bytes() == told.launch


def test_waiting_child_that_is_told_nothing_is_ended() -> None:
    inherited, held = os.pipe()
    waiting = WaitingChild(spec(READ_ALL).command, (held,), {})
    os.close(held)

    waiting.close()

    assert os.read(inherited, 1) == b""  # nobody holds the other end any more
    os.close(inherited)


def test_waiting_child_that_died_is_found_dead_like_any_other() -> None:
    told = spec("raise SystemExit(3)", launch=b"x" * 200_000)
    waiting = WaitingChild(told.command, told.pass_fds, {})

    child = Child(told, {}, waiting)

    assert wait(child) == 3
