"""What the books cost: a further preset of a trainer that is there already looks at few tokens once more."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offpol_diag import catalogue, segments
from offpol_diag.batch import Batch
from offpol_diag.crosswalk import BOOKS
from offpol_diag.metrics.pieces import pieces
from offpol_diag.metrics.scene import Scene
from offpol_diag.near import Near, splits
from offpol_diag.settle import Asked, settle

PRESETS = catalogue.load().resolve("all")
BY_BOOK = {logs: [preset for preset in PRESETS if preset.logs == logs] for logs in BOOKS}
T, S = 6000, 12


class _OneBatch:
    """An engine, and its dump of one batch."""

    def __init__(self, batch):
        self.batch = batch

    def only(self, *columns):
        return self

    def reduce(self, dump, job, each=None):
        return job(self.batch)


class _TokenSized(TorchDispatchMode):
    """Counts operations on nearly as many values as there are tokens."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, found) if isinstance(x, torch.Tensor)]
        views = ("aten.detach", "aten.slice", "aten.expand", "aten.select", "aten.alias", "aten.lift_fresh")
        if max((x.numel() for x in tensors), default=0) > T // 2 and not str(func).startswith(views):
            self.count += 1
        return found


@pytest.fixture(scope="module")
def batch():
    draw = torch.Generator().manual_seed(4)
    rollout = -torch.rand(T, generator=draw, dtype=torch.float64)
    near, far = (scale * torch.randn(T, generator=draw, dtype=torch.float64) for scale in (0.01, 1.5))
    old = rollout + torch.where(torch.rand(T, generator=draw) < 0.01, far, near)
    current = old + 0.005 * torch.randn(T, generator=draw, dtype=torch.float64)
    starts = torch.linspace(0, T, S + 1).to(torch.int64)
    return Batch(
        rollout=rollout,
        cu_seqlens=starts,
        cu_runs=starts,
        position=torch.arange(T),
        key=torch.arange(S) // 2,
        masked=torch.zeros(S, dtype=torch.int64),
        old=old,
        current=current,
        advantages=torch.randn(S, generator=draw, dtype=torch.float64).repeat_interleave(starts.diff()),
        rewards=torch.ones(S, dtype=torch.float64),
    )


@pytest.fixture
def token_sized(monkeypatch):
    """How many token-sized operations a call makes; numpy's, which torch does not see, are counted too."""
    counter = _TokenSized()
    for name in ("total", "largest", "smallest"):
        of = getattr(segments, name)

        def counted(x, offsets, of=of):
            counter.count += x.numel() > T // 2
            return of(x, offsets)

        monkeypatch.setattr(segments, name, counted)

    def run(make):
        counter.count = 0
        with counter:
            make()
        return counter.count

    return run


def _scene(batch, presets):
    one = _OneBatch(batch)
    settled = settle(one, one, Asked.of(presets, False)).settled
    return Scene.of(batch, 0, 2, settled, Near.of(presets))


def _log(scene, preset):
    """What the metrics make of a preset is there already when its book asks."""
    book = BOOKS[preset.logs]
    book.columns(scene, (preset,))
    book.ranges(scene, (preset,))


def _wider(bound, ratio):
    """A bound farther out; `ratio` says whether it is one of r, which is 1 on-policy."""
    if bound is None:
        return None
    return bound / 1.25 if ratio and bound < 1 else bound * 1.25


def _retuned(preset):
    """The preset with every threshold farther out; a cut through a batch stays: it has to be settled."""
    weight, veto = preset.weight, preset.veto
    if weight:
        weight = replace(weight, upper=_wider(weight.upper, True), lower=_wider(weight.lower, True))
    if veto:
        veto = replace(veto, upper=_wider(veto.upper, True), lower=_wider(veto.lower, True))
    rules = tuple(rule if rule.over == "batch" else _wider_rule(rule) for rule in preset.reject)
    return replace(preset, name=f"{preset.name}_wider", weight=weight, veto=veto, reject=rules)


def _wider_rule(rule):
    ratio = rule.statistic in ("ratio", "mult_prob_error")
    return replace(rule, lower=_wider(rule.lower, ratio), upper=_wider(rule.upper, ratio))


def _looks_at_all(preset):
    """Rules that are made for all tokens at once, whatever is near: on turns, and where |Δ| tells nothing."""
    turns = any(rule.over == "segment" or (rule.on_tokens and rule.over != "token") for rule in preset.reject)
    return turns or any(rule.statistic == "binary_kl" or rule.among == "left" for rule in preset.reject)


@pytest.mark.parametrize("logs", BOOKS)
def test_the_presets_of_a_book_with_other_thresholds_look_at_no_array_of_all_tokens_again(
    logs, batch, token_sized
):
    presets = BY_BOOK[logs]
    further = [_retuned(preset) for preset in presets]
    scene = _scene(batch, [*presets, *further])
    for preset in presets:
        pieces(scene, preset)
        _log(scene, preset)
    added = {}
    for preset in further:
        pieces(scene, preset)
        added[preset.name] = token_sized(lambda p=preset: _log(scene, p))
    split = [preset for preset in further if splits(preset, scene.near.radius)]
    assert all(added[preset.name] == 0 for preset in split if not _looks_at_all(preset))
    assert max((added[preset.name] for preset in split), default=0) <= 8
    assert max(added.values()) <= 25  # of what no radius can split: weights of turns, signs of A


@pytest.mark.parametrize("logs", BOOKS)
def test_a_book_looks_at_so_many_arrays_of_all_tokens_at_most(logs, batch, token_sized):
    scene = _scene(batch, BY_BOOK[logs])
    for preset in BY_BOOK[logs]:
        pieces(scene, preset)
    count = token_sized(lambda: [_log(scene, preset) for preset in BY_BOOK[logs]])
    assert count <= 70


class _Waits(TorchDispatchMode):
    """Names what would make the host wait for a GPU: a value that is read, a shape that depends on values."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        picked = [x for x in args[1] if x is not None] if str(func).startswith("aten.index.") else []
        if any(x.dtype == torch.bool for x in picked) or str(func).startswith(self.WAITS):
            self.found.add(str(func))
        return func(*args, **(kwargs or {}))

    WAITS = (
        "aten._local_scalar_dense",
        "aten.nonzero",
        "aten.masked_select",
        "aten.is_nonzero",
        "aten.equal",
    )


@pytest.mark.parametrize("logs", BOOKS)
def test_a_book_waits_for_no_value(logs, batch):
    scene = _scene(batch, BY_BOOK[logs])
    for preset in BY_BOOK[logs]:
        pieces(scene, preset)
    with _Waits() as waits:
        for preset in BY_BOOK[logs]:
            _log(scene, preset)
    assert waits.found == set()
