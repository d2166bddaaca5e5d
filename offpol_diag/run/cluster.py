"""Connect to a Ray cluster, notice when it is lost, and keep Ray's own lines off stdout."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from offpol_diag.errors import ClusterError, UsageError, install
from offpol_diag.readers.parquet import first_line
from offpol_diag.run.machine import cores

ADDRESS = "RAY_ADDRESS"
WHERE = f"check that the cluster runs and can be reached from here; without {ADDRESS} a local one is started"
PATIENCE = 10.0
"""Timeout in seconds for connecting to a cluster."""
AWAY, TICK = 3.0, 1.0
"""Seconds after which a head that refuses connections is lost, and between checks that it is there."""
HEAD = "its head at"
RECONNECT, MARGIN = "RAY_gcs_rpc_server_reconnect_timeout_s", 10.0
"""Seconds after which Ray ends a process that lost its head, with exit code 1; and how much earlier we do."""


def library() -> ModuleType:
    """Import Ray."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise UsageError("Ray is not installed", install("ray")) from error


def slots(kind: str) -> int:
    """Return the number of tasks that the cluster can run at once."""
    there = library().cluster_resources()
    cpus, gpus = int(there.get("CPU", 0)), int(there.get("GPU", 0))
    if kind == "cuda" and not gpus:
        raise ClusterError("no node of the cluster has a GPU", "say --device cpu, or add a node with a GPU")
    if not cpus:
        raise ClusterError("no node of the cluster has a CPU for tasks", "add a node that offers CPUs to Ray")
    return min(cpus, gpus) if kind == "cuda" else cpus


@contextmanager
def connected() -> Iterator[None]:
    """Connect to a cluster within the block; an existing connection is used and kept.

    Raises:
        UsageError: Ray is not installed.
        ClusterError: the named cluster does not answer.
    """
    ray = library()
    if ray.is_initialized():
        yield
        return
    address = os.environ.get(ADDRESS, "")
    before = signal.getsignal(signal.SIGTERM)
    where: dict[str, Any] = {"address": address}
    if not address:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        where = {"address": "local", "num_cpus": cores(), "include_dashboard": False}
    try:
        _knock(address)
        try:
            ray.init(**where, log_to_driver=False, logging_level=logging.CRITICAL)
        except (OSError, RuntimeError, ValueError, ImportError) as error:
            who = f"{ADDRESS}={address}: the cluster" if address else "a local Ray"
            raise ClusterError(f"{who} cannot be used ({first_line(error)})", WHERE) from error
        with _leaving_as(before), _rays_lines_aside():
            yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Check that a cluster answers: Ray itself would try for minutes and write to stderr.

    Ray uses gRPC over HTTP/2, whose servers answer a client's preface with a SETTINGS frame. With TLS this
    would come only after a handshake.
    """
    if address in ("", "auto", "local"):
        return
    settings = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # an empty frame of type 4, SETTINGS
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PATIENCE) as line:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
                if line.recv(len(settings))[3:4] != settings[3:4]:
                    raise OSError("what listens there is not Ray")
    except (OSError, ValueError) as error:
        said = f"no cluster answers there ({first_line(error)})"
        raise ClusterError(f"{ADDRESS}={address}: {said}", WHERE) from error


class Lifeline:
    """Checks that the head of the cluster, and the Ray of this node, still accept connections.

    Ray ends a process with exit code 1 when it notices that one of them is gone, the head after a minute.
    """

    def __init__(self, head: str, own: str = "") -> None:
        """Take the head's address, and the path of the socket of this node's Ray, if it is known."""
        self._head, self._own = head, own
        self._checked = time.monotonic()

    @classmethod
    def now(cls) -> Lifeline | None:
        """Return that of the connected cluster; None behind a Ray client, whose own errors say enough."""
        ray = library()
        if ray.util.client.ray.is_connected():
            return None
        here = ray.get_runtime_context()
        sockets = [one["RayletSocketName"] for one in ray.nodes() if one["NodeID"] == here.get_node_id()]
        return cls(here.gcs_address, next(filter(os.path.exists, sockets), ""))

    def check(self, at_once: bool = False) -> None:
        """Check every `TICK` seconds, or `at_once`.

        Raises:
            ClusterError: the head or this node's Ray is gone.
        """
        began = time.monotonic()
        if not at_once and began - self._checked < TICK:
            return
        while lost := self._lost():
            what, error = lost
            least = AWAY if isinstance(error, ConnectionRefusedError | FileNotFoundError) else PATIENCE
            wait = max(least, _reconnecting()) if what.startswith(HEAD) else least
            if time.monotonic() - began >= wait:
                hint = "see why it ended (memory of its machine, Ray's logs), start it and repeat the command"
                said = f"the cluster is lost: {what} ({error.strerror or error})"
                raise ClusterError(said, hint) from error
            time.sleep(0.2)
        self._checked = time.monotonic()

    def _lost(self) -> tuple[str, OSError] | None:
        host, _, port = self._head.rpartition(":")
        what = f"{HEAD} {self._head} does not answer any more"
        try:
            socket.create_connection((host.strip("[]"), int(port)), AWAY).close()
            what = "the Ray of this machine has ended"
            if self._own:
                with socket.socket(socket.AF_UNIX) as line:
                    line.connect(self._own)
        except OSError as error:
            return what, error
        return None


def _reconnecting() -> float:
    """Return the seconds that a lost head is waited for, if the user has set Ray's own timeout."""
    try:
        return float(os.environ.get(RECONNECT, "")) - MARGIN
    except ValueError:
        return 0.0


@contextmanager
def _rays_lines_aside() -> Iterator[None]:
    """Write what Ray prints on stdout within the block to stderr: stdout is for the result."""
    worker: Any = import_module("ray._private.worker")
    own = getattr(worker, "print_to_stdstream", None)

    def aside(data: Mapping[str, Any], *_: object, **__: object) -> None:
        with suppress(OSError):
            os.write(2, "".join(f"(ray) {line}\n" for line in data["lines"]).encode())

    worker.print_to_stdstream = aside
    try:
        yield
    finally:
        worker.print_to_stdstream = own


@contextmanager
def silent() -> Iterator[None]:
    """Drop what Ray writes to stderr within the block; its native code writes to the descriptor.

    What this program itself writes to `sys.stderr` is kept.
    """
    before = sys.stderr
    before.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    ours = open(kept, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    try:
        if before is sys.__stderr__:
            sys.stderr = ours
        yield
    finally:
        with suppress(OSError):
            ours.flush()
        sys.stderr = before
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def _leaving_as(before: Any) -> Iterator[None]:
    """Use the SIGTERM handler `before` within the block: Ray's own loses exit codes while Ray waits.

    Ray passes KeyboardInterrupt through, so an exit is raised as one and converted back on leaving the block.
    """
    exits: list[SystemExit] = []

    def leave(signum: int, frame: object) -> None:
        try:
            before(signum, frame)
        except SystemExit as stop:
            exits.append(stop)
            raise KeyboardInterrupt from stop

    if before is None or threading.current_thread() is not threading.main_thread():
        yield  # handlers not set by Python are kept, and only the main thread may set one
        return
    signal.signal(signal.SIGTERM, leave if callable(before) else before)
    try:
        yield
    except KeyboardInterrupt:
        if exits:
            raise exits[0] from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
