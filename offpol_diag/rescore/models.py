"""The model of a run from a folder, a hub id or the caller: with its adapter, and its other checkpoints."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offpol_diag.errors import MemoryShortage, OffpolError, UsageError, install
from offpol_diag.rescore.score import NO_MEMORY, Row, unwrapped
from offpol_diag.rescore.variants import Change
from offpol_diag.run.threads import available

ADAPTER, CONFIG = "adapter_config.json", "config.json"
WHICH = "give a folder with config.json and safetensors, or the name of a model on the hub"
"""What --model takes."""
SPARE = 1.6
"""Memory of a model in bytes of its weights, with a copy of the largest part that is changed."""


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to score.

    Attributes:
        model: the model, peft's wrapper around it or not.
        name: what it is called.
        checkpoints: name → a change that puts another checkpoint in its place.
    """

    model: Any
    name: str
    checkpoints: dict[str, Change] = field(default_factory=dict)

    @property
    def causal(self) -> Any:
        """The causal model under peft's wrapper."""
        return unwrapped(self.model)

    @property
    def dtype(self) -> str:
        """The type of its weights, such as bfloat16."""
        return str(self.causal.dtype).removeprefix("torch.")

    @property
    def vocabulary(self) -> int:
        """How many tokens it knows."""
        return int(self.causal.get_input_embeddings().weight.shape[0])

    def require_known(self, rows: Sequence[Row], file: str) -> None:
        """Refuse tokens that the model does not know.

        Raises:
            UsageError: the vocabulary is another one.
        """
        worst, known = max(int(row.ids.max()) for row in rows), self.vocabulary
        if worst >= known or min(int(row.ids.min()) for row in rows) < 0:
            what = f"{file} holds token {worst:,}, and {self.name} has a vocabulary of {known:,}"
            raise UsageError(what, "give the model of this run: --model")


def live(model: Any) -> Loaded:
    """Take a model of the caller."""
    causal = unwrapped(model)
    return Loaded(model, str(getattr(causal.config, "_name_or_path", "") or type(causal).__name__))


def load(
    names: Sequence[str],
    *,
    base: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    attention: str | None = None,
) -> Loaded:
    """Load a model; the names after the first are other checkpoints of it, loaded when they are tried.

    Raises:
        UsageError: a folder without weights, or one that cannot be read.
        OffpolError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UsageError("rescore needs transformers, which is not installed", install("rescore")) from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # peft asks for it
    found = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(found if device == "auto" else device)
    open_ = partial(_opened, base=base, device=where, attention=attention)
    folder = Path(names[0])
    shown = "/".join(folder.resolve().parts[-2:]) if folder.exists() else names[0]
    loaded, last = Loaded(open_(names[0], dtype=dtype), shown), [Path(one).name for one in names]
    again = partial(open_, dtype=loaded.dtype)
    for name, short in zip(names[1:], last[1:], strict=True):
        change = partial(_other, name, again)
        loaded.checkpoints[short if last.count(short) == 1 else name] = change
    return loaded


def _other(name: str, open_: Callable[[str], Any], model: Any, back: ExitStack) -> Any:
    """Return the model of another checkpoint; what it took is free again when `back` is closed."""
    other = Loaded(open_(name), name)
    if other.vocabulary != (known := Loaded(model, "").vocabulary):
        what = f"{name} has a vocabulary of {other.vocabulary:,}, and the first --model of {known:,}"
        raise UsageError(what, "give checkpoints of one run")
    back.callback(gc.collect)
    return other.model


def _opened(name: str, *, base: str | None, device: torch.device, dtype: str, attention: str | None) -> Any:
    """Load one model, or an adapter with its base."""
    folder, under = Path(name), name
    on_hub = not folder.is_absolute() and len(folder.parts) <= 2  # NAME or OWNER/NAME
    if not (folder.exists() or on_hub):
        raise UsageError(f"{name}: there is no such folder", WHICH)
    adapter = (folder / ADAPTER).is_file()
    try:
        if adapter:
            under = base or json.loads((folder / ADAPTER).read_text()).get("base_model_name_or_path")
            if not under:
                raise UsageError(f"{folder}: an adapter that does not name its base model", "name it: --base")
            if (folder / under / CONFIG).is_file() and not (base and Path(base).exists()):
                under = str(folder / under)
        model = _of_type(under, dtype, device, {"attn_implementation": attention} if attention else {})
        if adapter:
            try:
                from peft import PeftModel
            except ImportError as error:
                what = f"{folder}: an adapter needs peft, which is not installed"
                raise UsageError(what, install("rescore")) from error
            model = PeftModel.from_pretrained(model, str(folder))
        return model.requires_grad_(False).to(device).eval()
    except OffpolError:
        raise
    except Exception as error:  # whatever the code of an architecture, or a damaged file, raises
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        if any(words in str(error) for words in NO_MEMORY):
            what = f"{name}: there is not enough memory for the model on {device} ({why})"
            raise MemoryShortage(what, "give --dtype bfloat16, or --device cpu") from error
        raise UsageError(f"{name}: the model cannot be loaded ({why})", WHICH) from error


def _of_type(name: str, dtype: str, device: torch.device, how: dict[str, Any]) -> Any:
    """Load a model's weights in a type; "auto" is float32 where that fits, else bfloat16."""
    from transformers import AutoModelForCausalLM

    if dtype != "auto":
        return AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype), **how)
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", **how)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available()
    needed = SPARE * 4 * sum(one.numel() for one in model.parameters())
    return model.float() if needed <= free else model.to(torch.bfloat16)
