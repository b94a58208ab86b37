"""The load generator against the mock server: what it measures is what the mock knows to be true."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.bench.counting import TokenCounter
from headrace.bench.load import Snapshot, run_load
from headrace.bench.mock.script import read_script
from headrace.bench.mock.server import MockServer
from headrace.bench.mock.truth import Truth, TruthLog, read_truths
from headrace.bench.records import Exchange, Run, Settings
from headrace.bench.sample import Sample
from headrace.testing.tiny_vocabulary import tokenizer_config, tokenizer_json

CHAT = Sample("chat", {"messages": [{"role": "user", "content": "two words"}], "max_tokens": 6})


def endless(sample: Sample = CHAT) -> Iterator[Sample]:
    return itertools.repeat(sample)


class Measured:
    """A run and the mock's own record of it."""

    def __init__(self, run: Run, truths: list[Truth]) -> None:
        self.run = run
        self.exchanges = sorted(run.exchanges, key=lambda one: one.index)
        self.truths = {int(truth.request_id.removeprefix("bench-")): truth for truth in truths}


async def measure(
    folder: Path,
    mock: dict[str, object],
    samples: Iterator[Sample] | None = None,
    *,
    snapshots: list[Snapshot] | None = None,
    headers: dict[str, str] | None = None,
    **settings: object,
) -> Measured:
    script = read_script(None, {"ttft_ms": 10, "itl_ms": 2, **mock})
    server = MockServer(script, truth=TruthLog(folder / "truth"))
    port = await server.start("127.0.0.1", 0)
    try:
        run = await asyncio.to_thread(
            run_load,
            Settings(url=f"http://127.0.0.1:{port}", model="mock", **settings),  # type: ignore[arg-type]
            samples or endless(),
            path=folder / "run.jsonl",
            headers=headers,
            progress=snapshots.append if snapshots is not None else None,
        )
    finally:
        await server.stop()
    return Measured(run, read_truths(folder / "truth"))


async def test_known_latencies_are_measured_and_never_shorter_than_they_were(tmp_path: Path) -> None:
    found = await measure(
        tmp_path, {"ttft_ms": "uniform:10:60", "itl_ms": "exponential:4"}, rate_per_s=40.0, num_requests=60
    )

    off_s: dict[str, list[float]] = {"ttft": [], "e2e": [], "chunk": []}
    for exchange in found.exchanges:
        truth = found.truths[exchange.index]
        assert exchange.first_s is not None
        assert exchange.sent_s is not None
        assert len(exchange.chunk_s) == len(truth.write_s) == 6
        off_s["ttft"].append((exchange.first_s - exchange.sent_s) - (truth.write_s[0] - truth.arrival_s))
        off_s["e2e"].append((exchange.ended_s - exchange.sent_s) - (truth.write_s[-1] - truth.arrival_s))
        chunks = zip(exchange.chunk_s, truth.write_s, strict=True)
        off_s["chunk"] += [(at_s - exchange.chunk_s[0]) - (was_s - truth.write_s[0]) for at_s, was_s in chunks]
    # Seen: 0.3 ms in quiet; the limit is for a machine with twice as many busy processes as cores.
    assert statistics.median(off_s["ttft"]) < 0.010
    assert statistics.median(off_s["e2e"]) < 0.010
    assert abs(statistics.median(off_s["chunk"])) < 0.002
    assert min(off_s["ttft"]) > -1e-5  # a clock read before the bytes came would show here
    assert min(off_s["e2e"]) > -1e-5


async def test_a_closed_loop_keeps_as_many_under_way_as_asked_and_no_more(tmp_path: Path) -> None:
    snapshots: list[Snapshot] = []
    found = await measure(
        tmp_path, {"ttft_ms": 40}, concurrency=6, num_requests=48, warmup_requests=6, processes=2, snapshots=snapshots
    )

    assert len(found.exchanges) == 54
    assert [one.index for one in found.exchanges if one.is_warmup] == list(range(6))
    assert {one.process for one in found.exchanges} == {0, 1}
    assert all(one.error is None and one.output_tokens == 6 for one in found.exchanges)
    spans = [(truth.arrival_s, 1) for truth in found.truths.values()]
    spans += [(truth.ended_s, -1) for truth in found.truths.values()]
    under_way = list(itertools.accumulate(change for _, change in sorted(spans)))
    assert max(under_way) == 6
    assert found.run.end is not None
    assert found.run.end.overhead.processes == 2
    assert found.run.end.measured_from_s > 0
    assert snapshots[-1].num_ended == 54
    assert snapshots[-1].num_chunks == 54 * 6


async def test_an_open_loop_keeps_its_schedule_however_slow_the_server_is(tmp_path: Path) -> None:
    found = await measure(tmp_path, {"ttft_ms": 100, "slots": 1}, rate_per_s=40.0, arrivals="constant", num_requests=16)

    assert [one.scheduled_s for one in found.exchanges] == pytest.approx([n / 40 for n in range(16)], abs=1e-6)
    # One slot makes 9 a second of 40: each waits for all before it, and its wait is in the figure.
    e2e_s = [one.ended_s - one.scheduled_s for one in found.exchanges]
    assert e2e_s[15] > 16 * 0.110 - 15 / 40
    assert all(after > before for before, after in itertools.pairwise(e2e_s))


async def test_a_stall_is_seen_by_all_whom_an_open_loop_sends_into_it(tmp_path: Path) -> None:
    stall = {"every_s": 1, "for_ms": 500}
    found = await measure(
        tmp_path, {"ttft_ms": 1, "tokens": 1, "stall": stall}, rate_per_s=50.0, arrivals="constant", num_requests=100
    )

    # Of two seconds at least one half-second stall lies within: 25 requests that wait evenly from 0 to 0.5 s.
    waits_s = sorted((one.ended_s - one.scheduled_s for one in found.exchanges), reverse=True)
    assert waits_s[0] > 0.45
    assert waits_s[9] > 0.25
    assert len([wait_s for wait_s in waits_s if wait_s > 0.1]) >= 20


@pytest.mark.parametrize(
    ("mock", "settings", "kind", "status"),
    [
        ({"errors": [{"status": 429}]}, {}, "status", 429),
        ({"faults": [{"kind": "reset", "at_token": 3}]}, {}, "reset", 200),
        ({"faults": [{"kind": "close", "at_token": 3}]}, {}, "reset", 200),
        ({"faults": [{"kind": "hang", "at_token": 3}]}, {"timeout_s": 0.3}, "timeout", 200),
        ({"faults": [{"kind": "malformed", "at_token": 3}]}, {}, "malformed", 200),
        ({"faults": [{"kind": "stream_error", "at_token": 3}]}, {}, "stream_error", 200),
        ({"faults": [{"kind": "no_done"}]}, {}, "no_done", 200),
        ({"faults": [{"kind": "malformed"}]}, {"is_streamed": False}, "malformed", 200),
    ],
    ids=["status", "reset", "close", "hang", "malformed", "stream error", "no DONE", "malformed whole answer"],
)
async def test_each_fault_is_an_error_of_its_kind(
    tmp_path: Path, mock: dict[str, object], settings: dict[str, object], kind: str, status: int
) -> None:
    found = await measure(tmp_path, mock, concurrency=2, num_requests=4, **settings)

    assert [(one.error, one.status) for one in found.exchanges] == [(kind, status)] * 4
    assert all(one.detail for one in found.exchanges)
    if kind in ("reset", "timeout", "stream_error"):
        assert all(len(one.chunk_s) == 3 for one in found.exchanges)


async def test_a_server_that_is_not_there_is_a_connect_error(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        settings = Settings(url=f"127.0.0.1:{closed.getsockname()[1]}", model="m", concurrency=1, num_requests=2)

        run = await asyncio.to_thread(run_load, settings, endless(), path=tmp_path / "run.jsonl")

    assert [one.error for one in run.exchanges] == ["connect", "connect"]
    assert all(one.sent_s is None and one.status is None for one in run.exchanges)


@pytest.mark.parametrize(
    ("sample", "is_streamed", "prompt_tokens"),
    [
        (CHAT, False, 2),
        (Sample("completions", {"prompt": "a b c", "max_tokens": 3}), True, 3),
        (Sample("embeddings", {"input": ["a b", "c"]}), True, 3),
        (Sample("rerank", {"query": "q", "documents": ["a b", "c"]}), True, 5),
    ],
    ids=["chat at once", "completions", "embeddings", "rerank"],
)
async def test_every_operation_is_answered_and_counted(
    tmp_path: Path, sample: Sample, is_streamed: bool, prompt_tokens: int
) -> None:
    found = await measure(tmp_path, {}, endless(sample), concurrency=2, num_requests=4, is_streamed=is_streamed)

    for one in found.exchanges:
        assert one.error is None, one.detail
        assert one.operation == sample.operation
        assert one.prompt_tokens == prompt_tokens
        assert one.first_s is not None
        assert one.scheduled_s <= one.first_s <= one.ended_s
        assert bool(one.chunk_s) == (sample.operation == "completions")


async def test_bundled_tokens_are_fewer_chunks_but_as_many_tokens(tmp_path: Path) -> None:
    found = await measure(tmp_path, {"tokens_per_chunk": 2, "chunks_per_write": 3}, concurrency=1, num_requests=2)

    for one in found.exchanges:
        assert one.output_tokens == 6
        assert len(one.chunk_s) == 3
        assert len(set(one.chunk_s)) == 1  # one write: they came at one moment


async def test_tokens_are_counted_beside_the_server(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(320)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(64)))
    counter = TokenCounter(tmp_path)

    found = await measure(
        tmp_path, {"text": "four words of it"}, concurrency=2, num_requests=6, tokenizer=str(tmp_path)
    )

    for one in found.exchanges:
        assert (one.prompt_tokens, one.output_tokens) == (2, 6)
        assert one.prompt_tokens_counted == counter.count("two words")
        assert one.output_tokens_counted == counter.count("four words of it four words")


async def test_a_time_limit_stops_sending_but_waits_for_answers(tmp_path: Path) -> None:
    found = await measure(tmp_path, {"ttft_ms": 60}, concurrency=24, duration_s=0.5)

    assert max(one.scheduled_s for one in found.exchanges) < 0.5
    assert max(one.ended_s for one in found.exchanges) > 0.5
    assert all(one.error is None for one in found.exchanges)


async def test_a_trace_is_played_at_its_times_and_speed(tmp_path: Path) -> None:
    samples = [Sample("chat", CHAT.body, at_s=at_s) for at_s in (0.0, 0.4, 0.5)]

    found = await measure(tmp_path, {}, iter(samples), arrivals="trace", trace_speed=2.0)

    assert [one.scheduled_s for one in found.exchanges] == pytest.approx([0.0, 0.2, 0.25], abs=1e-6)


async def test_a_trace_without_times_is_refused_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 3 has no time"):
        await measure(tmp_path, {}, iter([Sample("chat", CHAT.body, line=3)]), arrivals="trace")


async def test_turns_of_a_conversation_follow_each_other(tmp_path: Path) -> None:
    turn: tuple[dict[str, object], ...] = ({"role": "user", "content": "and then"},)
    sample = Sample("chat", CHAT.body, follow_ups=(turn, turn), pauses_s=(0.0, 0.1))

    found = await measure(tmp_path, {}, endless(sample), concurrency=1, num_requests=6)

    assert [(one.index, one.turn) for one in found.exchanges] == [(n, n % 3) for n in range(6)]
    # The mock counts words: 2, then those of the answer (6) and of the next question (2), twice.
    assert [one.prompt_tokens for one in found.exchanges] == [2, 10, 18, 2, 10, 18]
    first, second, third = found.exchanges[:3]
    assert second.scheduled_s >= first.ended_s
    assert third.scheduled_s >= second.ended_s + 0.099


async def test_keys_reach_the_server_and_no_file(tmp_path: Path) -> None:
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"choices": []}')  # ends with itself
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = Settings(url=url, model="m", concurrency=1, num_requests=1, is_streamed=False)
    run = await asyncio.to_thread(
        run_load, settings, endless(), path=tmp_path / "run", headers={"Authorization": "Bearer secret"}
    )
    server.close()

    assert b"authorization: Bearer secret\r\n" in seen[-1]
    assert b"secret" not in (tmp_path / "run").read_bytes()
    assert [one.error for one in run.exchanges] == [None]


async def test_a_request_on_a_connection_that_the_server_has_closed_is_sent_again(tmp_path: Path) -> None:
    num_requests: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the first request of each connection, and closes when the second comes."""
        for number in range(2):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            num_requests.append(number)
            if number:
                break
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            body = b'{"choices": []}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n" + body)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = Settings(url=url, model="m", concurrency=1, num_requests=4, is_streamed=False)
    run = await asyncio.to_thread(run_load, settings, endless(), path=tmp_path / "run")
    server.close()

    assert [(one.error, one.status) for one in run.exchanges] == [(None, 200)] * 4
    assert num_requests.count(1) == 3  # each second request on a connection was lost once and sent again


async def test_every_exchange_is_written_once_with_times_in_order(tmp_path: Path) -> None:
    found = await measure(tmp_path, {"ttft_ms": 1, "itl_ms": 0}, concurrency=16, num_requests=400)

    assert [one.index for one in found.exchanges] == list(range(400))
    for one in found.exchanges:
        assert_in_order(one)


def assert_in_order(one: Exchange) -> None:
    assert one.sent_s is not None
    assert one.first_s is not None
    moments = [one.scheduled_s, one.sent_s, *one.chunk_s, one.ended_s]
    assert moments == sorted(moments)
    assert one.first_s == one.chunk_s[0]
