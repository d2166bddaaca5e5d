"""How workers are started: their server imports without the collector of garbage, this process meanwhile."""

import subprocess
import sys
import textwrap


def done(code):
    """Run by an interpreter of its own."""
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_the_server_imports_without_the_collector_and_workers_have_it_again():
    done("""
        import gc, sys
        from importlib import import_module
        from offpol_diag import forks

        first, *rest = forks.PRELOAD
        import_module(first)
        assert "torch" not in sys.modules  # before anything large
        before = gc.get_stats()[2]["collections"]
        for name in rest:
            import_module(name)
        assert gc.get_stats()[2]["collections"] == before
        assert gc.get_freeze_count() > 100_000  # so that workers do not write to it
        assert not gc.isenabled()

        from offpol_diag.engines import worker

        class Ended:
            def recv(self):
                raise EOFError

        gc.set_threshold(500_000)  # as a command has it that was copied
        worker.serve(Ended(), {})
        assert gc.isenabled()
        assert gc.get_threshold()[0] < 10_000
    """)


def test_what_is_needed_when_a_reading_ends_is_imported_while_the_server_starts():
    done("""
        import sys
        from offpol_diag import forks
        from offpol_diag.engines import crew
        from offpol_diag.errors import WorkerError

        told = []

        def start(*given):
            assert told == ["serve"]
            assert "pyro.ops.stats" in {*sys.modules}
            raise OSError("no process")

        forks.serve, forks.start = lambda: told.append("serve") or missing(), start

        def missing():
            assert not set(crew.LATER) & {*sys.modules}

        try:
            crew.Crew().grow(1)
        except WorkerError:
            sys.exit(0)
        sys.exit("it did not try to start one")
    """)
