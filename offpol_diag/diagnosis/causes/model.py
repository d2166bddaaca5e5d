"""Two models where there should be one."""

from __future__ import annotations

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.numbers import HEALTHY_K3
from offpol_diag.diagnosis.rows import Rows
from offpol_diag.diagnosis.seen import Seen

DIFFERENT = 0.25
"""Level of a usual token that no engine reaches whose number format is not a quantised one. In bf16 it is
0.04 (0.09 at a temperature of 0.15); 8 bits give 0.04 to 0.13, and 4 bits 0.10 to 0.25 at temperatures from
0.6 on: so it stays a bug where the metadata names the wrong format of these."""


class ModelDiffers(Cause):
    """The two sides compute different models.

    At lag 0, from the first step on, with nothing recorded that is quantised: a usual token is off by 0.25 to
    0.50 of its uncertainty (bf16 0.03 to 0.04, fp8 0.065, int8 0.13), and K3 is ten times that of other runs
    of the model. It may depend on the place in the context, the length, the kind of token or the prompt, and
    does not change over the steps.
    """

    kind = "model"
    id = "model_differs"
    sentence = "engine and trainer compute different models, from the first step on"
    violates = "two engines of one model in an unquantised format differ by rounding"
    confirm = (
        "score the same responses once more with the checkpoint that both sides loaded: offpol-diag rescore "
        "DUMP --model CHECKPOINT --try all"
    )
    fix = (
        "measure which side is another model: offpol-diag rescore DUMP --model CHECKPOINT --try all says "
        "which of them the checkpoint reproduces, and which change of the model reproduces the other"
    )
    apart = {
        "weights_not_synced": "There the weights are others; digests of single tensors tell.",
        "quantized_rollout": "Quantised weights stay below 0.13 at 8 bits.",
        "stale": "Stale weights vanish at lag 0.",
        "wrong_context": "There the first tokens are off most.",
    }
    statement = "Another model definition: RoPE, a window, sinks, a soft-cap or norms computed otherwise."
    speaks_for = ("wide", "flat", "at lag 0")
    speaks_against = ("grows", "noise", "share of others", "close")

    def fits(self, seen: Seen) -> bool:
        return not seen.course.back.any() and seen.lags.get(0, 1.0) > HEALTHY_K3

    def look_alone(self, rows: Rows) -> Found | None:
        seen = rows.once(Seen)
        single = seen.unsystematic if seen.share is not None else bool(seen.recorded.experts)
        if not seen.recorded.plain or seen.body.scale < DIFFERENT or single or not seen.from_start:
            return None
        evidence = (
            f"{seen.evidence}; by step {seen.course.text}, at a recorded lag of 0; the dump says "
            f"{seen.recorded.plain}, with which two engines differ by 0.04"
        )
        return self.of_all(evidence, rows)
