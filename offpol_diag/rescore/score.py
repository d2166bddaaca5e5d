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


class Penalties(NamedTuple):
    """What lowers the logits of tokens that were seen before, as vLLM does.

    Attributes:
        repetition: factor for tokens of prompt and response.
        presence, frequency: what is taken from tokens of the response, once and for each time.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


UNPENALISED = Penalties()


@dataclass(frozen=True)
class Row:
    """One response with its prompt.

    Attributes:
        ids: tokens of prompt and response.
        start: index of the first response token, at least 1: it is predicted at start − 1.
        temperature: what the logits of this response are divided by.
        positions: the positions, where they are not 0, 1, 2, …
        penalties: of the run, for a hypothesis; they lower no logit else.
    """

    ids: Ints
    start: int
    temperature: float = 1.0
    positions: Ints | None = None
    penalties: Penalties = UNPENALISED

    @property
    def size(self) -> int:
        """Tokens of the response."""
        return len(self.ids) - self.start


class Head(NamedTuple):
    """How logits become log-probs.

    Attributes:
        temperature: what divides the logits; None for each row's own.
        softmax: the type in which the log-softmax is taken.
        logits: the type to which logits are rounded before; None for float32, as they are.
        top_k, top_p: what the distribution is cut to and renormalised over.
        penalised: whether each row's penalties are applied.
    """

    temperature: float | None = None
    softmax: torch.dtype = torch.float32
    logits: torch.dtype | None = None
    top_k: int = 0
    top_p: float = 1.0
    penalised: bool = False


class Scores(NamedTuple):
    """Numbers of all response tokens, end to end in the order of the rows, [T]; empty where not wanted."""

    log_probs: Floats
    entropy: Floats
    rank: Floats


class Size(NamedTuple):
    """How much is computed at once: tokens of a batch of the body, bytes of a chunk of logits."""

    tokens: int
    logits: int

    @classmethod
    def of(cls, device: torch.device) -> Size:
        """Return the default of a device: caches of a CPU are small."""
        return cls(2048, 32 << 20) if device.type == "cpu" else cls(16_384, 512 << 20)

    def half(self) -> Size:
        """Return half of it."""
        return Size(max(self.tokens // 2, 1), max(self.logits // 2, 1 << 20))


def unwrapped(model: nn.Module) -> Any:
    """Return the causal model under wrappers of peft and data parallelism; adapters stay in its layers."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    found = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not (
        hasattr(found, "base_model") and hasattr(found, "get_output_embeddings") and hasattr(found, "config")
    ):
        kind = type(found).__name__
        raise UsageError(
            f"a {kind} is no causal language model of transformers", "give one, or a folder with its files"
        )
    return found


def batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Return indices of rows by batch, the longest first, with at most `tokens` in a batch, or one row."""
    found: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if found and (len(found[-1]) + 1) * lengths[found[-1][0]] <= tokens:
            found[-1].append(i)
        else:
            found.append([i])
    return found


@contextlib.contextmanager
def head_of(causal: Any) -> Iterator[Callable[[Any, Tensor], Tensor]]:
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
    had, real = "forward" in vars(body), body.forward
    try:
        for one in weights:
            one.data = one.data.float()
        body.forward = stub
        yield logits
    finally:
        for one, data in zip(weights, held, strict=True):
            one.data = data
        if had:
            body.forward = real
        else:
            del body.forward


def of_logits(logits: Tensor, wanted: Tensor, temperature: Tensor, head: Head, more: bool) -> list[Tensor]:
    """Return the log-prob of `wanted` [n], and with `more` entropy and rank; it overwrites logits [n, V]."""
    if head.logits is not None:
        logits = logits.to(head.logits).float()
    scale = temperature[:, None] if head.temperature is None else head.temperature
    if isinstance(scale, Tensor) or scale != 1.0:
        logits = logits.div_(scale)
    if head.softmax != torch.float32:
        return [logits.to(head.softmax).log_softmax(-1).gather(1, wanted[:, None])[:, 0].float()]
    if head.top_k:
        least = logits.topk(min(head.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if head.top_p < 1.0:
        high, where = logits.sort(dim=-1, descending=True)
        share = high.softmax(-1)
        drop = share.cumsum(-1) - share >= head.top_p
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(1, where, drop), -torch.inf)
    chosen = logits.gather(1, wanted[:, None])
    total = logits.logsumexp(-1)
    found = [chosen[:, 0] - total]
    if more:
        rank = (logits > chosen).sum(-1) + 1
        mean = (logits - total[:, None]).exp_().mul_(logits).sum(-1)
        found += [total - mean, rank.float()]
    return found


def penalised(logits: Tensor, rows: Sequence[Row], ids: Tensor, row_of: Tensor, at: Tensor) -> Tensor:
    """Return logits [n, V] with each row's penalties on what stands up to position `at` [n] in ids [R, L]."""
    place = torch.arange(ids.shape[1], device=ids.device)
    starts = torch.tensor([row.start for row in rows], device=ids.device)[row_of, None]
    before = place[None] <= at[:, None]
    of_prompt, of_response = (
        torch.zeros_like(logits).scatter_add_(1, ids[row_of], some.to(logits.dtype))
        for some in (before & (place[None] < starts), before & (place[None] >= starts))
    )
    each = torch.tensor([row.penalties for row in rows], dtype=logits.dtype, device=ids.device)[row_of]
    repetition, presence, frequency = (each[:, i, None] for i in range(3))
    lowered = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(of_prompt + of_response > 0, lowered, logits)
    return logits - frequency * of_response - presence * (of_response > 0)


def score(
    model: nn.Module,
    rows: Sequence[Row],
    heads: Sequence[Head] = (Head(),),
    *,
    size: Size | None = None,
    more: bool = False,
    done: Callable[[int], None] = lambda tokens: None,
) -> list[Scores]:
    """Score all responses under each head, in one pass of the body.

    Args:
        model: a causal language model of transformers, peft's wrapper around it or not.
        rows: the responses.
        heads: how logits become log-probs.
        size: how much at once; None for the default of the device. It is halved where memory is short.
        more: whether to compute entropies and ranks too.
        done: called with the tokens of a batch when it is done.

    Raises:
        MemoryShortage: there is too little memory even for the longest row alone.
    """
    causal, begins = (
        unwrapped(model),
        np.concatenate(([0], np.cumsum([row.size for row in rows], dtype=np.int64))),
    )
    device = next(causal.parameters()).device
    size = size or Size.of(device)
    found = [
        Scores(*(np.zeros(begins[-1] if i == 0 or more else 0, np.float32) for i in range(3))) for _ in heads
    ]
    training = model.training
    model.eval()
    try:
        left = batches([len(row.ids) for row in rows], size.tokens)
        while left:
            some = [rows[i] for i in left[0]]
            parts, size = _fitting(causal, some, heads, size, more)
            if parts is None:  # smaller batches of what is left
                rest = [i for batch in left for i in batch]
                again = batches([len(rows[i].ids) for i in rest], size.tokens)
                left = [[rest[i] for i in batch] for batch in again]
                continue
            for scores, columns in zip(found, parts, strict=True):
                for target, values in zip(scores, columns, strict=False):
                    at = 0
                    for i in left[0]:
                        target[begins[i] : begins[i + 1]] = values[at : (at := at + rows[i].size)]
            done(sum(len(row.ids) for row in some))
            del left[0]
    finally:
        model.train(training)
    return found


def _fitting(
    causal: Any, rows: Sequence[Row], heads: Sequence[Head], size: Size, more: bool
) -> tuple[list[list[Floats]] | None, Size]:
    """Return the numbers of a batch, or None and a smaller size where memory is short."""
    try:
        return _of_batch(causal, rows, heads, size, more), size
    except (RuntimeError, MemoryError) as error:
        short = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
            one in str(error) for one in NO_MEMORY
        )
        if not short:
            raise
        if len(rows) == 1 and size.logits <= 1 << 20:
            most = len(rows[0].ids)
            where = next(causal.parameters()).device
            what = f"there is not enough memory for one sequence of {most:,} tokens on {where}"
            hint = f"give --max-length {most // 2}, --dtype bfloat16, or a device with more memory"
            raise MemoryShortage(what, hint) from error
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    tokens = max(min(size.tokens, len(rows) * len(rows[0].ids)) // 2, 1)
    return None, Size(tokens, size.half().logits)


@torch.inference_mode()
def _of_batch(
    causal: Any, rows: Sequence[Row], heads: Sequence[Head], size: Size, more: bool
) -> list[list[Floats]]:
    """Score one batch: for each head the log-probs (entropies, ranks) of its rows end to end."""
    device, longest = next(causal.parameters()).device, max(len(row.ids) for row in rows)
    ids = np.zeros((len(rows), longest), np.int64)
    for at, row in enumerate(rows):
        ids[at, : len(row.ids)] = row.ids
    extra: dict[str, Tensor] = {}
    if any(row.positions is not None for row in rows):
        positions = np.tile(np.arange(longest), (len(rows), 1))
        for at, row in enumerate(rows):
            if row.positions is not None:
                positions[at, : len(row.ids)] = row.positions
        # without a mask, transformers takes a jump in the positions for the seam of packed sequences
        everything = torch.ones(ids.shape, dtype=torch.long, device=device)
        extra = {"position_ids": torch.from_numpy(positions).to(device), "attention_mask": everything}
    given = torch.from_numpy(ids).to(device)
    outputs = causal.base_model(input_ids=given, use_cache=False, **extra)
    owner = np.repeat(np.arange(len(rows)), [row.size for row in rows])
    when = np.concatenate([np.arange(row.start - 1, len(row.ids) - 1) for row in rows])
    row_of, predicted_at = torch.from_numpy(owner).to(device), torch.from_numpy(when).to(device)
    states = outputs.last_hidden_state[row_of, predicted_at].float()  # the rest is let go
    wanted = given[row_of, predicted_at + 1]
    heat = np.repeat([row.temperature for row in rows], [row.size for row in rows])
    temperature = torch.tensor(heat, dtype=torch.float32, device=device)
    width = max(1, size.logits // (4 * causal.get_output_embeddings().weight.shape[0]))
    parts: list[list[list[Tensor]]] = [[] for _ in heads]
    with head_of(causal) as logits_of:
        for begin in range(0, len(states), width):
            some = slice(begin, begin + width)
            logits = logits_of(outputs, states[some]).float()
            for i, (part, head) in enumerate(zip(parts, heads, strict=True)):
                own = logits if i == len(heads) - 1 else logits.clone()
                if head.penalised:
                    own = penalised(own, rows, given, row_of[some], predicted_at[some])
                part.append(of_logits(own, wanted[some], temperature[some], head, more and i == 0))
    return [
        [torch.cat(pieces).cpu().numpy() for pieces in zip(*part, strict=True)] if part else []
        for part in parts
    ]
