"""Packed weights on disk: what is read back is what was saved, damage is found wherever it is, and nothing fails."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.engine import packed_cache
from headrace.engine.packed_cache import PackedCache, list_entries, remove_entries
from headrace.engine.packed_file import Header, read_packed, write_packed
from headrace.engine.weight_plan import plan_weights
from headrace.engine.weights import PackedWeight, load_weights
from headrace.program.opcodes import Layout
from headrace.program.spec import build_program, spec_from_files
from headrace.registry.manifest import write_manifest
from headrace.registry.model import open_model
from headrace.testing.tiny import write_tiny_gguf, write_tiny_llama

GIB = 2**30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = write_tiny_gguf(tmp_path / "m.gguf", matrix_type="Q4_1", embedding_type="Q8_0")
    settle(path)
    return path


def settle(*paths: Path) -> None:
    """Makes the files look as if they had lain there for a while; ctime cannot be set, so the cache's clock is."""
    for path in paths:
        os.utime(path, ns=(10**18, 10**18))


def place(
    folder: Path, model: Path, *, quantization: str = "none", limit_bytes: int = GIB, is_settled: bool = True
) -> tuple[PackedCache, list[PackedWeight]]:
    """Returns a model's place in the cache, and its weights as they are packed."""
    files = open_model(model)
    program = build_program(spec_from_files(files))
    plans = plan_weights(files, program, dtype="bf16", quantization=quantization)
    cache = PackedCache(folder, limit_bytes, files, plans, name=model.stem, scheme=f"bf16, {quantization}")
    if is_settled:
        cache._started_at_ns += 10**10
    return cache, load_weights(files, program, quantization=quantization, rope_positions=32)


def kept(weights: list[PackedWeight]) -> dict[int, PackedWeight]:
    return {weight.index: weight for weight in weights if weight.layout is not Layout.ROPE_F32}


def are_equal(first: dict[int, PackedWeight], second: dict[int, PackedWeight]) -> bool:
    return first.keys() == second.keys() and all(
        (a.layout, a.n, a.k) == (b.layout, b.n, b.k) and np.array_equal(a.data, b.data)
        for a, b in ((first[index], second[index]) for index in first)
    )


def saved(folder: Path, model: Path) -> tuple[Path, dict[int, PackedWeight]]:
    cache, weights = place(folder, model)
    assert cache.save(list(kept(weights).values()))
    return cache.path, kept(weights)


@pytest.mark.parametrize("threads", [1, 3])
def test_saved_weights_are_read_back_aligned_and_equal(tmp_path: Path, model: Path, threads: int) -> None:
    _, expected = saved(tmp_path / "packed", model)

    found = place(tmp_path / "packed", model)[0].read(threads)

    assert are_equal(found, expected)
    assert all(weight.data.ctypes.data % 64 == 0 for weight in found.values())


def test_stored_weights_are_not_packed_again(tmp_path: Path, model: Path) -> None:
    _, expected = saved(tmp_path / "packed", model)
    files = open_model(model)

    def refuse(*_: object) -> np.ndarray:
        raise AssertionError("packed again")

    weights = load_weights(files, build_program(spec_from_files(files)), stored=expected, pack=refuse)

    assert are_equal(kept(weights), expected)


def test_a_flipped_byte_anywhere_is_found_and_the_entry_removed(tmp_path: Path, model: Path) -> None:
    path, _ = saved(tmp_path / "packed", model)
    whole = path.read_bytes()
    rng = np.random.default_rng(3)
    # Every byte of prefix and header's beginning, the ends of every part, and a sample of the rest.
    places = {*range(200), *range(len(whole) - 64, len(whole)), *rng.integers(0, len(whole), 400).tolist()}

    missed = []
    for offset in sorted(places):
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        if place_only(tmp_path / "packed", model).read(1) or path.exists():
            missed.append(offset)

    assert not missed


def place_only(folder: Path, model: Path) -> PackedCache:
    files = open_model(model)
    plans = plan_weights(files, build_program(spec_from_files(files)), dtype="bf16", quantization="none")
    return PackedCache(folder, GIB, files, plans, name=model.stem, scheme="bf16, none")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("empty", lambda data: b""),
        ("prefix only", lambda data: data[:64]),
        ("cut off", lambda data: data[:-1]),
        ("longer", lambda data: data + b"\0"),
        ("half", lambda data: data[: len(data) // 2]),
        ("zeroed block", lambda data: data[:4096] + bytes(4096) + data[8192:]),
        ("swapped blocks", lambda data: data[:4096] + data[8192:12288] + data[4096:8192] + data[12288:]),
        ("other version", lambda data: data[:7] + b"\2" + data[8:]),
        ("other file", lambda data: b"GGUF" + bytes(400)),
    ],
)
def test_a_wrong_file_is_removed_and_replaced(
    tmp_path: Path, model: Path, name: str, change: Callable[[bytes], bytes]
) -> None:
    path, expected = saved(tmp_path / "packed", model)
    path.write_bytes(change(path.read_bytes()))

    cache, weights = place(tmp_path / "packed", model)
    found = cache.read(2)

    assert not found
    assert not path.exists()
    assert cache.save(list(kept(weights).values()))
    assert are_equal(cache.read(2), expected)


def test_another_models_file_under_this_name_is_refused(tmp_path: Path, model: Path) -> None:
    path, _ = saved(tmp_path / "packed", model)
    other = write_tiny_gguf(tmp_path / "n.gguf", matrix_type="Q4_1", embedding_type="Q8_0", seed=7)
    other_path, _ = saved(tmp_path / "packed", other)
    shutil.copy(other_path, path)

    assert not place_only(tmp_path / "packed", model).read(1)


def test_a_header_that_places_weights_outside_its_data_is_refused(tmp_path: Path) -> None:
    weight = PackedWeight(0, Layout.VECTOR_F32, 16, 1, np.zeros(64, np.uint8))
    path = tmp_path / "forged"
    with path.open("w+b") as file:
        write_packed(file.fileno(), Header("k", "m", "d", "s", []), [weight])
        data = bytearray(path.read_bytes())
    forged = data.replace(b"[0,%d,16,1,0]" % Layout.VECTOR_F32, b"[0,%d,99,1,0]" % Layout.VECTOR_F32)
    assert forged != data
    header_bytes = int.from_bytes(forged[8:16], "little")
    forged[24:56] = hashlib.sha256(forged[64 : 64 + header_bytes] + forged[-4:]).digest()
    path.write_bytes(forged)

    with path.open("rb") as file, pytest.raises(Exception, match="its weights take"):
        read_packed(file.fileno(), "k", 1)


@pytest.mark.parametrize("what", ["content", "quantization", "time stamp"])
def test_the_key_follows_model_and_scheme(tmp_path: Path, model: Path, what: str) -> None:
    before = place_only(tmp_path, model).path

    match what:
        case "content":
            write_tiny_gguf(model, matrix_type="Q4_1", embedding_type="Q8_0", seed=7)
            settle(model)
            after = place_only(tmp_path, model).path
        case "quantization":
            after = place(tmp_path, model, quantization="int8")[0].path
        case _:
            os.utime(model, ns=(10**18, 10**18 + 1))
            after = place_only(tmp_path, model).path

    assert after != before


def test_the_key_follows_the_build(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = place_only(tmp_path, model).path

    monkeypatch.setattr(packed_cache, "build_digest", lambda: "another build")

    assert place_only(tmp_path, model).path != before


def test_a_model_with_manifest_keeps_its_entry_when_it_is_copied(tmp_path: Path) -> None:
    first = write_tiny_llama(tmp_path / "first")
    write_manifest(first, source="test", revision="1")
    before = place_only(tmp_path / "packed", first).path
    shutil.copytree(first, tmp_path / "second")

    after = place_only(tmp_path / "packed", tmp_path / "second").path

    assert after.name.removeprefix("second") == before.name.removeprefix("first")


def test_weights_of_a_file_that_was_just_written_are_not_saved(tmp_path: Path, model: Path) -> None:
    cache, weights = place(tmp_path / "packed", model, is_settled=False)

    assert not cache.save(list(kept(weights).values()))
    assert not list_entries(tmp_path / "packed")


def test_weights_of_a_file_that_changed_while_it_was_packed_are_not_saved(tmp_path: Path, model: Path) -> None:
    cache, weights = place(tmp_path / "packed", model)
    os.utime(model, ns=(10**18, 10**18 + 5))

    assert not cache.save(list(kept(weights).values()))


def test_the_least_recently_used_entries_make_room(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    models = [
        write_tiny_gguf(tmp_path / f"{name}.gguf", matrix_type="Q4_1", embedding_type="Q8_0", seed=seed)
        for seed, name in enumerate("abcd")
    ]
    paths = [saved(folder, model)[0] for model in models[:3]]
    size = paths[0].stat().st_size
    for age, path in enumerate(paths):
        os.utime(path, (1000.0 + age, 1000.0 + age))
    assert place_only(folder, models[0]).read(1)  # now the most recently used

    cache, weights = place(folder, models[3], limit_bytes=3 * size + size // 2)
    assert cache.save(list(kept(weights).values()))

    assert [path.exists() for path in [*paths, cache.path]] == [True, False, True, True]


def test_an_entry_over_the_limit_is_not_saved_and_drives_out_nothing(tmp_path: Path, model: Path) -> None:
    path, _ = saved(tmp_path / "packed", model)
    cache, weights = place(tmp_path / "packed", model, quantization="int8", limit_bytes=1000)

    assert not cache.save(list(kept(weights).values()))
    assert path.exists()


def test_a_full_disk_leaves_no_file_and_no_error(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(fd: int, *_: object) -> None:
        os.write(fd, b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packed_cache, "write_packed", fill)
    cache, weights = place(tmp_path / "packed", model)

    assert not cache.save(list(kept(weights).values()))
    assert not list((tmp_path / "packed").iterdir())


def test_a_disk_that_would_be_full_is_spared(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=GIB))
    cache, weights = place(tmp_path / "packed", model)

    assert not cache.save(list(kept(weights).values()))


def test_a_folder_that_cannot_be_written_is_read_and_left_alone(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = saved(tmp_path / "packed", model)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("utime", "unlink"):  # permissions do not bind a superuser, who may run the tests
        monkeypatch.setattr(packed_cache.os, name, refuse)

    assert are_equal(place_only(tmp_path / "packed", model).read(1), expected)


def test_a_cache_that_cannot_be_made_is_a_warning(tmp_path: Path, model: Path) -> None:
    (tmp_path / "packed").write_text("a file, not a folder")
    cache, weights = place(tmp_path / "packed", model)

    assert not cache.read(1)
    assert not cache.save(list(kept(weights).values()))


def test_two_workers_that_save_the_same_leave_one_good_entry(tmp_path: Path, model: Path) -> None:
    places = [place(tmp_path / "packed", model) for _ in range(6)]
    expected = kept(places[0][1])
    start = threading.Barrier(len(places))

    wrong: list[int] = []

    def save(cache: PackedCache, weights: list[PackedWeight]) -> None:
        start.wait()
        for _ in range(5):
            cache.save(list(kept(weights).values()))
            found = cache.read(1)  # nothing while the first of them is being written
            if found and not are_equal(found, expected):
                wrong.append(len(found))

    threads = [threading.Thread(target=save, args=one) for one in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
    assert are_equal(places[0][0].read(1), expected)
    assert [path.suffix for path in (tmp_path / "packed").iterdir()] == [".packed"]


def test_what_another_worker_is_writing_is_left_to_it(tmp_path: Path, model: Path) -> None:
    cache, weights = place(tmp_path / "packed", model)
    (tmp_path / "packed").mkdir()
    partial = cache.path.with_suffix(".partial")
    with partial.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b"theirs")
        other.flush()

        assert not cache.save(list(kept(weights).values()))
        assert partial.read_bytes() == b"theirs"


def test_what_a_killed_worker_left_is_cleaned_away(tmp_path: Path, model: Path) -> None:
    (tmp_path / "packed").mkdir()
    stale = tmp_path / "packed" / "other-model-1234.partial"
    stale.write_bytes(b"half of a file")

    saved(tmp_path / "packed", model)

    assert not stale.exists()


def test_entries_are_listed_with_their_problem_and_removed_by_model(tmp_path: Path, model: Path) -> None:
    path, _ = saved(tmp_path / "packed", model)
    damaged = path.with_name("x.packed")
    damaged.write_bytes(b"no such thing")

    entries = {entry.path: entry for entry in list_entries(tmp_path / "packed")}
    digest = open_model(model).digest
    freed = remove_entries(tmp_path / "packed", digest)

    assert entries[path].model_digest == digest
    assert entries[path].scheme == "bf16, none"
    assert entries[path].problem is None
    assert "is longer" in (entries[damaged].problem or "")
    assert freed == entries[path].size_bytes
    assert not path.exists()


def test_saving_in_the_background_gives_way_to_the_rest(tmp_path: Path, model: Path) -> None:
    cache, weights = place(tmp_path / "packed", model)

    cache.finish_in_background(weights).join()

    assert are_equal(cache.read(1), kept(weights))


def test_weights_of_more_than_a_chunk_come_back_equal(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "big", layers=1, vocab_size=9000)  # 64 × 9000 × 2 bytes of embedding
    settle(model / "model.safetensors")

    path, expected = saved(tmp_path / "packed", model)

    assert path.stat().st_size > 2**20
    assert are_equal(place_only(tmp_path / "packed", model).read(2), expected)
