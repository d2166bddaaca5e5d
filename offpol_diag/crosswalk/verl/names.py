"""What each name that verl logs means there, and how it differs from its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from offpol_diag.crosswalk.verl.parts import GENERATIONS, Generation
from offpol_diag.crosswalk.verl.update import MEANINGS as UPDATE

Names = dict[str, str]

_ROWS = "over all rows of the batch, each once; one without a token counts as {}"

_GAP = {
    "training_ppl": f"e^(−mean log π_train) of a row, mean {_ROWS.format(1)}; not the perplexity of all "
    "tokens.",
    "training_log_ppl": f"−mean log π_train of a row, mean {_ROWS.format(0)}; nats.",
    "kl": "Mean over tokens of log π_rollout − log π_train, nats (k1): unbounded, and it may be negative.",
    "k3_kl": "Mean over tokens of r − 1 − log r. Neither r nor the result is bounded: one token can decide "
    "it.",
    "rollout_ppl": f"e^(−mean log π_rollout) of a row, mean {_ROWS.format(1)}.",
    "rollout_log_ppl": f"−mean log π_rollout of a row, mean {_ROWS.format(0)}; nats.",
    "log_ppl_diff": "Mean log π_rollout − mean log π_train of a row (verl's docs have the sign the other "
    f"way), mean {_ROWS.format(0)}; nats.",
    "log_ppl_abs_diff": f"|log_ppl_diff| of a row, mean {_ROWS.format(0)}; nats.",
    "log_ppl_diff_max": "Largest log_ppl_diff of a row: where the trainer finds a text least likely; nats.",
    "log_ppl_diff_min": "Smallest log_ppl_diff of a row, nats.",
    "ppl_ratio": f"Perplexity of π_train over that of π_rollout, row by row, mean {_ROWS.format(1)}; a mean "
    "of ratios, not the ratio of means.",
}

_CHI2 = {
    "chi2_token": "Mean over tokens of r², log r bounded to ±20, minus 1; below 0 where the sample lacks "
    "the tail.",
    "chi2_seq": "The squared product of r over a row, its log bounded to ±20 before squaring, minus 1; mean "
    f"{_ROWS.format('r = 1')}. It cannot exceed e^40 ≈ 2.35e17, and sits there on long rows.",
}

_VETO = {
    "rollout_is_veto_fraction": "Rows with a token whose unbounded r is below the veto threshold, over all "
    "rows. Logged as 0 where there is no veto.",
    "rollout_is_catastrophic_token_fraction": "Tokens whose unbounded r is below the veto threshold, over "
    "all tokens.",
}


def _spread(what: str, clamp: str, level: str) -> Names:
    """verl's `compute_is_metrics`: of weights, or (2025) of the ratio that rejects."""
    return {
        "mean": f"Mean over tokens of {what}; at sequence level each row thus counts by its length.",
        "max": f"Largest of {what}; {level} e^(log-ratio bounded above to 20) before truncation.",
        "min": f"Smallest of {what}; {level} e^(log-ratio) before truncation, bounded nowhere.",
        "ratio_fraction_high": "Share with raw r above the upper threshold: of tokens, at sequence level of "
        "rows.",
        "ratio_fraction_low": "Share with raw r below the lower threshold (1/C unless one is set, though a "
        "truncation acts from above only): of tokens, at sequence level of rows.",
        "std": f"Standard deviation over tokens of {what} clamped to {clamp}; of the tail it knows nothing.",
        "eff_sample_size": f"1/E[(w/E[w])²] over tokens, a fraction, of {what} clamped to {clamp}: not the "
        "ESS of what was sampled, and token-weighted at sequence level too.",
        "seq_mean": f"A row's mean of {what}, mean {_ROWS.format(0)}.",
        "seq_std": f"Standard deviation (n − 1) of the rows' means of {what}; 0 for one row.",
        "seq_max": f"Largest mean of {what} in a row.",
        "seq_min": f"Smallest mean of {what} in a row; 0 as soon as one has no token.",
        "seq_max_deviation": f"Largest |mean of {what} in a row − 1|.",
        "seq_fraction_high": "Rows whose mean raw r is above the upper threshold, over all rows; at token "
        "level a mean is compared with a threshold meant for tokens.",
        "seq_fraction_low": "Rows whose mean raw r is below the lower threshold, over all rows; one without "
        "a token has a mean of 0.",
    }


_APPLIED = {
    "rollout_is_oob_ratio": "IcePop only: share of tokens whose weight is 0 because r lies outside [lower, "
    "upper]; at sequence level every token of a row counts.",
}

_NORM = {
    "rollout_is_batch_norm_factor": "What batch normalisation divided by: the mean weight before rejection "
    "(at sequence level of rows with a token), 1 where it was too small to divide by. The other rollout_is_ "
    "numbers are taken before that division.",
}


def _masked(stem: str) -> Names:
    return {
        f"{stem}_masked_fraction": "Tokens that rejection removes, over all tokens; what a veto removes "
        "besides is not in it.",
        f"{stem}_seq_masked_fraction": "Rows with at least one rejected token, over all rows: for rules on "
        "tokens that is not the share of rows dropped.",
    }


def _option(statistic: str, sign: str) -> Names:
    """verl 2026's `compute_rs_metrics`, under each option's name."""
    return {
        "mean": f"Mean over tokens of {statistic} as the option aggregates it: a sequence option's value "
        "counts once per token.",
        "max": f"Largest {statistic}: of a token, under sequence options of a row.",
        "min": f"Smallest {statistic}: of a token, under sequence options of a row.",
        "fraction_high": f"Share above the upper threshold, of tokens, under sequence options of rows with a "
        f"token.{sign}",
        "std": f"Standard deviation over tokens of {statistic} clamped to the thresholds.",
        "seq_mean": f"Mean over rows with a token of their {statistic}; token options take a row's mean.",
        "seq_std": f"Standard deviation (n − 1) over rows with a token of their {statistic}; 0 for one row.",
        "seq_max": f"Largest {statistic} of a row with a token; token options take a row's mean.",
        "seq_min": f"Smallest {statistic} of a row with a token; token options take a row's mean.",
        "seq_max_deviation": f"Largest absolute {statistic} of a row with a token.",
        "seq_fraction_high": "Share of rows with a token whose value is above the upper threshold; under "
        f"token options that compares a mean with a threshold meant for tokens.{sign}",
        "masked_fraction": "Tokens that this option alone rejects, over all tokens.",
        "seq_masked_fraction": "Rows with a token that this option rejects, over rows with a token.",
    }


def _low(statistic: str) -> Names:
    return {
        "fraction_low": f"Share of {statistic} below the lower threshold, that is of r too HIGH: of tokens, "
        "under sequence options of rows with a token.",
        "seq_fraction_low": "Share of rows with a token whose value is below the lower threshold: r too "
        "HIGH.",
    }


_K1 = "k1 = −log r (bounded to ±20), compared with [ln lower, ln upper]"


def _options() -> Iterator[tuple[str, str]]:
    k1 = _option(_K1, " k1 is −log r, so this is r too LOW.") | _low(_K1)
    never = {"fraction_low": "0: the statistic has no lower threshold."}
    k2 = _option("k2 = (log r)²/2, log r bounded to ±20", "") | never
    k3 = _option("k3 = r − 1 − log r, log r bounded to ±20", "") | never
    for statistic, found in (("k1", k1), ("k2", k2), ("k3", k3)):
        yield from ((f"rollout_rs_*_{statistic}_{name}", meaning) for name, meaning in found.items())


def _stemmed(stem: str, found: Mapping[str, str]) -> Names:
    return {f"{stem}_{name}": meaning for name, meaning in found.items()}


_RAW = "the weights before truncation (e^(log-ratio bounded to ±20))"
_LEVEL = "at sequence or geometric level"


def _weights(generation: Generation) -> Names:
    if generation.applied:
        return _stemmed("rollout_is", _spread("the weights as applied", "[0, C]", "at sequence level"))
    return _stemmed("rollout_is", _spread(_RAW, "[1/C, C]", _LEVEL))


def _rejection(generation: Generation) -> Iterator[Names]:
    if generation.divergences:
        yield dict(_options())
    elif not generation.weight_band:
        yield _stemmed("rollout_rs", _spread("the ratio that rejects", "the thresholds", _LEVEL))
    yield _masked("rollout_is" if generation.weight_band else "rollout_rs")


def _parts(generation: Generation) -> Iterator[Mapping[str, str]]:
    gap = _GAP | (_CHI2 if generation.chi2 else {})
    yield {generation.gap + name: meaning for name, meaning in gap.items()}
    yield _weights(generation)
    if not generation.weight_band:
        yield _NORM
    if generation.veto:
        yield _VETO
    if generation.applied:
        yield _APPLIED
    yield from _rejection(generation)


def names(logs: str) -> Mapping[str, str]:
    """Each name that this generation can log, `*` for the part of an option's name before its statistic."""
    generation = GENERATIONS[logs]
    found = {
        generation.prefix + name: meaning for part in _parts(generation) for name, meaning in part.items()
    }
    return found | (UPDATE if generation.debug else {})
