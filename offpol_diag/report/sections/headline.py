"""Section of headline numbers, each with its interval and meaning."""

from __future__ import annotations

from offpol_diag.blocks import Section, Table, Text
from offpol_diag.numerals import counted, doubted, say
from offpol_diag.summary import Number, Summary

HEADLINE: tuple[tuple[str, str], ...] = (
    ("k3", "KL(π_rollout‖π_train) per token; never negative"),
    ("k1", "the same KL, plain estimator; were it clearly below 0, the logged log-probs cannot be right"),
    ("mean_ratio", "E[r]; 1 when the tokens were sampled from the logged policy"),
    ("ess_tokens", "effective sample size of the raw token weights, as a share of the tokens"),
    ("ess_sequences", "the same of the raw product weights of whole sequences"),
    ("khat_tokens", "tail of the token weights; above 0.7 their mean cannot be estimated"),
    ("khat_sequences", "tail of the sequence weights; above 0.7 their mean cannot be estimated"),
    ("chi2_token", "variance of the token weights, E[r²] − 1"),
    ("chi2_sequence", "variance of the sequence weights; grows exponentially with length"),
    ("ppl_ratio", "perplexity of the trainer over that of the engine, mean over sequences"),
    ("prob_diff_mean", "mean |p − q| of the sampled tokens"),
    ("f_2", "tokens whose probability differs by more than a factor of 2"),
    ("k3_top1_share", "share of k3 in the worst 1% of tokens"),
)

BANDS: tuple[tuple[str, str, str, str], ...] = (
    ("k3", "dense model, BF16", "1e-5 to 1e-3", "SGLang/miles, study of train-inference mismatch"),
    ("k3", "mixture of experts, BF16", "1e-3 to 1e-1", "SGLang/miles, study of train-inference mismatch"),
    ("k3", "Qwen3-30B-A3B (MoE), healthy run", "1.9e-3 to 2.0e-3", "Dynamo + verl recipe notes"),
    ("k3", "any new model, gate over 20 steps", "below 1.5e-2", "prime-rl, development guide"),
    ("mult_prob_error", "any; investigate above", "1.05", "NeMo-RL, GRPO guide"),
    ("prob_diff_mean", "any; precision problem above", "1e-2", "verl FAQ"),
    ("pearson", "Qwen3-30B-A3B (MoE), healthy run", "0.999", "Dynamo + verl recipe notes"),
)


def headline(summary: Summary) -> Section:
    """Return the headline numbers of rollout → old if known, else of rollout → current."""
    rows = tuple(
        (name, summary.metrics[name], says)
        for short, says in HEADLINE
        if (name := _known(summary, short)) is not None
    )
    table = Table("headline", _caption(summary), ("number", "value", "what it says"), rows)
    return Section("numbers", "Headline numbers", (Text(_finding(summary)), table, _bands()))


def _known(summary: Summary, short: str) -> str | None:
    """Return the metric's name for rollout → old if known, else for rollout → current, else None."""
    here = [name for name in (short, f"total.{short}") if name in summary.metrics]
    return next((name for name in here if _has_value(summary.metrics[name])), here[0] if here else None)


def _has_value(number: Number) -> bool:
    return number.value is not None or number.log10 is not None


def _finding(summary: Summary) -> str:
    k3, ratio = _known(summary, "k3"), _known(summary, "mean_ratio")
    if k3 is None or ratio is None:
        return "The dump holds no pair of policies whose gap could be measured."
    return (
        f"The training policy differs from the rollout policy by {k3} = {say(summary.metrics[k3])} nats per "
        f"token, and the mean ratio is {say(summary.metrics[ratio])}. {_centred(summary.metrics[ratio])}"
    )


def _centred(ratio: Number) -> str:
    if doubted(ratio):
        return "With a tail this heavy nothing can be said about whether it is 1."
    if ratio.interval is None:
        return "Without an interval it is not known whether that is compatible with 1."
    low, high = ratio.interval
    if low <= 1 <= high:
        return "Its interval covers 1, as it must when the log-probs are those of the policy that sampled."
    end = f"ends at {high:.7g}" if high < 1 else f"begins at {low:.7g}"
    return f"Its interval {end} and does not cover 1; the diagnosis weighs whether that difference matters."


def _caption(summary: Summary) -> str:
    dump = summary.dump
    over = f"Policy gap over {counted(dump.tokens, 'token')} of {counted(dump.sequences, 'sequence')}"
    if all(number.interval is None for number in summary.metrics.values()):
        return f"{over}, without intervals: {counted(dump.groups, 'group')} to resample"
    return f"{over}, with 95% intervals from resampling {counted(dump.groups, 'group')}"


def _bands() -> Table:
    return Table(
        "bands",
        "What others report: a value is only comparable within its regime",
        ("number", "regime", "band", "source"),
        BANDS,
        wide=True,
        collapsed=True,
    )
