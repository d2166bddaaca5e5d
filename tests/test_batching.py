"""What is recorded for many presets and computed at once is what each alone gives, in as few operations."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offpol_diag.engine import segments
from offpol_diag.engine.batching import Graph, computed, reduced

TOKENS = [torch.randn(12, generator=torch.Generator().manual_seed(seed)).double() for seed in range(4)]
KEPT = [x > 0.1 for x in TOKENS]
OFFSETS = torch.tensor([0, 3, 3, 8, 12])
BOUNDS = [0.5, 1.0, 1.5, 1.0]


class Counted(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self):
        super().__init__()
        self.many = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.many += 1
        return operator(*args, **kwargs or {})


def formula(x, n, bound):
    """Numbers before and after tensors, bounds by name, flags, and a choice."""
    high = (1 - x / (n + 1)).clamp(max=bound)
    flags = (x > bound) & ~(n <= 0)
    return torch.where(flags, 2 * high, x.where(x <= 0, -bound)) - x.masked_fill(flags, 0.0)


def all_of(graph, reduce, presets):
    n = graph.leaf(segments.lengths(OFFSETS)).to(torch.float64)
    sums = [graph.reduced(reduce, (TOKENS[at],), KEPT[at], OFFSETS) for at in presets]
    return [formula(x, n, BOUNDS[at]) for x, at in zip(sums, presets, strict=True)]


@pytest.mark.parametrize("reduce", [segments.total, segments.smallest, segments.largest])
@pytest.mark.parametrize("beyond", [0, 1 << 40], ids=["at once", "at the end"])
def test_the_presets_of_a_batch_have_what_each_alone_has(reduce, beyond):
    graph = Graph()
    found = all_of(graph, reduce, [0, 1])
    graph.compute(beyond)
    found += all_of(graph, reduce, [2, 3])

    n = segments.lengths(OFFSETS).to(torch.float64)
    for at, x in enumerate(found):
        want = formula(reduced(reduce, TOKENS[at], KEPT[at], OFFSETS), n, BOUNDS[at])
        torch.testing.assert_close(computed(x), want, rtol=1e-14, atol=0, equal_nan=True)


def test_a_term_has_limits_of_its_own_for_each_preset():
    graph, limits = Graph(), [(-0.5, 0.5), (-0.1, 0.5), (-0.1, 0.2)]

    def term(x, low, high):
        return x.clamp(low, high)

    found = [graph.reduced(segments.total, (TOKENS[0], *one), None, OFFSETS, term) for one in limits]
    for x, one in zip(found, limits, strict=True):
        want = segments.total(TOKENS[0].clamp(*one), OFFSETS)
        torch.testing.assert_close(computed(x), want, rtol=1e-14, atol=0)


def test_the_same_is_recorded_once_and_a_further_preset_takes_no_further_operation():
    def operations(presets):
        graph = Graph()
        found = all_of(graph, segments.total, presets)
        with Counted() as seen:
            graph.compute()
        return seen.many, found

    assert len({id(x) for x in operations([0, 1, 0, 1])[1]}) == 2
    for _ in range(2):  # bounds are copied to the device the first time
        few, many = (operations(presets)[0] for presets in ([0, 1, 2], [0, 1, 2, 3]))
    assert few == many


def test_flags_are_counted_as_float64():
    graph = Graph()
    found = graph.reduced(segments.total, (KEPT[0],), KEPT[1], OFFSETS)
    assert computed(found).dtype == torch.float64
    assert found.tolist() == segments.count(KEPT[0] & KEPT[1], OFFSETS).tolist()
