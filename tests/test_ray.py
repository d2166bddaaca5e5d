"""On a Ray cluster of several nodes: the numbers, the errors and the remarks of one machine."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster_jobs import Ids, Look, length

import offpol_diag
from offpol_diag.analyze import ENGINES, analyze
from offpol_diag.errors import ClusterError, DumpError, UsageError, install
from offpol_diag.presets.catalogue import load
from offpol_diag.readers import open_dump
from offpol_diag.run import cluster
from offpol_diag.run import ray as tasks
from offpol_diag.run.devices import ON_CPU
from offpol_diag.run.ray import FAN, Ray
from offpol_diag.run.threads import Each
from tests.s3server import gated, moto

if "CI" in os.environ:
    import ray  # CI installs it: there its absence is a failure
else:
    ray = pytest.importorskip("ray", reason="THE RAY ENGINE IS NOT TESTED: ray is missing")
# The cut of a trainer batch, a weight divided by its mean, a veto.
PRESETS = "token_is,seq_mis,m2po,seq_is_norm,geo_rs"
SEQUENCES, GROUP = 48, 4


@pytest.fixture(scope="module")
def nodes():
    """Start a cluster of two nodes, one of which claims a GPU; this process is its driver."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # workers run `cluster_jobs`
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # no node has credentials of its machine
        node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=node)
        del node["include_dashboard"]
        made.add_node(**node, num_gpus=1)
        ray.init(address=made.address, log_to_driver=False, logging_level="CRITICAL")
        yield made
        ray.shutdown()
        made.shutdown()


def write(path, seed=0, group=GROUP, lengths=None, **changes):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 30, SEQUENCES) if lengths is None else lengths
    logs = [-rng.exponential(0.4, n) for n in lengths]
    table = {
        "rollout_log_probs": logs,
        "old_log_probs": [np.minimum(x + rng.normal(0, 0.3, len(x)), -1e-6) for x in logs],
        "response_mask": [rng.random(n) < 0.9 for n in lengths],
        "rewards": rng.normal(size=len(lengths)),
        "group_id": np.arange(len(lengths)) // 8,
        "step": np.arange(len(lengths)) % 3,
    } | changes
    columns = {
        name: pa.array(x if isinstance(x, np.ndarray) else list(map(list, x))) for name, x in table.items()
    }
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return str(path)


@contextmanager
def small(choice, workers=None, progress=None):
    """Let every row group be a shard."""
    with Ray.on(choice.name, progress) as engine:
        engine.shard = 1
        yield engine


@pytest.fixture
def shards(nodes, monkeypatch):
    monkeypatch.setitem(ENGINES, "ray", small)


def both(path, **options):
    """Analyze on one machine and on the cluster; return both without what differs on purpose."""
    presets = load().resolve(PRESETS)
    found = [analyze([path], presets=presets, engine=engine, **options) for engine in ("local", "ray")]
    return [json.loads(one.model_copy(update={"run": found[0].run}).to_json()) for one in found]


def numbers(value, path=""):
    if isinstance(value, dict):
        for key, one in value.items():
            yield from numbers(one, f"{path}/{key}")
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from numbers(one, f"{path}/{i}")
    else:
        yield path, value


def assert_close(one, two):
    one, two = dict(numbers(one)), dict(numbers(two))
    assert one.keys() == two.keys()
    for path, value in one.items():
        if isinstance(value, float) and isinstance(two[path], float):
            assert math.isclose(value, two[path], rel_tol=1e-9, abs_tol=1e-12), path
        else:
            assert value == two[path], path


def test_every_number_is_that_of_one_machine_the_settled_ones_included(shards, tmp_path):
    local, far = both(write(tmp_path / "x.parquet"))
    assert {"m2po", "seq_is_norm"} <= local["presets"].keys()
    assert_close(local, far)


def test_a_second_run_is_equal_to_the_last_bit(shards, tmp_path):
    path, presets = write(tmp_path / "x.parquet"), load().resolve("token_is")
    one, two = (analyze([path], presets=presets, engine="ray") for _ in range(2))
    assert one.run.engine == "ray, 24 tasks"  # 12 for the advantages, 12 for the rest
    assert one.model_copy(update={"run": two.run}) == two


def test_rows_of_sequences_come_back_in_order(shards, tmp_path):
    path, presets = write(tmp_path / "x.parquet"), load().resolve(PRESETS)
    for engine in ("local", "ray"):
        analyze([path], presets=presets, engine=engine, sequences=tmp_path / f"{engine}.rows")
    local, far = (pq.read_table(tmp_path / f"{engine}.rows") for engine in ("local", "ray"))
    assert local.column("sequence_id").to_pylist() == [str(i) for i in range(SEQUENCES)]
    for name in local.column_names:
        one, two = (table.column(name).to_pylist() for table in (local, far))
        assert one == pytest.approx(two, rel=1e-9) if isinstance(one[0], float) else one == two


def test_a_bad_row_is_the_same_error(shards, tmp_path):
    bad = [[-1.0] * 3] * SEQUENCES
    old = [list(row) for row in bad]
    old[30][1] = old[41][0] = math.nan
    path = write(
        tmp_path / "x.parquet", rollout_log_probs=bad, old_log_probs=old, response_mask=[[1] * 3] * SEQUENCES
    )
    said = []
    for engine in ("local", "ray"):
        with pytest.raises(DumpError) as caught:
            analyze([path], engine=engine)
        said.append((caught.value.message, caught.value.hint))
    assert said[0] == said[1]
    assert "row group 7, row 30" in said[0][0]


def test_skipped_rows_and_remarks_are_those_of_one_machine(shards, tmp_path):
    rollout, old = [[-1.0] * 3 for _ in range(SEQUENCES)], [[-1.1] * 3 for _ in range(SEQUENCES)]
    for i in (3, 17, 18, 40, 41, 42, 47):
        rollout[i][0] = 0.5
    old[33][2] = 0.2
    path = write(
        tmp_path / "x.parquet",
        rollout_log_probs=rollout,
        old_log_probs=old,
        response_mask=[[1] * 3] * SEQUENCES,
    )
    local, far = both(path, on_bad_row="skip")
    assert local["dump"]["skipped"]["count"] == 7
    assert "above 0" in local["dump"]["notes"][0]
    assert local["dump"] == far["dump"]


# ---------------------------------------------------------------- what may happen to a task


def reduced(tmp_path, each=None, progress=None, **trouble):
    folder = tmp_path / "marks"
    folder.mkdir()
    dump = open_dump([write(tmp_path / "x.parquet")])
    with small(ON_CPU, progress=progress) as engine:
        return engine.reduce(dump, Look(folder, **trouble), each), dump


# Of 12 shards: the first 8, one after the other, with the other 4.
SHAPE = f"({'(' * 7}.{'.)' * 7}{'(' * 3}.{'.)' * 3})"


def test_every_sequence_is_seen_once_in_order_and_merged_in_one_shape(nodes, tmp_path):
    seen, dump = reduced(tmp_path)
    assert seen.ids == tuple(range(SEQUENCES))
    assert seen.shape == SHAPE
    assert dump.info.rows == SEQUENCES


@pytest.fixture
def one_retry(monkeypatch):
    """Let Ray retry once: it waits longer before each retry."""
    monkeypatch.setattr(tasks, "RETRIES", 1)


def test_a_worker_that_dies_once_changes_nothing(nodes, tmp_path):
    assert reduced(tmp_path, at=13, trouble="killed_once")[0] == Ids(tuple(range(SEQUENCES)), SHAPE)


def test_a_worker_that_dies_again_and_again_is_an_error_that_says_so(nodes, tmp_path, one_retry):
    with pytest.raises(ClusterError, match="lost a task 2 times") as caught:
        reduced(tmp_path, at=13, trouble="killed_always")
    assert "memory" in caught.value.hint


def test_a_disk_that_stays_away_is_the_error_of_the_reader(nodes, tmp_path, one_retry):
    with pytest.raises(DumpError, match="the disk is away"):
        reduced(tmp_path, at=13, trouble="unread_always")


def test_an_error_of_the_dump_itself_is_not_tried_again(nodes, tmp_path):
    with pytest.raises(DumpError, match="a bad row"):
        reduced(tmp_path, at=13, trouble="refused_once")


def test_a_bug_in_a_task_keeps_its_name(nodes, tmp_path):
    with pytest.raises(ZeroDivisionError, match="a bug"):
        reduced(tmp_path, at=13, trouble="bug")


def test_data_of_batches_comes_in_order_though_a_worker_failed_to_read_once(nodes, tmp_path):
    picked, reported = [], []
    seen, _ = reduced(
        tmp_path,
        Each(length, picked.append),
        lambda done, of: reported.append((done, of)),
        at=0,
        trouble="unread_once",
    )
    assert seen == Ids(tuple(range(SEQUENCES)), SHAPE)
    assert picked == [GROUP] * (SEQUENCES // GROUP)
    assert reported == [(GROUP * (i + 1), SEQUENCES) for i in range(SEQUENCES // GROUP)]


def test_few_tasks_are_under_way_and_an_interrupt_ends_them(nodes, tmp_path):
    def interrupt(done, of):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reduced(tmp_path, progress=interrupt, seconds=0.2)
    begun = len(list((tmp_path / "marks").iterdir()))
    assert begun <= 2 * 2 < SEQUENCES // GROUP
    (tmp_path / "again").mkdir()
    assert reduced(tmp_path / "again")[0].ids == tuple(range(SEQUENCES))
    assert len(list((tmp_path / "marks").iterdir())) <= 2 * 2


def test_a_task_that_asks_for_a_gpu_runs_where_ray_counts_one(nodes):
    """The node has no GPU but in Ray's books, so what can be seen is where the task was put."""
    with Ray.on("cuda") as engine:
        assert engine.slots == 1
        assert engine.shard > Ray("cpu", 1).shard
        gpus, node, _ = ray.get(engine.task(where).remote(), timeout=60)
    (has_gpu,) = [one["NodeID"] for one in ray.nodes() if one["Resources"].get("GPU")]
    assert (gpus, node) == (1, has_gpu)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_no_process_has_a_second_task_with_a_gpu(nodes, device):
    """CUDA stays on the GPU that a process saw first, whichever Ray gives to its next task."""
    with Ray.on(device) as engine:
        task = engine.task(where)
        found = [ray.get(task.remote(), timeout=60) for _ in range(2 if device == "cuda" else 4)]
    assert {gpus for gpus, *_ in found} == {int(device == "cuda")}
    assert (len({process for *_, process in found}) == len(found)) is (device == "cuda")


def where():
    context = ray.get_runtime_context()
    return len(context.get_accelerator_ids()["GPU"]), context.get_node_id(), os.getpid()


def test_a_node_with_another_version_is_refused(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr("offpol_diag.run.ray.version", lambda name: "0.0.0")
    with pytest.raises(ClusterError, match=r"a node has offpol-diag .*, and this is 0\.0\.0"):
        reduced(tmp_path)


def test_from_the_command_line_a_cluster_is_joined_by_its_address(nodes, tmp_path):
    path = write(tmp_path / "x.parquet")
    done = offpol(
        "analyze", path, "--engine", "ray", "--presets", "token_is", "--json", "-", RAY_ADDRESS=nodes.address
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert result["run"]["engine"] == "ray, 2 tasks"
    assert result["run"]["device"] == "cpu"


def offpol(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "offpol_diag", *arguments],
        env=os.environ | {"OFFPOL_DIAG_QUIET": "1"} | environment,
        cwd=Path(arguments[1]).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_termination_while_ray_waits_leaves_with_its_own_code(nodes):
    """A failed gate is the only way to 1, and that is what Ray makes of an exit."""

    def leave(signum, frame):
        raise SystemExit(143)

    never = ray.remote(max_retries=0)(lambda: time.sleep(100)).remote()  # cancelled below
    soon = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    signal.signal(signal.SIGTERM, leave)
    try:
        soon.start()
        with pytest.raises(SystemExit) as stop, cluster._leaving_as(leave):
            ray.wait([never], timeout=20)
        assert stop.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is leave
    finally:
        soon.cancel()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ray.cancel(never, force=True)


# ---------------------------------------------------------------- a node that cannot read the dump


def test_credentials_that_only_the_driver_has_are_asked_of_every_node(shards, tmp_path, monkeypatch):
    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    with moto() as backend, gated(backend, unsigned=403) as gate:
        client = boto3.client("s3", endpoint_url=gate.url, region_name="us-east-1")
        client.create_bucket(Bucket="runs")
        client.upload_file(write(tmp_path / "x.parquet"), "runs", "x.parquet")
        with pytest.raises(DumpError) as caught:
            analyze([f"s3://runs/x.parquet?endpoint_override={gate.url}&region=us-east-1"], engine="ray")
    said = caught.value.message
    node = re.escape(f"on node {socket.gethostname()} (")
    assert re.match(rf"{node}[0-9.]+\): s3://runs/x\.parquet: access is denied", said)
    assert "secret" not in said
    assert caught.value.hint.startswith("every node needs the credentials, not only the one of the command; ")
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint


def test_a_dump_that_a_node_does_not_find_is_not_called_damaged(nodes, tmp_path):
    with pytest.raises(DumpError, match=rf"^on node {re.escape(socket.gethostname())} \(") as caught:
        reduced(tmp_path, at=13, trouble="absent")
    assert caught.value.hint.startswith("every node must find the dump under the same path")


def test_an_error_of_the_dump_itself_names_no_node(nodes, tmp_path):
    with pytest.raises(DumpError) as caught:
        reduced(tmp_path, at=13, trouble="refused_once")
    assert (caught.value.message, caught.value.hint) == ("a bad row", "mend it")


# ---------------------------------------------------------------- a cluster that goes away

DRIVER = """
import sys
from offpol_diag.cli.exits import exit_codes
from offpol_diag.run.cluster import silent
import test_ray

with exit_codes(), silent():
    test_ray.reduced(test_ray.Path(sys.argv[1]), seconds=1)
"""


def test_a_head_that_is_killed_is_an_error_within_seconds_and_not_a_failed_gate(tmp_path, monkeypatch):
    """Ray itself ends the process after a minute, with exit code 1 and a line of its own."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    try:
        command, address = [sys.executable, "-c", DRIVER, str(tmp_path)], made.address
        driver = subprocess.Popen(
            command,
            env=os.environ | {"RAY_ADDRESS": address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun = time.monotonic()
        while not list(tmp_path.glob("marks/*")) and driver.poll() is None:
            assert time.monotonic() < begun + 100
            time.sleep(0.1)
        made.head_node.kill_gcs_server()
        made.head_node.kill_raylet()
        killed = time.monotonic()
        out, err = driver.communicate(timeout=100)
    finally:
        made.shutdown()
    assert driver.returncode == 2, err
    assert time.monotonic() - killed < 40
    assert out == ""
    error, empty, hint = err.splitlines()
    assert error.startswith(f"error: the cluster is lost: its head at {address} does not answer any more (")
    assert empty == ""
    assert hint.startswith("hint: see why it ended")


@pytest.fixture
def lifeline(tmp_path, monkeypatch):
    """Yield the listening sockets of a head and of a node, and what checks them."""
    monkeypatch.setattr(cluster, "AWAY", 0.5)
    path = str(tmp_path / "raylet")
    with socket.create_server(("127.0.0.1", 0)) as head, socket.socket(socket.AF_UNIX) as own:
        own.bind(path)
        own.listen()
        yield head, own, cluster.Lifeline(f"127.0.0.1:{head.getsockname()[1]}", path)


def test_a_cluster_that_is_there_passes_every_check(lifeline):
    lifeline[-1].check(at_once=True)


@pytest.mark.parametrize(("which", "said"), [(0, "its head at 127.0.0.1:"), (1, "the Ray of this machine")])
def test_each_end_of_the_cluster_is_missed(lifeline, which, said):
    lifeline[which].close()
    with pytest.raises(ClusterError, match=f"the cluster is lost: {said}"):
        lifeline[-1].check(at_once=True)


def test_a_cluster_is_checked_once_a_second(lifeline, monkeypatch):
    lifeline[0].close()
    lifeline[-1].check()
    monkeypatch.setattr(cluster, "TICK", 0.0)
    with pytest.raises(ClusterError):
        lifeline[-1].check()


def test_a_head_that_comes_back_in_the_time_that_ray_is_given_is_waited_for(lifeline, monkeypatch):
    head, _, line = lifeline
    place, back = head.getsockname(), []
    head.close()
    monkeypatch.setenv(cluster.RECONNECT, "40")
    soon = threading.Timer(1.5, lambda: back.append(socket.create_server(place)))
    soon.start()
    line.check(at_once=True)
    soon.join()
    back[0].close()


def test_the_ray_of_this_machine_is_not_waited_for_as_nothing_starts_it_again(lifeline, monkeypatch):
    monkeypatch.setenv(cluster.RECONNECT, "400")
    lifeline[1].close()
    begun = time.monotonic()
    with pytest.raises(ClusterError, match="the Ray of this machine"):
        lifeline[-1].check(at_once=True)
    assert time.monotonic() - begun < 10


def test_what_ray_prints_goes_to_stderr_since_stdout_is_the_results(capfd):
    from ray._private import worker

    data = {"lines": ["Raylet is terminated."], "pid": "raylet", "is_err": False}
    before = worker.print_to_stdstream
    with cluster._rays_lines_aside():
        worker.print_to_stdstream(data, ignore_prefix=False)
    assert worker.print_to_stdstream is before
    assert capfd.readouterr() == ("", "(ray) Raylet is terminated.\n")


def test_quiet_drops_what_native_code_writes_and_keeps_our_own(tmp_path):
    code = """
import os, sys
from offpol_diag.run.cluster import silent
with silent():
    os.write(2, b"of Ray\\n")
    print("ours", file=sys.stderr)
print("after", file=sys.stderr)
os.write(2, b"as before\\n")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == ["ours", "after", "as before"]


@pytest.mark.parametrize(("quiet", "silenced"), [(True, True), (False, False)])
def test_the_command_line_silences_ray_with_quiet_alone(quiet, silenced, monkeypatch):
    from offpol_diag.cli.running import running
    from offpol_diag.requests import Doctor

    seen = []
    monkeypatch.setattr(cluster, "silent", lambda: seen.append(True) or nullcontext())
    with running(Doctor(engine="ray", quiet=quiet)):
        pass
    assert bool(seen) is silenced


# ---------------------------------------------------------------- without a cluster


def test_an_address_where_nobody_answers_is_an_error_at_once(tmp_path):
    done = offpol("analyze", write(tmp_path / "x.parquet"), "--engine", "ray", RAY_ADDRESS="127.0.0.1:1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: RAY_ADDRESS=127.0.0.1:1: no cluster answers there (")
    assert "\n\nhint: check that the cluster runs" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_is_not_ray_is_told_apart(nodes, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=answer, args=(server,))
        answering.start()
        with pytest.raises(ClusterError, match="what listens there is not Ray"):
            cluster._knock(f"127.0.0.1:{server.getsockname()[1]}")
        answering.join()
    cluster._knock(nodes.address)


def answer(server):
    with server.accept()[0] as line:
        line.sendall(b"HTTP/1.1 400 Bad Request\r\n")
        line.recv(100)


@pytest.mark.parametrize("address", ["nonsense", "host:port", "ray://[::1]:1"])
def test_an_address_that_is_none_is_told(monkeypatch, address):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", pytest.fail)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterError, match="no cluster answers there") as caught, cluster.connected():
        pass
    assert address in caught.value.message


def test_rays_error_of_an_unreachable_cluster_is_one_line(monkeypatch):
    def refuse(**_):
        raise RuntimeError("Version mismatch\nand much more")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with (
        pytest.raises(ClusterError, match=r"the cluster cannot be used \(Version mismatch\)$"),
        cluster.connected(),
    ):
        pass


def test_without_ray_the_hint_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="Ray is not installed") as caught:
        analyze(["sample_data/healthy.parquet"], engine="ray")
    assert install("ray") in caught.value.hint


def test_a_particular_gpu_cannot_be_asked_of_a_cluster_and_an_engine_must_be_known():
    with pytest.raises(UsageError, match="cuda:1"):
        analyze(["sample_data/healthy.parquet"], engine="ray", device="cuda:1")
    with pytest.raises(UsageError, match="spark") as caught:
        offpol_diag.analyze("sample_data/healthy.parquet", engine="spark")
    assert caught.value.hint == "give 'local' or 'ray'"


@pytest.mark.parametrize(
    ("there", "device", "said"),
    [({"CPU": 4.0}, "cuda", "has a GPU"), ({}, "cpu", "has a CPU"), ({"GPU": 2.0}, "cuda", "has a CPU")],
)
def test_a_cluster_that_could_never_run_a_task_is_refused(monkeypatch, there, device, said):
    monkeypatch.setattr(ray, "cluster_resources", lambda: there)
    with pytest.raises(ClusterError, match=said):
        cluster.slots(device)


class Brackets:
    """Stand-in for a task that merges: it returns the brackets of the merges."""

    def remote(self, *parts):
        assert 1 < len(parts) <= FAN
        return f"({''.join(parts)})"


@pytest.mark.parametrize("leaves", [1, 2, FAN, FAN + 1, FAN * FAN + 1, 200])
def test_merges_keep_the_order_and_few_levels(leaves):
    merges = tasks._Merges(Brackets())
    for i in range(leaves):
        merges.add(f"{i},")
    root = merges.root()

    assert root.replace("(", "").replace(")", "") == "".join(f"{i}," for i in range(leaves))
    assert FAN ** (len(root) - len(root.lstrip("("))) < FAN * max(leaves, 2)
