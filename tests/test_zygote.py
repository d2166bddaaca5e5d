"""A copy of a process forks workers that have what it had, and nothing of it outlives the process."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from offpol_diag import zygote
from tests.test_processes import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux alone")


def begun(code, **how):
    """A script in an interpreter of its own, in a session of its own."""
    start = "from offpol_diag.zygote import Zygote\nimport os, signal, sys, time\n"
    return subprocess.Popen(
        [sys.executable, "-c", start + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parent,
        **how,
    )


def done(code):
    """What a script prints."""
    running = begun(code)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (0, "")
    return out


def there(pid):
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_has_what_the_process_had_when_it_was_copied_and_hears_what_it_is_told():
    assert (
        done("""
        import textwrap
        textwrap.mark = "before"

        def answer(line, more):
            line.send((textwrap.mark, more, os.getppid(), line.recv()))

        copy = Zygote.born()
        textwrap.mark = "after"
        for number in range(3):
            child, line = copy.start(answer, number)
            line.send("told")
            said = line.recv()
            child.join(10)
            assert said == ("before", number, copy.pid, "told"), said
            assert child.exitcode == 0
        print("done")
        """)
        == "done\n"
    )


def test_how_a_worker_ended_is_known():
    assert (
        done("""
        def fail(line):
            os._exit(7)

        def wait(line):
            line.recv()

        copy = Zygote.born()
        failed, _ = copy.start(fail)
        failed.join(10)
        waiting, line = copy.start(wait)
        waiting.join(0.05)
        assert waiting.exitcode is None
        waiting.kill()
        waiting.join(10)
        waiting.kill()
        assert line.poll(10)  # its end is nobody's now
        try:
            line.recv()
            sys.exit("somebody answered")
        except EOFError:
            pass
        print(failed.exitcode, waiting.exitcode)
        """)
        == "7 -9\n"
    )


def test_what_a_worker_raises_is_told_on_stderr():
    running = begun("""
        def fail(line):
            raise ValueError("of a worker")

        child, _ = Zygote.born().start(fail)
        child.join(10)
        sys.exit(child.exitcode)
    """)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "ValueError: of a worker" in err


def test_a_worker_that_cannot_be_forked_is_the_systems_error():
    assert (
        done("""
        from offpol_diag import zygote

        forked = zygote._forked

        def once():
            zygote._forked = refused
            return forked()

        def refused():
            raise BlockingIOError(11, "Resource temporarily unavailable")

        zygote._forked = once
        copy = Zygote.born()
        for _ in range(2):
            try:
                copy.start(print)
            except BlockingIOError as error:
                print(error.strerror)
        """)
        == "Resource temporarily unavailable\n" * 2
    )


def test_nothing_is_started_by_a_copy_that_is_gone():
    assert (
        done("""
        def wait(line):
            line.recv()

        copy = Zygote.born()
        child, line = copy.start(wait)
        os.kill(copy.pid, signal.SIGKILL)
        for _ in range(2):
            try:
                copy.start(wait)
            except OSError as error:
                print(type(error).__name__ in ("OSError", "BrokenPipeError", "ConnectionResetError"))
        child.kill()  # its number may be another process's by now: nobody says
        child.join()
        print(child.exitcode)
        line.close()
        """)
        == "True\nTrue\nNone\n"
    )


ENDING = """
    from multiprocessing import connection
    from offpol_diag import zygote

    def wait(line):
        line.send(os.getpid())
        connection.wait([zygote.life()])
        os._exit(0)

    copy = Zygote.born()
    (_, one), (_, two) = copy.start(wait), copy.start(wait)
    print(copy.pid, one.recv(), two.recv(), flush=True)
    {end}
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "copy.close()"])
def test_the_copy_and_its_workers_end_with_the_process(end):
    running = begun(ENDING.format(end=end))
    out, err = running.communicate(timeout=60)
    pids = [int(pid) for pid in out.split()]
    assert len(pids) == 3, err
    assert until(lambda: not any(map(there, pids)))


def test_who_reads_what_the_process_prints_does_not_wait_for_the_copy():
    running = begun("""
        copy = Zygote.born()
        copy.start(print)
        print("all", flush=True)
        os.close(1)
        time.sleep(30)
    """)
    before = time.monotonic()
    assert running.stdout.read() == "all\n"
    assert time.monotonic() - before < 20
    running.kill()
    running.communicate()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_who_is_asked_to_leave_is_the_process_alone(sent):
    running = begun(
        """
        signal.signal(signal.SIGINT, signal.SIG_DFL)

        def answer(line):
            line.send("begun")
            line.send(line.recv())

        copy = Zygote.born()
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: None)
        _, line = copy.start(answer)
        print(line.recv(), flush=True)
        sys.stdin.readline()
        line.send("still there")
        print(line.recv(), copy.start(answer)[1].recv(), flush=True)
        """,
        stdin=subprocess.PIPE,
    )
    assert running.stdout.readline() == "begun\n"
    os.killpg(running.pid, sent)
    out, err = running.communicate("go on\n", timeout=60)
    assert (out, err, running.returncode) == ("still there begun\n", "", 0)


def test_a_process_with_threads_is_not_copied():
    assert zygote.possible() == (threading.active_count() == 1)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert not zygote.possible()
    finally:
        ended.set()
        thread.join()


def test_here_nobody_waits_for_the_end_of_a_process_that_was_copied():
    assert zygote.life() is None


def test_what_the_copied_process_would_still_do_is_not_done_twice(tmp_path):
    path = tmp_path / "told"
    said = done(f"""
        import atexit

        atexit.register(lambda: open({str(path)!r}, "a").write("once\\n"))
        sys.stdout.write("said once")
        copy = Zygote.born()
        child, _ = copy.start(print)
        child.join(10)
    """)
    assert said == "said once"
    assert path.read_text() == "once\n"


def test_what_was_there_is_looked_at_by_no_collector_so_that_its_pages_are_shared():
    assert (
        done("""
        import gc

        def answer(line):
            line.send(gc.get_freeze_count() > 1000)

        _, line = Zygote.born().start(answer)
        print(line.recv(), gc.get_freeze_count() > 1000)
        """)
        == "True True\n"
    )


def test_two_copies_do_not_keep_each_other():
    running = begun("""
        one, two = Zygote.born(), Zygote.born()
        print(one.pid, two.pid, flush=True)
        os._exit(0)
    """)
    out, _ = running.communicate(timeout=60)
    assert until(lambda: not any(there(int(pid)) for pid in out.split()))
