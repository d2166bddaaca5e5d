"""On a Ray cluster of several nodes: the numbers, the errors and the remarks of one machine."""

import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster_jobs import Ids, Look

import offpol_diag
from offpol_diag.analyze import ENGINES, analyze
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import ClusterError, DumpError, UsageError, install
from offpol_diag.presets.catalogue import load
from offpol_diag.run import ray as tasks
from offpol_diag.run.devices import ON_CPU
from offpol_diag.run.ray import Ray

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
    with pytest.MonkeyPatch.context() as patch, Ray.on(choice.name, progress) as engine:
        patch.setattr(tasks, "SHARDS", {"cpu": 1, "cuda": 1})
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


def reduced(tmp_path, each=None, progress=None, **trouble):
    folder = tmp_path / "marks"
    folder.mkdir()
    dump = open_dump([write(tmp_path / "x.parquet")])
    with small(ON_CPU, progress=progress) as engine:
        return engine.reduce(dump, Look(folder, **trouble), each), dump


def offpol(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "offpol_diag", *arguments],
        env=os.environ | {"OFFPOL_DIAG_QUIET": "1"} | environment,
        cwd=Path(arguments[1]).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )


# Of 12 shards: the first 8, one after the other, with the other 4.
SHAPE = f"({'(' * 7}.{'.)' * 7}{'(' * 3}.{'.)' * 3})"


@pytest.fixture
def one_retry(monkeypatch):
    """Let Ray retry once: it waits longer before each retry."""
    monkeypatch.setattr(tasks, "RETRIES", 1)


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


def test_a_worker_that_dies_once_changes_nothing(nodes, tmp_path):
    assert reduced(tmp_path, at=13, trouble="killed_once")[0] == Ids(tuple(range(SEQUENCES)), SHAPE)


def test_a_worker_that_dies_again_and_again_is_an_error_that_says_so(nodes, tmp_path, one_retry):
    with pytest.raises(ClusterError, match="lost a task 2 times") as caught:
        reduced(tmp_path, at=13, trouble="killed_always")
    assert "memory" in caught.value.hint


def test_an_error_of_the_dump_itself_is_not_tried_again(nodes, tmp_path):
    with pytest.raises(DumpError, match="a bad row"):
        reduced(tmp_path, at=13, trouble="refused_once")


def test_a_bug_in_a_task_keeps_its_name(nodes, tmp_path):
    with pytest.raises(ZeroDivisionError, match="a bug"):
        reduced(tmp_path, at=13, trouble="bug")


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


def test_a_dump_that_a_node_does_not_find_is_not_called_damaged(nodes, tmp_path):
    with pytest.raises(DumpError, match=rf"^on node {re.escape(socket.gethostname())}: ") as caught:
        reduced(tmp_path, at=13, trouble="absent")
    assert caught.value.hint.startswith("every node must find the dump under the same path")


DRIVER = """
import sys
from offpol_diag.cli.exits import exit_codes
import test_ray

with exit_codes():
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
    error, empty, hint = err.splitlines()[-3:]
    assert error.startswith("error: the cluster is lost (")
    assert empty == ""
    assert hint == "hint: see why its head ended, start it and repeat the command"


def test_an_address_where_nobody_answers_is_an_error_at_once(tmp_path):
    done = offpol("analyze", write(tmp_path / "x.parquet"), "--engine", "ray", RAY_ADDRESS="127.0.0.1:1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: RAY_ADDRESS=127.0.0.1:1: no cluster answers there (")
    assert "\n\nhint: check that the cluster runs" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("address", ["nonsense", "host:port", "ray://[::1]:1"])
def test_an_address_that_is_none_is_told(monkeypatch, address):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", pytest.fail)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterError, match="no cluster answers there") as caught, Ray.on("cpu"):
        pass
    assert address in caught.value.message


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
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(ClusterError, match=said), Ray.on(device):
        pass
