"""Dumps with a known fault: tokens really drawn from softmax policies, then logged rightly or wrongly."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SEQUENCES, LENGTH, WORDS, GROUP = 300, 60, 40, 4


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def draw(log_probs, rng):
    """Sample a token from each row of log-probs by the Gumbel trick."""
    return (log_probs + rng.gumbel(size=log_probs.shape)).argmax(-1)


def nucleus(log_probs, top_p):
    """Renormalise the distribution over the smallest set whose mass reaches top_p."""
    order = np.argsort(-log_probs, -1)
    mass = np.cumsum(np.exp(np.take_along_axis(log_probs, order, -1)), -1)
    keep = np.concatenate([np.ones_like(mass[..., :1], bool), mass[..., :-1] < top_p], -1)
    kept = np.full_like(log_probs, -np.inf)
    np.put_along_axis(kept, order, np.where(keep, np.take_along_axis(log_probs, order, -1), -np.inf), -1)
    return log_softmax(kept)


def pick(log_probs, tokens):
    return np.take_along_axis(log_probs, tokens[..., None], -1)[..., 0]


def dump(path, fault="none", noise=0.1, seed=0):
    """Write a dump with `fault` and return its path as text.

    none: rollout logits differ from the trainer's by Gaussian noise.
    raw: sampled at temperature 0.7, logged at 1.
    trainer: sampled and logged at temperature 0.7, the trainer's at 1.
    nucleus: top-p 0.9 on the rollout side only.
    shift: old is off by one token.
    first: the first token's old is wrong.
    """
    rng = np.random.default_rng(seed)
    shape = (SEQUENCES, LENGTH, WORDS)
    trainer = rng.normal(size=shape) * rng.choice([1.0, 3.0], size=(SEQUENCES, LENGTH, 1))
    engine = trainer + noise * rng.normal(size=shape)
    cold = log_softmax(engine / 0.7)
    sampled = {"raw": cold, "trainer": cold, "nucleus": nucleus(log_softmax(engine), 0.9)}
    sampled = sampled.get(fault, log_softmax(engine))
    tokens = draw(sampled, rng)
    logged = log_softmax(engine) if fault == "raw" else sampled
    old_policy = log_softmax(trainer / 0.7) if fault == "raw" else log_softmax(trainer)
    rollout, old = pick(logged, tokens), pick(old_policy, tokens)
    if fault == "shift":
        old = np.roll(old, 1, axis=1)
    if fault == "first":
        old[:, 0] = np.log(0.02)
    table = {
        "rollout_log_probs": list(rollout.astype(np.float32)),
        "old_log_probs": list(old.astype(np.float32)),
        "group_id": pa.array(np.arange(SEQUENCES) // GROUP),
    }
    pq.write_table(pa.table(table), path)
    return str(path)
