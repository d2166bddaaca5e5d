"""DumpWriter and `recover` when the disk is full or a journal is damaged: no batch that was taken is lost."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from offpol_diag import journal as module
from offpol_diag.cli import app
from offpol_diag.journal import FRAME, recover
from offpol_diag.writer import DumpWriter


def batch(i: int, tokens: int = 3) -> dict[str, Any]:
    """Make batch `i`: two sequences whose names and log-probs say which it is."""
    rows = [np.full(tokens, -1.0 - i), np.full(1, -0.5 - i)]
    return {"rollout_log_probs": rows, "old_log_probs": rows, "sequence_id": [f"{i}a", f"{i}b"]}


def held(path: Path) -> list[int]:
    """Return which batches a dump has, each whole and with its own values."""
    found = pq.read_table(path).to_pydict()
    numbers = [int(name[:-1]) for name in found["sequence_id"][::2]]
    assert found["sequence_id"] == [f"{i}{half}" for i in numbers for half in "ab"]
    for column in ("rollout_log_probs", "old_log_probs"):
        assert [row[0] for row in found[column]] == [v for i in numbers for v in (-1.0 - i, -0.5 - i)]
    return numbers


def written(path: Path, count: int = 5, **options: Any) -> DumpWriter:
    writer = DumpWriter(path, **options)
    for i in range(count):
        writer.write(**batch(i))
    return writer


@contextmanager
def full(room: int = 0) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M", "none", str(folder)]
    with suppress(FileNotFoundError):
        if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
            yield folder
            subprocess.run(["umount", "-l", str(folder)], check=True)
            return
    pytest.skip("nothing may be mounted here")


def journals(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.journal"))


def failing(call: Callable[..., Any], error: BaseException, after: bool = False) -> Callable[..., Any]:
    """Return a function that fails at its first call, before or after it does what it is to do."""
    left = [error]

    def once(*args: Any, **kwargs: Any) -> Any:
        if left and not after:
            raise left.pop()
        done = call(*args, **kwargs)
        if left:
            raise left.pop()
        return done

    return once


# ---------------------------------------------------------------- close


@pytest.mark.parametrize("room", [0, 4, 200])
def test_close_on_a_full_disk_raises_each_time_and_finishes_once_there_is_room(
    tmp_path: Path, room: int
) -> None:
    writer = written(tmp_path / "d")
    for _ in range(3):
        with full(room), pytest.raises(OSError, match="too large"):
            writer.close()
        assert not (tmp_path / "d").exists()
        assert len(journals(tmp_path)) == 1
    writer.close()
    assert held(tmp_path / "d") == [0, 1, 2, 3, 4]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    writer.close()


@pytest.mark.parametrize("elsewhere", [True, False])
def test_recover_gives_every_batch_of_a_writer_that_could_not_close(tmp_path: Path, elsewhere: bool) -> None:
    writer = written(tmp_path / "d", row_group_tokens=6)
    with full(), pytest.raises(OSError, match="too large") as caught:
        writer.close()
    assert "offpol-diag recover" in caught.value.__notes__[0]
    target = recover(tmp_path / "d", tmp_path / "e" if elsewhere else None)
    assert held(target) == [0, 1, 2, 3, 4]
    assert [*tmp_path.iterdir()] == [target]
    with pytest.raises(ValueError, match="gone: recovered or removed"):
        writer.close()
    assert held(target) == [0, 1, 2, 3, 4]


def test_a_failed_close_leaves_room_for_others(tmp_path: Path) -> None:
    writer = written(tmp_path / "d", row_group_tokens=1)
    with full(), pytest.raises(OSError, match="too large"):
        writer.close()
    assert [*tmp_path.iterdir()] == journals(tmp_path)
    writer.discard()
    assert not [*tmp_path.iterdir()]


def test_what_comes_after_a_failed_close_is_refused(tmp_path: Path) -> None:
    writer = written(tmp_path / "d")
    with full(), pytest.raises(OSError, match="too large"):
        writer.close()
    with pytest.raises(ValueError, match=r"close\(\) has failed; call it again"):
        writer.write(**batch(5))
    writer.close()
    assert held(tmp_path / "d") == [0, 1, 2, 3, 4]


def test_the_journal_goes_when_the_dump_is_synced_renamed_and_its_name_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **kwargs: Any) -> Any:
            kind = f" {Path(args[0]).suffix}" if isinstance(args[0], Path) else ""
            if name == "sync":
                kind = " directory" if os.path.samestat(os.fstat(args[0]), tmp_path.stat()) else " file"
            happened.append(name + kind)
            return call(*args, **kwargs)

        return watch

    writer = written(tmp_path / "d")
    monkeypatch.setattr(os, "fsync", watched("sync", os.fsync))
    monkeypatch.setattr(Path, "replace", watched("rename", Path.replace))
    monkeypatch.setattr(Path, "unlink", watched("remove", Path.unlink))
    writer.close()
    order = ["sync file", "rename .tmp", "sync directory", "remove .journal"]
    assert [one for one in happened if one in order] == order
    (tmp_path / "d").unlink()
    writer = written(tmp_path / "d")
    with full(), pytest.raises(OSError, match="too large"):
        writer.close()
    happened.clear()
    recover(tmp_path / "d")
    assert [one for one in happened if one in order] == order


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_dump_that_cannot_be_synced_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, calls: int
) -> None:
    writer, synced = written(tmp_path / "d"), []

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        if len(synced) == calls:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=os.strerror(number)):
        writer.close()
    assert len(journals(tmp_path)) == 1
    first = len(synced)
    writer.close()
    assert len(synced) == first + 2  # the file and the directory, as the first time
    assert held(tmp_path / "d") == [0, 1, 2, 3, 4]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_a_file_system_that_cannot_sync_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    written(tmp_path / "d").close()
    assert held(tmp_path / "d") == [0, 1, 2, 3, 4]


PLACES = [
    (module.Made, "add"),
    (module.Made, "finish"),
    (Path, "replace"),
    (module, "sync_directory"),
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name"), PLACES)
@pytest.mark.parametrize("then", ["close", "recover"])
def test_an_interrupt_during_close_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool, then: str
) -> None:
    writer = written(tmp_path / "d", row_group_tokens=8)
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), KeyboardInterrupt(), after))
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    assert len(journals(tmp_path)) == 1
    if then == "close":
        writer.close()
        assert [p.name for p in tmp_path.iterdir()] == ["d"]
    else:
        recover(journals(tmp_path)[0], tmp_path / "e")
    assert held(tmp_path / ("d" if then == "close" else "e")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["add", "finish"])
def test_without_a_journal_what_is_lost_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    writer = DumpWriter(tmp_path / "d", row_group_tokens=1, journal=False)
    monkeypatch.setattr(module.Made, name, failing(getattr(module.Made, name), KeyboardInterrupt()))

    def run() -> None:
        writer.write(**batch(0))
        writer.close()

    with pytest.raises(KeyboardInterrupt):
        run()
    for call in (lambda: writer.write(**batch(1)), writer.close):
        with pytest.raises(ValueError, match="a write has failed, and there is no journal"):
            call()
    writer.discard()
    assert not [*tmp_path.iterdir()]


# ---------------------------------------------------------------- write


@pytest.mark.parametrize("failed", [0, 1, 3])
def test_a_write_that_failed_on_a_full_disk_leaves_a_dump_and_a_journal_that_read_well(
    tmp_path: Path, failed: int
) -> None:
    """The disk takes any part of the batch: nothing, some bytes, all but one."""
    probe = written(tmp_path / "probe", failed + 1)
    size = journals(tmp_path)[0].stat().st_size
    probe.discard()
    start = size * failed // (failed + 1)
    for room in range(start, size, 97):
        writer = written(tmp_path / "d", failed)
        with full(room), pytest.raises(OSError, match="too large") as caught:
            writer.write(**batch(99))
        assert f"batch {failed} is not written" in caught.value.__notes__[0]
        assert [path.stat().st_size for path in journals(tmp_path)] == [start] * (failed > 0)
        for i in range(failed, 5):
            writer.write(**batch(i))
        (tmp_path / ".copy.journal").write_bytes(journals(tmp_path)[0].read_bytes())
        assert held(recover(tmp_path / ".copy.journal", tmp_path / "copy")) == [0, 1, 2, 3, 4]
        writer.close()
        assert held(tmp_path / "d") == [0, 1, 2, 3, 4]
        for path in tmp_path.iterdir():
            path.unlink()


def test_an_interrupt_while_a_batch_is_added_to_the_journal_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, put = written(tmp_path / "d", 2), module.put

    def interrupted(file: Any, at: int, *parts: Any) -> int:
        put(file, at, *parts)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.write(**batch(99, 1000))
    writer.write(**batch(2))
    (tmp_path / ".copy.journal").write_bytes(journals(tmp_path)[0].read_bytes())
    assert held(recover(tmp_path / ".copy.journal", tmp_path / "copy")) == [0, 1, 2]
    assert not (tmp_path / ".copy.journal").exists()
    writer.close()
    assert held(tmp_path / "d") == [0, 1, 2]


def test_a_block_that_ends_because_the_disk_is_full_leaves_its_journal(tmp_path: Path) -> None:
    def run() -> None:
        with written(tmp_path / "d") as writer, full():
            writer.write(**batch(5))

    with pytest.raises(OSError, match="too large") as caught:
        run()
    assert "offpol-diag recover" in caught.value.__notes__[-1]
    assert [*tmp_path.iterdir()] == journals(tmp_path)
    assert held(recover(tmp_path / "d")) == [0, 1, 2, 3, 4]


def test_a_block_whose_first_write_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too large"), DumpWriter(tmp_path / "d") as writer, full(10):
        writer.write(**batch(0))
    assert not [*tmp_path.iterdir()]


def test_on_a_small_disk_nothing_is_lost_and_recover_makes_room_for_itself(disk: Path) -> None:
    """The whole of it, on a disk that is really full."""
    noise = np.random.default_rng(0)
    writer, taken = DumpWriter(disk / "d", row_group_tokens=20_000), []
    for i in range(60):
        rows = -noise.random((2, 2000)).astype(np.float32)
        columns = {"old_log_probs": list(rows), "sequence_id": [f"{i}a", f"{i}b"]}
        with suppress(OSError):
            writer.write(rollout_log_probs=list(rows), **columns)
            taken.append(i)
    assert 15 < len(taken) < 60
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            writer.close()
    with pytest.raises(OSError, match="No space left"):
        recover(disk / "d")
    assert [*disk.iterdir()] == journals(disk)
    elsewhere = recover(disk / "d", disk.parent / "e")
    assert pq.read_table(elsewhere)["sequence_id"].to_pylist() == [
        f"{i}{half}" for i in taken for half in "ab"
    ]
    assert not [*disk.iterdir()]


def test_recover_removes_the_unfinished_file_before_it_needs_the_room(disk: Path) -> None:
    writer = written(disk / "d")
    with full(), pytest.raises(OSError, match="too large"):
        writer.close()
    journals(disk)[0].with_suffix(".tmp").write_bytes(bytes((1 << 20) - 3 * 4096))
    with pytest.raises(OSError, match="No space left"):
        (disk / "more").write_bytes(bytes(1 << 16))
    (disk / "more").unlink()
    assert held(recover(disk / "d")) == [0, 1, 2, 3, 4]
    assert [p.name for p in disk.iterdir()] == ["d"]


# ---------------------------------------------------------------- processes and places


def test_a_forked_process_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    code = """
import os, sys
from offpol_diag import DumpWriter
rows = [[-1.0]]
def leave():
    with DumpWriter("d.parquet") as writer:
        writer.write(rollout_log_probs=rows, old_log_probs=rows)
        if not os.fork():
            for call in (lambda: writer.write(rollout_log_probs=rows, old_log_probs=rows), writer.close):
                try:
                    call()
                except ValueError as error:
                    assert "another process" in str(error)
                else:
                    os._exit(1)
            raise SystemExit(7)
        _, status = os.wait()
        assert os.waitstatus_to_exitcode(status) == 7, status
        writer.write(rollout_log_probs=rows, old_log_probs=rows)
leave()
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert pq.read_table(tmp_path / "d.parquet").num_rows == 2


def test_a_killed_writer_is_recovered_though_a_process_it_forked_lives(tmp_path: Path) -> None:
    code = """
import os, signal, time
from offpol_diag import DumpWriter
writer = DumpWriter("d.parquet")
writer.write(rollout_log_probs=[[-1.0]], old_log_probs=[[-1.0]])
if child := os.fork():
    time.sleep(0.5)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
os.close(1)
time.sleep(120)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, stdout=subprocess.PIPE)
    assert run.returncode == -signal.SIGKILL
    try:
        assert pq.read_table(recover(tmp_path / "d.parquet")).num_rows == 1
    finally:
        os.kill(int(run.stdout), signal.SIGKILL)


def test_the_folder_of_the_dump_is_made(tmp_path: Path) -> None:
    with DumpWriter(tmp_path / "runs" / "a" / "d", rank=3) as writer:
        writer.write(**batch(0))
    assert held(tmp_path / "runs" / "a" / "d-rank00003") == [0]
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "d", tmp_path / "file" / "e" / "d"):
        with pytest.raises(ValueError, match="its directory is a file"):
            DumpWriter(path)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG])
def test_a_folder_that_cannot_be_made_is_one_clear_error(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", refuse)

    with pytest.raises(ValueError, match=rf"new/d cannot be made: {os.strerror(code)}; choose another name"):
        DumpWriter(tmp_path / "new" / "d")
    assert not [*tmp_path.iterdir()]


def test_a_name_that_no_disk_holds_is_the_same_error(tmp_path: Path) -> None:
    for path in (tmp_path / ("n" * 300), tmp_path / ("n" * 300) / "d"):
        with pytest.raises(ValueError, match="cannot be made: File name too long"):
            DumpWriter(path)


def test_a_change_of_directory_does_not_move_the_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    writer = written(Path("d"))
    monkeypatch.chdir(tmp_path / "b")
    writer.close()
    assert held(tmp_path / "a" / "d") == [0, 1, 2, 3, 4]
    assert not [*(tmp_path / "b").iterdir()]


def test_two_writers_of_one_name_do_not_share_a_file(tmp_path: Path) -> None:
    first = written(tmp_path / "d", 3, row_group_tokens=1)
    second = written(tmp_path / "d", 2, row_group_tokens=1)
    first.close()
    assert held(tmp_path / "d") == [0, 1, 2]
    second.close()
    assert held(tmp_path / "d") == [0, 1]


# ---------------------------------------------------------------- damaged journals


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the journal of five batches."""
    folder = tmp_path_factory.mktemp("journal")
    writer = written(folder / "d")
    data = journals(folder)[0].read_bytes()
    writer.discard()
    return data


def ends(data: bytes) -> list[int]:
    found = [0]
    while found[-1] < len(data):
        found.append(found[-1] + FRAME.size + FRAME.unpack_from(data, found[-1])[2])
    return found[1:]


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Flip a bit, zero, cut out, double, or replace some bytes, or cut the end off."""
    kind, at, length = (
        chance.choice("fzcdrt"),
        chance.randrange(len(data)),
        chance.choice((1, 2, 4, 8, 64, 512)),
    )
    before, hit, rest = data[:at], data[at : at + length], data[at + length :]
    if kind == "f":
        return before + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    middle = {"z": bytes(len(hit)), "c": b"", "d": hit * 2, "r": chance.randbytes(len(hit)), "t": b""}[kind]
    return before + middle + (b"" if kind == "t" else rest)


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_journal_gives_the_batches_before_the_damage_and_stays(
    tmp_path: Path, whole: bytes, seed: int
) -> None:
    """Of 100 damages each: exactly those batches, or one error where there is none before it."""
    chance = random.Random(seed)
    journal, target, counts = tmp_path / ".x.journal", tmp_path / "d", set()
    for _ in range(100):
        data = damaged(whole, chance)
        same = next((i for i, (a, b) in enumerate(zip(data, whole, strict=False)) if a != b), len(data))
        before = sum(end <= min(same, len(data)) for end in ends(whole))
        journal.write_bytes(data)
        if before:
            recover(journal, target)
            assert held(target) == [*range(before)]
            target.unlink()
        else:
            with pytest.raises(ValueError, match="it holds no whole batch"):
                recover(journal, target)
        assert not target.exists()
        if len(data) not in {0, *ends(whole)} or data != whole[: len(data)]:
            assert journal.read_bytes() == data
        counts.add(before)
    assert len(counts) > 3


def test_every_byte_of_a_journal_is_checked(tmp_path: Path, whole: bytes) -> None:
    data, until = bytearray(whole[: ends(whole)[1]]), ends(whole)[0]
    journal, target = tmp_path / ".x.journal", tmp_path / "d"
    for at in range(until, len(data), 5):
        data[at] ^= 0x40
        journal.write_bytes(data)
        data[at] ^= 0x40
        assert held(recover(journal, target)) == [0], at
        target.unlink()


def test_batches_in_another_order_are_damage(tmp_path: Path, whole: bytes) -> None:
    first, second, third = ends(whole)[:3]
    journal = tmp_path / ".x.journal"
    journal.write_bytes(whole[:first] + whole[second:third] + whole[first:second])
    assert held(recover(journal, tmp_path / "d")) == [0]


def test_a_damaged_journal_is_said_and_named(
    tmp_path: Path, whole: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    journal, end = tmp_path / ".x.journal", ends(whole)[2]
    journal.write_bytes(whole[: end + 40] + b"\x55" + whole[end + 41 :])
    (tmp_path / ".x.tmp").write_bytes(b"unfinished")
    recover(journal, tmp_path / "d")
    said = f"{journal}: cut off or damaged at byte {end} of {len(whole)}: {tmp_path / 'd'} has the 3 batches"
    assert said in caplog.text
    assert (tmp_path / ".x.tmp").read_bytes() == b"unfinished"
    result = CliRunner().invoke(app, ["recover", str(journal), "--to", str(tmp_path / "e"), "--quiet"])
    assert result.exit_code == 0
    assert f"damaged at byte {end}" in result.stderr.replace("\n", " ")
    assert held(tmp_path / "e") == [0, 1, 2]


@pytest.mark.parametrize("begin", ["damaged", "empty"])
def test_a_journal_of_no_use_is_one_error_and_stays(tmp_path: Path, whole: bytes, begin: str) -> None:
    data = {"damaged": b"\0" + whole[1:], "empty": b""}[begin]
    journal = tmp_path / ".x.journal"
    journal.write_bytes(data)
    result = CliRunner().invoke(app, ["recover", str(journal), "--to", str(tmp_path / "d")])
    assert result.exit_code == 2
    assert result.stderr.count("error: ") == result.stderr.count("hint: ") == 1
    assert [*tmp_path.iterdir()] == [journal]
    assert journal.read_bytes() == data


def test_recover_on_a_full_disk_is_one_error_and_keeps_the_journal(tmp_path: Path, whole: bytes) -> None:
    journal = tmp_path / ".x.journal"
    journal.write_bytes(whole)
    with full(50):
        result = CliRunner().invoke(app, ["recover", str(journal), "--to", str(tmp_path / "d")])
    assert (result.exit_code, "make room there" in result.stderr) == (2, True)
    assert [*tmp_path.iterdir()] == [journal]
    assert held(recover(journal, tmp_path / "d")) == [0, 1, 2, 3, 4]


def test_a_journal_damaged_under_its_writer_is_said(tmp_path: Path) -> None:
    writer = written(tmp_path / "d")
    with full(), pytest.raises(OSError, match="too large"):
        writer.close()
    (journal,) = journals(tmp_path)
    data = bytearray(journal.read_bytes())
    data[-1] ^= 1
    journal.write_bytes(data)
    with pytest.raises(ValueError, match="damaged; recover gives the batches before that"):
        writer.close()
    assert held(recover(tmp_path / "d")) == [0, 1, 2, 3]


def test_a_journal_that_cannot_be_removed_is_said(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, said = tmp_path / ".x.journal", list[str]()
    journal.write_bytes(whole)
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path == journal:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    assert held(recover(journal, tmp_path / "d", warn=said.append)) == [0, 1, 2, 3, 4]
    assert said == [
        f"{journal}: cannot be removed (Read-only file system); all that it holds is in {tmp_path / 'd'}"
    ]


def test_a_conversion_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"rollout_log_probs": [-1.0], "old_log_probs": [-1.0]}')
    with full(50):
        call = ["convert", str(tmp_path / "a.jsonl"), "--to", str(tmp_path / "d.parquet")]
        result = CliRunner().invoke(app, call)
    assert (result.exit_code, "cannot be converted" in result.stderr) == (2, True)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
