"""The way to a Ray cluster: finding it, asking what it has, and saying why it failed."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from offpol_diag.engines.room import cores
from offpol_diag.engines.tasks import Unread
from offpol_diag.errors import ClusterError, OffpolError, UsageError
from offpol_diag.readers.files import first_line

ADDRESS = "RAY_ADDRESS"
PATIENCE = 10.0
"""Seconds in which a cluster must take a connection."""
RETRIES = 3
"""How often a task is run again when its worker died or its files could not be read."""
WHERE = f"check that the cluster runs and can be reached from here; without {ADDRESS} a local one is started"
NAMED = ("auto", "local")
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""An empty frame of HTTP/2 settings: its fourth byte is their number among the kinds of frame."""


def library() -> ModuleType:
    """Ray.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError("Ray is not installed", 'pip install "offpol-diag[ray]"') from error
    return ray


@contextmanager
def connected() -> Iterator[None]:
    """Within the block there is a cluster; one that this process was connected to already stays so.

    Raises:
        UsageError: Ray is not installed.
        ClusterError: the cluster that is named does not answer.
    """
    ray = library()
    if ray.is_initialized():
        yield
        return
    address = os.environ.get(ADDRESS, "")
    _knock(address)
    before = signal.getsignal(signal.SIGTERM)
    try:
        _join(ray, address)
        with _leaving_as(before):
            yield
    finally:
        ray.shutdown()


def _join(ray: Any, address: str) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(address="local", num_cpus=cores(), include_dashboard=False, **quiet)
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        who = f"{ADDRESS}={address}: the cluster" if address else "a local Ray"
        raise ClusterError(f"{who} cannot be used ({first_line(error)})", WHERE) from error


def _knock(address: str) -> None:
    """Ray itself asks for minutes before it gives up."""
    if not address or address in NAMED:
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PATIENCE) as line:
            _greet(line)
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"{ADDRESS}={address}: no cluster answers there ({first_line(error)})", WHERE
        ) from error


def _greet(line: socket.socket) -> None:
    """Ray speaks gRPC, that is HTTP/2: whoever does answers a greeting with its settings.

    Raises:
        OSError: whoever is there does not.
    """
    if os.environ.get("RAY_USE_TLS", "0") != "0":  # settings come only after a handshake
        return
    line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
    if line.recv(len(SETTINGS))[3:4] != SETTINGS[3:4]:
        raise OSError("what listens there is not Ray")


@contextmanager
def _leaving_as(before: Any) -> Iterator[None]:
    """SIGTERM does what it did `before`: Ray takes it for itself, and loses an exit's code while it waits.

    An interrupt passes through Ray as it is, so an exit goes that way and becomes one again on this side.
    """
    exits: list[SystemExit] = []

    def leave(signum: int, frame: object) -> None:
        try:
            before(signum, frame)
        except SystemExit as stop:
            exits.append(stop)
            raise KeyboardInterrupt from stop

    _on_terminate(leave if callable(before) else before)
    try:
        yield
    except KeyboardInterrupt:
        if exits:
            raise exits[0] from None
        raise
    finally:
        _on_terminate(before)


def _on_terminate(handler: Any) -> None:
    """Only the main thread has a say in it; a handler that is not Python's is left alone."""
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def kind_of(device: str) -> str:
    """cpu or cuda: what every task is given.

    Raises:
        UsageError: neither.
    """
    kinds = {"auto": "cpu", "cpu": "cpu", "cuda": "cuda"}
    if device not in kinds:
        raise UsageError(
            f"device {device!r}: tasks run where Ray has room",
            "with --engine ray say cpu, or cuda for a GPU per task",
        )
    return kinds[device]


def slots(kind: str) -> int:
    """Tasks that the cluster can run at once.

    Raises:
        ClusterError: none; Ray would wait forever.
    """
    there = library().cluster_resources()
    cpus, gpus = int(there.get("CPU", 0)), int(there.get("GPU", 0))
    if kind == "cuda" and not gpus:
        raise ClusterError("no node of the cluster has a GPU", "say --device cpu, or add a node with a GPU")
    if not cpus:
        raise ClusterError("no node of the cluster has a CPU for tasks", "add a node that offers CPUs to Ray")
    return min(cpus, gpus) if kind == "cuda" else cpus


def failure(error: Exception) -> OffpolError | None:
    """What a task's end means to the user; None where it is a bug, whose traceback is to be seen."""
    from ray.exceptions import RayTaskError

    if not isinstance(error, RayTaskError):
        return ClusterError(
            f"the cluster lost a task {RETRIES + 1} times ({first_line(error)})",
            "a worker that is killed most often had too little memory: offer Ray fewer CPUs per node",
        )
    cause = error.cause
    if isinstance(cause, Unread):
        return cause.error
    if isinstance(cause, ImportError) or "failed to import on the worker" in str(error):
        return ClusterError(
            f"a node cannot import what a task needs ({first_line(cause)})",
            "install the same offpol-diag on every node",
        )
    return None
