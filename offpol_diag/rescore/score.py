"""Log-probs of given responses under a causal language model of Hugging Face, without holding [T, V].

The body runs on right-padded batches of similar length. The head runs on the response positions alone, a
chunk at a time and in float32, through the model's own `forward` with its body replaced by a stub. Soft caps,
logit scales, tied heads and LoRA on the head are therefore the model's own, and nothing is written per
architecture.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offpol_diag.errors import MemoryShortage, UsageError

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

NO_MEMORY = ("t allocate memory", "not enough memory", "annot allocate memory", "out of memory")
"""In messages of torch where memory is short, besides its own class of errors."""
LEAST_LOGITS = 1 << 20
"""Bytes of logits below which chunks are not halved."""


@dataclass(frozen=True)
class Row:
    """One response with its prompt.

    Attributes:
        ids: tokens of prompt and response.
        start: index of the first response token, at least 1: it is predicted at start − 1.
        temperature: what the logits of this response are divided by.
    """

    ids: Ints
    start: int
    temperature: float = 1.0

    @property
    def size(self) -> int:
        """Tokens of the response."""
        return len(self.ids) - self.start


class Head(NamedTuple):
    """How logits become log-probs.

    Attributes:
        temperature: what divides the logits; None for each row's own.
        logits: the type to which logits are rounded before; None for float32, as they are.
    """

    temperature: float | None = None
    logits: torch.dtype | None = None


class Size(NamedTuple):
    """How much is computed at once: tokens of a batch of the body, bytes of a chunk of logits."""

    tokens: int
    logits: int

    @classmethod
    def of(cls, device: torch.device) -> Size:
        """Return the default of a device: caches of a CPU are small."""
        return cls(2048, 32 << 20) if device.type == "cpu" else cls(16_384, 512 << 20)


def unwrapped(model: nn.Module) -> Any:
    """Return the causal model under wrappers of peft and data parallelism; adapters stay in its layers."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    found = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not all(hasattr(found, name) for name in ("base_model", "get_output_embeddings", "config")):
        what = f"a {type(found).__name__} is no causal language model of transformers"
        raise UsageError(what, "give one, or a folder with its files")
    return found


def score(
    model: nn.Module,
    rows: Sequence[Row],
    heads: Sequence[Head] = (Head(),),
    *,
    size: Size | None = None,
    done: Callable[[int], None] = lambda tokens: None,
) -> list[Floats]:
    """Return the log-probs of all responses under each head, end to end, [T], in one pass of the body.

    Args:
        model: a causal language model of transformers, peft's wrapper around it or not.
        rows: the responses.
        heads: how logits become log-probs.
        size: how much at once; None for the default of the device. It is halved where memory is short.
        done: called with the tokens of a batch when it is done.

    Raises:
        MemoryShortage: there is too little memory even for the longest row alone.
    """
    causal = unwrapped(model)
    device = next(causal.parameters()).device
    size = size or Size.of(device)
    begins = np.concatenate(([0], np.cumsum([row.size for row in rows], dtype=np.int64)))
    found = [np.zeros(begins[-1], np.float32) for _ in heads]
    training = model.training
    model.eval()
    try:
        left = sorted(range(len(rows)), key=lambda i: (-len(rows[i].ids), i))  # the longest first
        while left:
            longest = len(rows[left[0]].ids)
            batch = left[: max(size.tokens // longest, 1)]
            some, parts = [rows[i] for i in batch], None
            try:
                parts = _of_batch(causal, some, heads, size)
            except (RuntimeError, MemoryError) as error:
                known = isinstance(error, MemoryError | torch.OutOfMemoryError)
                if not known and not any(words in str(error) for words in NO_MEMORY):
                    raise
                if len(batch) == 1 and size.logits <= LEAST_LOGITS:
                    what = f"there is not enough memory for one sequence of {longest:,} tokens on {device}"
                    hint = f"give --max-length {longest // 2}, --dtype bfloat16, or a device with more memory"
                    raise MemoryShortage(what, hint) from error
            if parts is None:  # outside the handler, where the error holds what is to be let go
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                tokens = max(min(size.tokens, len(batch) * longest) // 2, 1)
                size = Size(tokens, max(size.logits // 2, LEAST_LOGITS))
                continue
            ends = np.cumsum([row.size for row in some])[:-1]
            for scores, values in zip(found, parts, strict=True):
                for i, of_row in zip(batch, np.split(values, ends), strict=True):
                    scores[begins[i] : begins[i + 1]] = of_row
            done(sum(len(row.ids) for row in some))
            del left[: len(batch)]
    finally:
        model.train(training)
    return found


@torch.inference_mode()
def _of_batch(causal: Any, rows: Sequence[Row], heads: Sequence[Head], size: Size) -> list[Floats]:
    """Score one batch: for each head the log-probs of its rows end to end."""
    device, longest = next(causal.parameters()).device, max(len(row.ids) for row in rows)
    ids = np.zeros((len(rows), longest), np.int64)
    for at, row in enumerate(rows):
        ids[at, : len(row.ids)] = row.ids
    given = torch.from_numpy(ids).to(device)
    outputs = causal.base_model(input_ids=given, use_cache=False)
    sizes = [row.size for row in rows]
    owner = np.repeat(np.arange(len(rows)), sizes)
    when = np.concatenate([np.arange(row.start - 1, len(row.ids) - 1) for row in rows])
    row_of, predicted_at = torch.from_numpy(owner).to(device), torch.from_numpy(when).to(device)
    states = outputs.last_hidden_state[row_of, predicted_at].float()  # the rest is let go
    wanted = given[row_of, predicted_at + 1]
    temperatures = np.repeat([row.temperature for row in rows], sizes)
    temperature = torch.tensor(temperatures, dtype=torch.float32, device=device)
    width = max(1, size.logits // (4 * causal.get_output_embeddings().weight.shape[0]))
    parts: list[list[Tensor]] = [[] for _ in heads]
    with _head_of(causal) as logits_of:
        for begin in range(0, len(states), width):
            some = slice(begin, begin + width)
            logits = logits_of(outputs, states[some]).float()
            for part, head in zip(parts, heads, strict=True):
                part.append(_log_probs(logits, wanted[some], temperature[some], head))
    return [torch.cat(part).cpu().numpy() for part in parts]


@contextlib.contextmanager
def _head_of(causal: Any) -> Iterator[Callable[[Any, Tensor], Tensor]]:
    """Yield a function from the body's outputs and hidden states [n, D] to the model's own logits [n, V].

    Within the block the head's weights are float32, whatever the body's are: bf16 logits alone are a quarter
    to a half of all that bf16 changes.
    """
    body, outputs = causal.base_model, None

    def stub(*args: object, **kwargs: object) -> Any:
        return outputs

    def logits(of: Any, hidden: Tensor) -> Tensor:
        nonlocal outputs
        of["last_hidden_state"] = hidden[None]
        outputs = of
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        found: Tensor = causal(input_ids=ids, use_cache=False).logits[0]
        return found

    weights = [one for one in causal.get_output_embeddings().parameters() if one.dtype != torch.float32]
    held = [one.data for one in weights]
    own = vars(body).get("forward")
    try:
        for one in weights:
            one.data = one.data.float()
        body.forward = stub
        yield logits
    finally:
        for one, data in zip(weights, held, strict=True):
            one.data = data
        del body.forward
        if own is not None:
            body.forward = own


def _log_probs(logits: Tensor, wanted: Tensor, temperature: Tensor, head: Head) -> Tensor:
    """Return the log-prob of `wanted` [n] by logits [n, V]."""
    if head.logits is not None:
        logits = logits.to(head.logits).float()
    logits = logits / (temperature[:, None] if head.temperature is None else head.temperature)
    return logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(-1)
