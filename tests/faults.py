"""Dumps with a known fault: tokens really drawn from softmax policies, then logged rightly or wrongly."""

import json
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.reading import analyze

WORDS = 40


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


PROMPTS, ANSWERS = 40, 8


class Policy:
    """A policy whose logits depend on the prompt, the more the earlier, and on the token before.

    Attributes:
        after: logits after each token, [WORDS, WORDS].
        begin: logits that each prompt adds, [PROMPTS, WORDS].
        change: function of (logits [S, WORDS], tokens already sampled [S, WORDS] bool) → logits.
    """

    def __init__(self, seed=0, change=None):
        rng = np.random.default_rng(seed)
        self.after = 2 * rng.normal(size=(WORDS, WORDS))
        self.begin = 2 * rng.normal(size=(PROMPTS, WORDS))
        self.change = change or (lambda logits, seen: logits)

    def moved(self, size, seed=1):
        """Return a policy with other weights: those of another step, or of another model."""
        other, rng = Policy(), np.random.default_rng(seed)
        other.after = self.after + size * rng.normal(size=self.after.shape)
        other.begin = self.begin + size * rng.normal(size=self.begin.shape)
        return other

    def log_probs(self, group, t, before, seen):
        """Return the log-probs of token t of each sequence, [S, WORDS]; `before` is None at the first."""
        logits = self.begin[group] / (1 + t) + (0 if before is None else self.after[before])
        return log_softmax(self.change(logits, seen))


def responses(engine, trainer, lengths=(40, 60), group=None, noise=0.005, logged=None, seed=0, known=None):
    """Sample responses from `engine(t)` and score them with a trainer; return the columns of a dump.

    Args:
        engine: function of the index of a token → the policy that samples it.
        trainer: the policy that scores.
        lengths: shortest and longest response.
        group: index of the prompt of each response, [S].
        noise: of the trainer's log-probs, nats, times 1 − π.
        logged: the policy whose log-probs the engine logs; None for the one that samples.
        seed: of the random numbers.
        known: ids that count as sampled from the beginning, by prompt, [PROMPTS, WORDS]; None for none.
    """
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(PROMPTS), ANSWERS) if group is None else group
    many = rng.integers(*lengths, len(group), endpoint=True)
    before, seen = None, np.zeros((len(group), WORDS), bool) if known is None else known[group]
    columns = {name: [] for name in ("rollout_log_probs", "old_log_probs", "token_ids", "entropy", "sampled")}
    for t in range(many.max()):
        sampled, scored = (policy.log_probs(group, t, before, seen) for policy in (engine(t), trainer))
        tokens = draw(sampled, rng)
        log = sampled if logged is None else logged.log_probs(group, t, before, seen)
        p = pick(scored, tokens)
        for name, value in (
            ("rollout_log_probs", pick(log, tokens)),
            ("old_log_probs", np.minimum(p - noise * np.expm1(p) * rng.normal(size=len(p)), 0.0)),
            ("token_ids", tokens),
            ("entropy", -(np.exp(scored) * scored).sum(-1)),
            ("sampled", -(np.exp(sampled) * sampled).sum(-1)),
        ):
            columns[name].append(value)
        before = tokens
        seen[np.arange(len(group)), tokens] = True
    cut = {name: [row[:n] for row, n in zip(np.array(x).T, many, strict=True)] for name, x in columns.items()}
    for name in ("rollout_log_probs", "old_log_probs"):
        cut[name] = [row.astype(np.float32) for row in cut[name]]
    return cut | {"group_id": group.tolist()}


def changed(policy, change):
    """Return a policy with its logits changed by a function of (logits, tokens already sampled)."""
    other = policy.moved(0.0)
    other.change = lambda logits, seen: change(policy.change(logits, seen), seen)
    return other


def colder(temperature, policy):
    """Return a policy with its logits divided by a temperature."""
    return changed(policy, lambda logits, seen: logits / temperature)


def capped(policy, cap=5.0):
    """Return a policy with a soft cap on its logits."""
    return changed(policy, lambda logits, seen: cap * np.tanh(logits / cap))


def anew(policy, token, seed=3):
    """Return a policy with a token's embedding and row of the output layer drawn anew.

    Whatever follows the token has another distribution.
    """
    other, rng = policy.moved(0.0), np.random.default_rng(seed)
    other.after[token] = 2 * rng.normal(size=WORDS)
    other.after[:, token] = rng.normal(-4, 1, WORDS)
    other.begin[:, token] = 0.0
    context = rng.normal(size=WORDS)
    other.change = lambda logits, seen: logits + np.where(seen[:, [token]], context, 0.0)
    return other


def joined(parts, **columns):
    """Concatenate dumps, one value of each further column for each of them; prompts are different ones."""
    found = {name: [x for part in parts for x in part[name]] for name in parts[0]}
    found["group_id"] = [f"{i}-{one}" for i, part in enumerate(parts) for one in part["group_id"]]
    many = [len(part["group_id"]) for part in parts]
    return found | {name: np.repeat(values, many).tolist() for name, values in columns.items()}


def columns(rows):
    """Return the columns of a dump of these `Rows`, a list or scalar per sequence, unmasked."""
    names = {"q": "rollout_log_probs", "p": "old_log_probs", "ids": "token_ids", "entropy": "entropy"}
    lists = {
        name: [part.tolist() for part in np.split(x, rows.starts[1:-1])]
        for key, name in names.items()
        if (x := getattr(rows, key)) is not None
    }
    return {**lists, **rows.scalars}


def seeded(i=7):
    return np.random.default_rng(i)


def fault(name, other, change):
    """Make a fault: the named column becomes `change` of (row, its values, the other column's, token ids)."""

    def made(given):
        rows = zip(given[name], given[other], given["token_ids"], strict=True)
        return given | {name: [change(i, *row) for i, row in enumerate(rows)]}

    return made


old = partial(fault, "old_log_probs", "rollout_log_probs")
rollout = partial(fault, "rollout_log_probs", "old_log_probs")


def write(path, given, recorded=None, drop=("entropy", "sampled")):
    """Write a dump without some columns, with what its metadata records; return its path."""
    table = pa.table(given)
    table = table.select([name for name in table.column_names if name not in drop])
    metadata = {"offpol_diag": json.dumps(recorded)} if recorded else None
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return str(path)


def diagnosed(tmp_path, given, **how):
    return analyze([write(tmp_path / "d.parquet", given, **how)], presets=()).diagnosis


def bugs(found):
    return [one.id for one in found.causes if one.kind == "bug"]


def dump(path, name):
    """Write a dump whose train column is shifted, or whose engine logs raw log-probs; return its path."""
    policy = Policy()
    cold = colder(0.7, policy)
    raw = partial(responses, lambda t: cold, cold, logged=policy)
    right = partial(responses, lambda t: policy, policy)
    return write(path, raw() if name == "raw" else old(lambda i, p, q, ids: np.roll(p, 1))(right()))
