"""What the tally of a study must look like: the forms that one small batch leaves.

A tally file says which presets and columns it is about; whether its states are those that this version would
have made of them is found by making some.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offpol_diag import readout
from offpol_diag.accumulators import State
from offpol_diag.batch import Batch
from offpol_diag.errors import ResultError
from offpol_diag.metrics.scene import Scene
from offpol_diag.scope import ONE, Settled
from offpol_diag.settle import Asked
from offpol_diag.tallies.kinds import saved
from offpol_diag.tallies.states import Form
from offpol_diag.tally import Study, Tally, observe

LAG = frozenset({"rollout_version", "train_version"})
LABEL = "0"
OTHER = "analyze the pieces again, all with the version that merges them"


def forms(states: Mapping[str, State]) -> dict[str, Form]:
    """What states must have in common with those that they are merged with."""
    return {name: saved(state).form() for name, state in states.items()}


def check(tally: Tally, study: Study, name: str) -> None:
    """Refuse a tally that the study cannot have left; `name` is what errors call its file.

    Raises:
        ResultError: states, names or sizes differ from those that this version makes.
    """
    if not study.drifts:
        raise ResultError(f"{name}: its columns are not those of two policies that can be compared", OTHER)
    refuse_unlike(forms(tally.states), forms(_small(study).states), name, "what its presets and columns make")
    refuse_impossible(tally, name)


def refuse_unlike(found: Mapping[str, Form], wanted: Mapping[str, Form], name: str, of: str) -> None:
    """Refuse states of another form.

    Raises:
        ResultError: which state it is.
    """
    unlike = [key for key in dict.fromkeys((*wanted, *found)) if found.get(key) != wanted.get(key)]
    if unlike:
        raise ResultError(f"{name}: {', '.join(unlike[:3])}: the states in it are not {of}", OTHER)


def refuse_impossible(tally: Tally, name: str) -> None:
    """Refuse counts that no dump has.

    Raises:
        ResultError: no sequence, no token, or counts that are not finite.
    """
    try:
        counts = readout.counts(tally)
        possible = counts["sequences"] > 0 and counts["tokens"] > 0 and counts["masked_tokens"] >= 0
    except (ValueError, ArithmeticError):
        possible = False
    if not possible:
        raise ResultError(f"{name}: it counts no sequences and tokens as a dump has them", OTHER)


def _small(study: Study) -> Tally:
    """The tally of one sequence of two tokens."""
    asked = Asked.of(study.presets, rewards=False)
    settled = Settled(
        {cut: {ONE: float("inf"), LABEL: float("inf")} for cut in asked.cuts},
        {tail: {ONE: None, LABEL: None} for tail in asked.tails},
    )
    return observe(study, Scene.of(_batch(study), study.seed, study.replicates, settled))


def _batch(study: Study) -> Batch:
    logs, ends = torch.tensor([-1.0, -1.0], dtype=torch.float64), torch.tensor([0, 2])
    axes = {*study.columns, *study.group_by} | ({"policy_lag"} if study.columns >= LAG else set())
    values = {
        "old": ("old_log_probs", logs),
        "current": ("current_log_probs", logs),
        "advantages": ("advantages", logs),
        "entropy": ("entropy", -logs),
        "token_ids": ("token_ids", torch.tensor([1, 2])),
        "rewards": ("rewards", -logs[:1]),
    }
    return Batch(
        rollout=logs,
        cu_seqlens=ends,
        cu_runs=ends,
        position=torch.arange(2),
        key=torch.tensor([0]),
        masked=torch.tensor([0]),
        scalars={name: [int(LABEL)] for name in axes},
        **{field: tensor for field, (column, tensor) in values.items() if column in study.columns},
    )
