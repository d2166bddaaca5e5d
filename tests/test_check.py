"""`check`: curves of independent restatements of three trainers, with and without planted differences."""

import contextlib
import json
import math
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import verl_reference
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.check import curves
from offpol_diag.check.variants import BASE, Step, by_step
from offpol_diag.check.verdict import same
from offpol_diag.cli import app
from offpol_diag.errors import UsageError
from offpol_diag.forms import Reading, open_dump
from offpol_diag.presets.catalogue import load
from offpol_diag.report.check import notes, reasons
from tests.trainers import logged_hub, logged_slime
from tests.trainers.padded import padded
from tests.trainers.samples import samples

SAMPLE = Path(__file__).parents[1] / "sample_data" / "collapse.parquet"
STEPS, ROWS, START = 4, 24, 3


def verl(rows, bound=2.0, level="token"):
    names = ("response_mask", "old_log_probs", "rollout_log_probs", "current_log_probs")
    columns = {name: [row[name] for row in rows] for name in names}
    config = {
        "rollout_is": level,
        "rollout_is_threshold": bound,
        "rollout_is_batch_normalize": False,
    }
    return verl_reference.run("2025-11", columns, config).metrics


def trl(rows, bound=3.0, mode="token_truncate"):
    return logged_hub.trl(padded(rows), mode=mode, clip_max=bound)


def slime(rows, bound=2.0):
    return logged_slime.tis(samples(rows), tis_clip=bound)


TRAINERS = {
    "verl": (verl, "token_is", "rollout_corr/k3_kl", "rollout_corr/rollout_is_ratio_fraction_high"),
    "trl": (
        trl,
        "trl_token_truncate",
        "sampling/sampling_logp_difference/mean",
        "sampling/importance_sampling_ratio/mean",
    ),
    "slime": (slime, "slime_tis", "train/train_rollout_logprob_abs_diff", "train/tis_clipfrac"),
}
"""Restatement, its preset, and a metric of the gap and one of the weight."""


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Write a dump of four steps; return it with its rows by step, 24 each, masked in places."""
    table = pq.read_table(SAMPLE)
    rows = table.to_pylist()
    steps = {step: [row for row in rows if row["step"] == START + step][:ROWS] for step in range(STEPS)}
    for some in steps.values():
        for i, row in enumerate(some):  # masked tokens whose log-probs differ, and unequal lengths
            mask = row["response_mask"]
            row["response_mask"] = [int(m and (t + i) % (i % 5 + 2) > 0) for t, m in enumerate(mask)]
            row["rollout_log_probs"] = [
                x - 0.01 * (i % 7 + 1) * (t % 3) - 0.9 * (t % 97 == 0) - 0.6 * (t % 89 == 1)
                for t, x in enumerate(row["rollout_log_probs"])
            ]
    file = tmp_path_factory.mktemp("check") / "dump.parquet"
    kept = [row for step in steps.values() for row in step]
    pq.write_table(pa.Table.from_pylist(kept, schema=table.schema), file)
    read = pq.read_table(file).to_pylist()  # as float32 rounds them
    return file, {s + START: [r for r in read if r["step"] == s + START] for s in range(STEPS)}


def plain(run, rows):
    return run(rows)


def changed(change):
    return lambda run, rows: run([{**row, **change(row)} for row in rows])


def mean_of(parts):
    def make(run, rows):
        every = [run(some) for some in parts(rows)]
        return {name: sum(one[name] for one in every) / len(every) for name in every[0]}

    return make


def tokens(rows):
    return sum(sum(row["response_mask"]) for row in rows)


def token_mean(run, rows):
    every = [(run([row]), tokens([row])) for row in rows]
    return {name: sum(one[name] * n for one, n in every) / tokens(rows) for name in every[0][0]}


def times(factor):
    """Multiply means only: the sum of a maximum is none."""
    return lambda run, rows: {
        name: value * factor(rows)
        for name, value in run(rows).items()
        if not {"max", "min"} & set(name.rpartition("/")[2].split("_"))
    }


def scaled(by):
    return lambda run, rows: {name: by * x for name, x in times(lambda rows: 1)(run, rows).items()}


def finished(of):
    return lambda run, rows: {name: of(x) for name, x in run(rows).items()}


def masked_in_denominator(run, rows):
    """Divide every restatement's own masked mean by all tokens."""
    with pytest.MonkeyPatch.context() as patch:
        if run is trl:
            share = tokens(rows) / sum(len(row["response_mask"]) for row in rows)
            return times(lambda rows: share)(run, rows)

        def masked_mean(x, mask, axis=None):
            n = np.array([len(row["response_mask"]) for row in rows])
            return verl_reference.masked_sum(x, mask, axis) / (n.sum() if axis is None else n)

        def reduce(lists, batch):
            return sum(
                sum(one) / (len(s) + len(s.outside)) for one, s in zip(lists, batch, strict=True)
            ) / len(batch)

        patch.setattr(verl_reference, "masked_mean", masked_mean)
        patch.setattr(logged_slime, "reduce", reduce)
        return run(rows)


PLANTED = {
    "mask_ignored": changed(lambda row: {"response_mask": [1] * len(row["response_mask"])}),
    "masked_as_zeros": changed(
        lambda row: (
            {
                name: [x * m for x, m in zip(row[name], row["response_mask"], strict=True)]
                for name in ("rollout_log_probs", "old_log_probs", "current_log_probs")
            }
            | {"response_mask": [1] * len(row["response_mask"])}
        )
    ),
    "masked_in_denominator": masked_in_denominator,
    "reversed": changed(
        lambda row: {
            "rollout_log_probs": row["old_log_probs"],
            "old_log_probs": row["rollout_log_probs"],
        }
    ),
    "current_for_old": changed(lambda row: {"old_log_probs": row["current_log_probs"]}),
    "log_ratio_1": changed(
        lambda row: {
            "rollout_log_probs": [
                o - min(max(o - r, -1), 1)
                for o, r in zip(row["old_log_probs"], row["rollout_log_probs"], strict=True)
            ]
        }
    ),
    "micro_8": mean_of(lambda rows: [rows[at : at + 8] for at in range(0, ROWS, 8)]),
    "micro_16": mean_of(lambda rows: [rows[:16], rows[16:]]),
    "dp_4": mean_of(lambda rows: [rows[at : at + 6] for at in range(0, ROWS, 6)]),
    "dp_4_strided": mean_of(lambda rows: [rows[at::4] for at in range(4)]),
    "sequence_mean": mean_of(lambda rows: [[row] for row in rows]),
    "token_mean": token_mean,
    "sum_tokens": times(tokens),
    "sum_sequences": times(len),
    "upper_1.5": lambda run, rows: run(rows, 1.5),
    "bfloat16": finished(lambda x: float(torch.tensor(x).to(torch.bfloat16))),
    "old_for_current": changed(lambda row: {"current_log_probs": row["old_log_probs"]}),
    "unbounded": lambda run, rows: run(rows, 1e30),
    "float16": finished(lambda x: float(torch.tensor(x).to(torch.float16))),
    "decimals_4": finished(lambda x: round(float(x), 4)),
    "digits_4": finished(lambda x: float(f"{x:.3e}")),
    "times_8": scaled(8),
    "over_16": scaled(1 / 16),
    "negated": scaled(-1),
    "percent": scaled(100),
    "bits": scaled(1 / math.log(2)),
    "reversed+dp_4": lambda run, rows: PLANTED["dp_4"](lambda some: PLANTED["reversed"](run, some), rows),
    "reversed+upper_1.5": lambda run, rows: PLANTED["reversed"](lambda some: run(some, 1.5), rows),
    "masked_in_denominator+micro_8": lambda run, rows: PLANTED["micro_8"](
        lambda some: masked_in_denominator(run, some), rows
    ),
    "dp_4_strided+micro_2": mean_of(
        lambda rows: [rows[at::4][i : i + 2] for at in range(4) for i in range(0, 6, 2)]
    ),
}
"""Name of a variant, or of two → the metrics that a restatement logs by it."""


def command(*words):
    return CliRunner().invoke(app, ["check", *map(str, words)])


def write(folder, values):
    file = folder / "history.jsonl"
    lines = (json.dumps({"_step": step, **{k: float(x) for k, x in v.items()}}) for step, v in values.items())
    file.write_text("\n".join(lines))
    return file


OF_VALUES = (
    "bfloat16",
    "float16",
    "decimals_4",
    "digits_4",
    "times_8",
    "over_16",
    "negated",
    "percent",
    "bits",
)
TRIED = [
    (trainer, planted)
    for at, planted in enumerate(PLANTED)
    for turn, trainer in enumerate(TRAINERS)
    if not (planted in OF_VALUES or "+" in planted) or at % 3 == turn
]
"""Each variant in all trainers; what is done to a value alone, or is two variants at once, in one of them."""


@pytest.mark.parametrize(("trainer", "planted"), TRIED)
def test_every_planted_difference_is_named_in_every_metric_that_it_changes(trainer, planted, dump, tmp_path):
    file, rows = dump
    run, preset, *_ = TRAINERS[trainer]
    some = {step: rows[step] for step in (START, START + 1)}
    right = {step: run(some[step]) for step in some}
    values = {step: PLANTED[planted](run, some[step]) for step in some}

    found = offpol_diag.check(file, write(tmp_path, values), preset=preset)
    assert len(found.metrics) >= len(values[START]) - 1
    assert found.equal == (not found.findings)
    for one in found.metrics:
        changed = [at for at in values if not same(values[at][one.name], right[at][one.name])]
        assert one.different == changed, one.name
        named = {frozenset(name.split("+")) for name in (one.variant, *one.also) if name}
        parts = frozenset(planted.split("+"))
        # a part that does not change a metric is not named with it
        assert not changed or any(name <= parts for name in named), (one.name, one.variant, one.also)
    if found.findings:
        named = {found.findings[0].variant, *found.findings[0].also}
        assert any(frozenset(name.split("+")) <= frozenset(planted.split("+")) for name in named)


@pytest.mark.parametrize(
    ("preset", "run", "named"),
    [
        ("token_is", lambda rows: verl(rows, level="sequence"), "preset_seq_is"),
        ("trl_token_truncate", lambda rows: trl(rows, mode="token_mask"), "mask_weights"),
    ],
)
def test_another_method_than_the_one_that_is_named_is_found(preset, run, named, dump, tmp_path):
    file, rows = dump
    values = {step: run(some) for step, some in rows.items()}
    found = offpol_diag.check(file, write(tmp_path, values), preset=preset)

    assert len(found.findings) == 1
    assert named in (found.findings[0].variant, *found.findings[0].also)


def test_exchanged_names_and_averaged_extremes_are_named(dump, tmp_path):
    file, rows = dump
    values = {step: dict(verl(some)) for step, some in rows.items()}
    a, b = "rollout_corr/kl", "rollout_corr/k3_kl"
    for some in values.values():
        some[a], some[b] = some[b], some[a]
    found = {one.name: one for one in offpol_diag.check(file, write(tmp_path, values)).metrics}
    assert (found[a].variant, found[b].variant) == (f"is_{b}", f"is_{a}")

    values = {step: PLANTED["dp_4"](trl, some) for step, some in rows.items()}
    logged = write(tmp_path, values)
    found = offpol_diag.check(file, logged, preset="trl_token_truncate", dp=4)
    assert [one.variant for one in found.findings] == ["mean_of_extremes"]
    assert {one.extreme for one in found.different} == {True}


def test_the_nearest_variant_is_named_where_none_reproduces_a_metric(dump, tmp_path):
    file, rows = dump
    name = TRAINERS["trl"][2]
    values = {
        step: {name: PLANTED["sequence_mean"](trl, some)[name] * 1.00005} for step, some in rows.items()
    }
    found = offpol_diag.check(file, write(tmp_path, values), preset="trl_token_truncate")
    (one,) = found.findings
    assert (one.variant, one.nearest) == (None, "sequence_mean")
    assert 0 < one.leaves < 0.3


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_curve_that_lags_by_a_step_and_one_that_nothing_reproduces(trainer, dump, tmp_path):
    file, rows = dump
    run, preset, gap, weight = TRAINERS[trainer]
    right = {step: run(some) for step, some in rows.items()}
    late = {step + 1: {gap: one[gap], weight: one[weight] + 0.0123 * step} for step, one in right.items()}

    found = {one.name: one for one in offpol_diag.check(file, write(tmp_path, late), preset=preset).metrics}
    assert found[gap].variant == "step_before"
    assert found[weight].verdict == "different"
    assert found[weight].variant is None


def test_given_micro_batches_and_ranks_are_averaged(dump, tmp_path):
    file, rows = dump
    name = TRAINERS["trl"][2]
    parts = mean_of(
        lambda some: (
            [some[a : a + 5] for a in (0, 12)]
            + [some[a + 5 : a + 10] for a in (0, 12)]
            + [some[a + 10 : a + 12] for a in (0, 12)]
        )
    )
    logged = write(tmp_path, {step: {name: parts(trl, some)[name]} for step, some in rows.items()})

    preset = "trl_token_truncate"
    assert offpol_diag.check(file, logged, preset=preset, micro_batch=5, dp=2).equal
    assert not offpol_diag.check(file, logged, preset=preset).equal


def test_the_first_step_that_differs_is_said_and_the_exit_code_is_one(dump, tmp_path):
    file, rows = dump
    values = {step: slime(some) for step, some in rows.items()}
    values[START + 2]["train/tis_abs"] *= 1.001
    logged = write(tmp_path, values)
    result = tmp_path / "r.json"
    ran = command(file, "--logged", logged, "--preset", "slime_tis", "--strict", "--json", result)

    assert ran.exit_code == 1
    said = " ".join(ran.output.split())  # however wide the terminal is
    assert "Different: 1 of 7 metrics differs from step 5 on (train/tis_abs by 0.10% at step 5)" in said
    (one,) = [m for m in json.loads(result.read_text())["metrics"] if m["different"]]
    assert (one["name"], one["different"]) == ("train/tis_abs", [START + 2])


# ---------------------------------------------------------------- every trainer


def test_a_step_has_what_analyze_says_that_every_preset_logs(dump, tmp_path):
    one = tmp_path / "one.parquet"
    table = pq.read_table(dump[0])
    pq.write_table(table.filter(pc.equal(table["step"], START)), one)
    said = offpol_diag.analyze(one, presets="all", device="cpu").summary.presets
    read = open_dump([str(one)], reading=Reading())
    (batch,) = by_step(read.batches()).values()
    compared = 0
    for name, preset in load().items():
        if not preset.logs or said[name].needs:
            continue
        logged = {key: value for key, value in said[name].as_logged.items() if value is not None}
        found = Step(batch, preset, frozenset(read.info.columns)).values(BASE)
        assert {key: found[key] for key in logged} == pytest.approx(logged, rel=1e-9, abs=1e-12), name
        parts = Step(batch, preset, frozenset(read.info.columns), ranks=3).values(BASE)
        assert parts.keys() == found.keys()
        compared += bool(logged)
    assert compared > 80


# ---------------------------------------------------------------- which trainer and preset


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainer_and_preset_are_found_by_the_names_and_the_numbers(trainer, dump, tmp_path):
    file, rows = dump
    if trainer == "slime":
        table = pq.read_table(file)
        file = tmp_path / "said.parquet"
        pq.write_table(table.replace_schema_metadata({"offpol_diag.trainer": trainer}), file)
    run, preset, gap, _ = TRAINERS[trainer]
    right = {step: run(some) for step, some in rows.items()}
    off = {step: PLANTED["reversed"](run, some) | {gap: 9.0 * (step + 1)} for step, some in rows.items()}

    for values, equal in ((right, True), (off, False)):
        found = offpol_diag.check(file, write(tmp_path, values))
        assert (found.trainer, found.preset, found.equal) == (trainer, preset, equal)
        assert len(found.metrics) >= 5


def test_a_trainer_whose_names_no_curve_has_is_an_error(dump, tmp_path):
    logged = write(tmp_path, {START: trl(dump[1][START])})
    with pytest.raises(UsageError, match="no curve has a name that verl logs"):
        offpol_diag.check(dump[0], logged, trainer="verl")


# ---------------------------------------------------------------- steps


def test_values_that_are_not_finite_differ_and_are_named(dump, tmp_path):
    file, rows = dump
    values = {step: slime(some) for step, some in rows.items()}
    values[START + 1]["train/tis"] = float("nan")
    del values[START + 2]["train/tis"]

    found = offpol_diag.check(file, write(tmp_path, values), preset="slime_tis")
    (one,) = found.different
    assert (one.name, one.different, one.variant) == ("train/tis", [START + 1], "not_finite")
    assert [point.step for point in one.points] == [START, START + 1, START + 3]
    assert [point.logged is None for point in one.points] == [False, True, False]
    assert json.loads(found.to_json())["metrics"]
    (line,) = (line for line in reasons(found, found.findings[0]) if "NaN" in line and "train" in line)
    assert line == f"train/tis is NaN or infinite at step {START + 1}."


@pytest.mark.parametrize("by", [1, -1, 1000])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_steps_that_are_numbered_otherwise_throughout_are_a_note_and_no_difference(
    trainer, by, dump, tmp_path
):
    file, rows = dump
    run, preset, _, _ = TRAINERS[trainer]
    logged = write(tmp_path, {step + by: run(some) for step, some in rows.items()})

    found = offpol_diag.check(file, logged, preset=preset)
    assert (found.equal, found.shift, found.steps, found.missing) == (True, by, [*rows], [])
    how = {1: "one higher", -1: "one lower", 1000: "1,000 higher"}[by]
    (note,) = [line for line in notes(found) if line.startswith("Numbering differs")]
    assert note == (
        f"Numbering differs: the curves count every step {how} than the dump, whose step {START} is their "
        f"{START + by}. Steps here are the dump's."
    )
    done = CliRunner().invoke(app, ["check", str(file), "--logged", str(logged), "--strict"])
    assert done.exit_code == 0
    assert f"count every step {how}" in " ".join(done.output.split())


def test_one_step_logged_under_another_number_is_the_same_note(dump, tmp_path):
    rows = pq.read_table(dump[0]).filter(pc.field("step") == START)
    pq.write_table(rows, tmp_path / "one.parquet")

    found = offpol_diag.check(tmp_path / "one.parquet", write(tmp_path, {START + 1: trl(dump[1][START])}))
    assert (found.equal, found.shift, found.steps) == (True, 1, [START])


def test_a_metric_that_lags_while_the_others_do_not_is_a_difference(dump, tmp_path):
    file, rows = dump
    name = TRAINERS["slime"][2]
    values = {step: slime(some) for step, some in rows.items()}
    late = {step: one | {name: values[max(step - 1, START)][name]} for step, one in values.items()}

    found = offpol_diag.check(file, write(tmp_path, late), preset="slime_tis")
    assert (found.shift, [one.name for one in found.different]) == (0, [name])
    assert found.different[0].variant == "step_before"


def test_a_shift_that_leaves_one_metric_different_is_none(dump, tmp_path):
    file, rows = dump
    name = TRAINERS["slime"][2]
    values = {step + 1: slime(some) for step, some in rows.items()}
    values[START + 2][name] *= 1.01

    found = offpol_diag.check(file, write(tmp_path, values), preset="slime_tis")
    assert (found.equal, found.shift) == (False, 0)


def test_steps_that_are_missing_are_listed_and_numbers_one_apart_are_hinted_at(dump, tmp_path):
    file, rows = dump
    some = {step: slime(rows[step]) for step in (START, START + 2)}
    assert offpol_diag.check(file, write(tmp_path, some), preset="slime_tis").missing == [
        START + 1,
        START + 3,
    ]

    with pytest.raises(UsageError) as caught:
        offpol_diag.check(file, write(tmp_path, {START - 1: some[START]}), preset="slime_tis")
    assert "their steps are one apart" in caught.value.hint


@pytest.mark.parametrize("trainer", TRAINERS)
def test_smoothed_and_averaged_curves_are_named(trainer, dump, tmp_path):
    file, rows = dump
    run, preset, gap, weight = TRAINERS[trainer]
    right = [run(rows[step]) for step in rows]
    total, mass, values = 0.0, 0.0, {}
    for at, one in enumerate(right):  # as TensorBoard smooths
        total, mass = 0.6 * total + 0.4 * one[gap], 0.6 * mass + 0.4
        values[START + at] = {gap: total / mass}
        if at % 2:  # and as TRL averages over logging_steps
            values[START + at] |= {weight: (right[at - 1][weight] + one[weight]) / 2}

    found = {one.name: one for one in offpol_diag.check(file, write(tmp_path, values), preset=preset).metrics}
    assert found[gap].variant == "smoothed_0.6"
    assert found[weight].variant == "mean_of_2_steps"


# ---------------------------------------------------------------- files

CURVE = {"train/x": {3: 1.5, 4: 2.5}, "bad": {3: float("nan"), 4: 1.0}}
HISTORY = [{"_step": step, "train/x": x, "bad": CURVE["bad"][step]} for step, x in CURVE["train/x"].items()]


def of_tensorboard(folder):
    writer = import_module("tensorboardX").SummaryWriter(str(folder))
    for name, points in CURVE.items():
        for step, value in points.items():
            writer.add_scalar(name, value, step)
    writer.close()
    return folder


def of_wandb(folder):
    wandb = import_module("wandb")
    run = wandb.init(project="t", dir=folder, mode="offline", settings=wandb.Settings(silent=True))
    for row in HISTORY:
        nested = {"train": {"x": row["train/x"]}} if row["_step"] == 3 else {"train/x": row["train/x"]}
        run.log(nested | {"bad": row["bad"], "long": "x" * 50_000}, step=row["_step"])
    run.finish()
    for _ in range(600):  # a process of its own may write after that
        with contextlib.suppress(UsageError):
            if len(curves.read([folder]).get("train/x", ())) == len(HISTORY):
                break
        time.sleep(0.1)
    return folder


def of_pandas(folder):
    frame = import_module("pandas").DataFrame(HISTORY)
    frame.to_csv(folder / "h.csv", na_rep="NaN")
    (folder / "h.json").write_text(json.dumps(frame.to_dict()))
    (folder / "h.jsonl").write_text("\n".join(map(json.dumps, frame.to_dict("records"))))
    pq.write_table(pa.Table.from_pylist(HISTORY), folder / "h.parquet")
    return folder


WRITERS = {"": of_tensorboard, ".": of_wandb}
WRITERS |= dict.fromkeys(("h.csv", "h.json", "h.jsonl", "h.parquet"), of_pandas)
"""File in a folder → what writes it there."""


@pytest.mark.filterwarnings("ignore")  # the trackers' own
@pytest.mark.parametrize("writer", WRITERS)
def test_files_of_real_trackers_are_read(writer, tmp_path):
    found = curves.read([WRITERS[writer](tmp_path) / writer])
    for name, points in CURVE.items():
        assert found[name] == pytest.approx(points, nan_ok=True)


@pytest.mark.parametrize(
    ("name", "text", "metric"),
    [
        ("w.csv", '"Step","run - train/x","run - train/x__MIN"\n3,1.5,0\n', "train/x"),
        ("w.csv", '"train/global_step","a - b - train/x","a - b - _step"\n3,1.5,90\n4,,91\n', "train/x"),
        ("w.tsv", "step\ttrain/x\tnote\n3\t1.5\ta, b\n\n4\n", "train/x"),
        ("h.jsonl", '{"_step": 3, "train": {"x": 1.5}, "other": null}\n', "train/x"),
        ("h.jsonl", '{"_step": 9, "global_step": 3, "train/x": 1.5}\n{"x": 1}\n', "train/x"),
        ("trainer_state.json", '{"log_history": [{"step": 3, "train/x": 1.5}]}', "train/x"),
        ("run-a-tag-train_x.csv", "Wall time,Step,Value\n1.0,3,1.5\n", "train_x"),
        ("run-a-tag-train_x.json", "[[1.0, 3, 1.5]]", "train_x"),
    ],
)
def test_exports_of_trackers_are_read(name, text, metric, tmp_path):
    (tmp_path / name).write_text(text)
    found = curves.read([tmp_path / name])

    assert found[metric] == {3: 1.5}
    assert curves.matched(found, ["train/x"])[0] == {"train/x": metric}


def test_curves_of_evaluation_are_not_taken_for_those_of_training():
    both = {"train/sampling/x": {}, "eval/sampling/x": {}}
    assert curves.matched(both, ["sampling/x"]) == ({"sampling/x": "train/sampling/x"}, {})
    several = {"a/sampling/x": {}, "b/sampling/x": {}}
    assert curves.matched(several, ["sampling/x"]) == ({}, {"sampling/x": list(several)})


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "a,b\n1,2\n", '{"step": 1}', "Step,a - x,b - x\n1,2,3\n", "\xff\0\xff" * 99]
)
@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.parquet", "x.wandb", "tfevents.x"])
def test_a_file_without_curves_is_one_error(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError):
        curves.read([tmp_path / name])


# ---------------------------------------------------------------- what is printed and written


@pytest.fixture(scope="module")
def wrong(dump, tmp_path_factory):
    """Make curves of verl that are ranks' means from the second step on, with a name that is markup."""
    file, rows = dump
    values = {step: (verl if step == START else partial(PLANTED["dp_4"], verl))(rows[step]) for step in rows}
    values[START]["<b>\x1b[2J"] = 1.0
    return file, write(tmp_path_factory.mktemp("wrong"), values)


def test_the_first_lines_say_what_differs_since_when_why_and_what_to_do(wrong):
    ran = command(wrong[0], "--logged", wrong[1])
    text = " ".join(ran.output.split())

    assert ran.exit_code == 0
    assert "history.jsonl Different: 16 of 29 metrics differ from step 4 on (rollout_corr/" in text
    assert "verl logs means of 4 data-parallel ranks (rows dealt in blocks), averaged without" in text
    assert "What to do: weigh each part by its tokens" in text
    assert "at all 48 points that differ. On this dump micro_6 would be the same." in text
    assert command(wrong[0], "--logged", wrong[1], "--strict").exit_code == 1


def test_quiet_is_one_line_and_verbose_has_every_metric(wrong):
    quiet, brief, whole = (
        command(wrong[0], "--logged", wrong[1], *way).output for way in (["-q"], [], ["-v"])
    )
    assert quiet.startswith("Different: 16 of 29 metrics differ from step 4 on")
    assert quiet.count("\n") == 1
    assert "The other 13 are equal." in brief
    assert "-v: Every metric." in brief
    assert "rollout_corr/training_ppl" not in brief
    assert "rollout_corr/training_ppl" in whole


def test_curves_named_twice_count_once(wrong, tmp_path):
    (tmp_path / "again.jsonl").symlink_to(wrong[1])
    once, twice = (
        command(wrong[0], "-q", *(f"--logged={one}" for one in names))
        for names in ([wrong[1]], [wrong[1], wrong[1].parent / "." / wrong[1].name, tmp_path / "again.jsonl"])
    )
    assert twice.output == once.output


def test_json_page_and_markdown_say_the_same_and_are_drawn_again(wrong, tmp_path):
    ways = {name: tmp_path / f"r.{name}" for name in ("json", "html", "md")}
    assert (
        command(
            wrong[0], "--logged", wrong[1], *(x for k, v in ways.items() for x in (f"--{k}", v))
        ).exit_code
        == 0
    )
    found = json.loads(ways["json"].read_text())
    page, text = ways["html"].read_text(), ways["md"].read_text()

    assert [one["variant"] for one in found["findings"]] == ["dp_4"]
    sentence = f"verl logs {found['findings'][0]['text']}"
    assert sentence in text
    assert sentence in page
    assert page.count("<svg") >= 2
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    again = tmp_path / "again.html"
    assert CliRunner().invoke(app, ["report", str(ways["json"]), "--html", str(again)]).exit_code == 0
    assert again.read_text() == page


def test_a_damaged_result_is_one_error(wrong, tmp_path):
    command(wrong[0], "--logged", wrong[1], "--json", tmp_path / "r.json")
    found = json.loads((tmp_path / "r.json").read_text())
    found["metrics"][0]["worst"] = 99
    (tmp_path / "r.json").write_text(json.dumps(found))
    ran = CliRunner().invoke(app, ["report", str(tmp_path / "r.json")])

    assert ran.exit_code == 2
    assert "a step that differs has no point" in ran.output


def test_given_parts_and_what_was_not_compared_are_said(dump, tmp_path):
    file, rows = dump
    values = {step: dict(slime(some)) for step, some in list(rows.items())[:3]}
    for some in values.values():
        some["a/train/ppo_kl"] = some["b/train/ppo_kl"] = some.pop("train/ppo_kl")
        del some["train/ois"]
    ran = command(
        file, "--logged", write(tmp_path, values), "--preset", "slime_tis", "--micro-batch", 24, "--dp", 1
    )
    text = " ".join(ran.output.split())

    assert "Equal: all 5 metrics at 3 steps (3 to 5) are what the dump says, to float32" in text
    assert "means over micro-batches of 24 of 1 rank, as given" in text
    assert "No curve has a point at step 6, which the dump has." in text
    assert "Not compared, as several curves may be it: train/ppo_kl (a/train/ppo_kl, b/train/ppo_kl)." in text
    assert "No curve holds train/ois." in text


@pytest.mark.parametrize("values", [{999: {"train/tis": 1.0}}, {START: {"loss": 1.0}}])
def test_nothing_to_compare_is_exit_code_two(values, dump, tmp_path):
    ran = command(dump[0], "--logged", write(tmp_path, values), "--preset", "slime_tis")

    assert ran.exit_code == 2
    assert "hint:" in ran.output
