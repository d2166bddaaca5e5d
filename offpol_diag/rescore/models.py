"""The model of a run from a folder, a hub id or the caller: with its adapter, and its other checkpoints."""

from __future__ import annotations

import contextlib
import gc
import json
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offpol_diag.errors import MemoryShortage, OffpolError, UsageError, install
from offpol_diag.rescore.score import NO_MEMORY, Row, Size, unwrapped
from offpol_diag.rescore.variants.table import Change

ADAPTER, CONFIG = "adapter_config.json", "config.json"
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
WHICH = "give a folder with config.json and safetensors, or the name of a model on the hub"
"""What --model takes."""
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPARE = 1.6
"""Memory of a model in bytes of its weights, with a copy of the largest part that is changed."""


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to score.

    Attributes:
        model: the model, peft's wrapper around it or not.
        name: what it is called.
        checkpoints: name → a context that yields another checkpoint.
        marks: special tokens of its template; none where no tokenizer is there.
        pad: its token for padding.
        identity: what tells it from another one, for runs that are continued.
        notes: what was assumed.
    """

    model: Any
    name: str
    checkpoints: dict[str, Change] = field(default_factory=dict)
    marks: Collection[int] = ()
    pad: int = 0
    identity: str = ""
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where it is."""
        found: torch.device = next(self.model.parameters()).device
        return found

    @property
    def dtype(self) -> torch.dtype:
        """The type of its body."""
        found: torch.dtype = next(unwrapped(self.model).parameters()).dtype
        return found

    @property
    def vocabulary(self) -> int:
        """Tokens that it knows."""
        return int(unwrapped(self.model).get_input_embeddings().weight.shape[0])

    def judge(self, rows: Sequence[Row], file: str) -> None:
        """Refuse tokens that the model does not know, and attention that would not fit.

        Raises:
            UsageError: the vocabulary is another one.
            MemoryShortage: the attention of the longest sequence alone is larger than the memory.
        """
        worst = max(int(row.ids.max()) for row in rows)
        if worst >= self.vocabulary or min(int(row.ids.min()) for row in rows) < 0:
            what = f"{file} holds token {worst:,}, and {self.name} has a vocabulary of {self.vocabulary:,}"
            raise UsageError(what, "give the model of this run: --model")
        config = unwrapped(self.model).config.get_text_config()
        longest = max(len(row.ids) for row in rows)
        heads = getattr(config, "num_attention_heads", 0)
        need = 3 * heads * longest**2 * 4
        if config._attn_implementation == "eager" and need > (free := free_memory(self.device)):
            kind = type(unwrapped(self.model)).__name__
            what = f"eager attention of {longest:,} tokens takes {need / 1e9:.1f} GB of {free / 1e9:.1f} free"
            raise MemoryShortage(f"{kind}: {what}", "give --attention flex_attention, or --max-length")

    def peak(self, rows: Sequence[Row], size: Size) -> int:
        """Return about how many bytes scoring takes at most, the model included."""
        weights = sum(one.numel() * one.element_size() for one in self.model.parameters())
        config = unwrapped(self.model).config.get_text_config()
        wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        tokens = max(size.tokens, max(len(row.ids) for row in rows))
        hidden = tokens * (12 * config.hidden_size + 3 * wide) * 4
        logits = 4 * max(size.logits, 4 * self.vocabulary)
        return int(2 * weights + hidden + logits)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    from offpol_diag.run.threads import available

    return available()


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
    where = torch.device(
        "cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu")
    )
    open_ = partial(_opened, base=base, device=where, attention=attention)
    model = open_(names[0], dtype=dtype)
    settled = str(next(unwrapped(model).parameters()).dtype).removeprefix("torch.")
    others = {_short(name, names): partial(_other, name, partial(open_, dtype=settled)) for name in names[1:]}
    special, pad = _special(names[0], base)
    notes = []
    if settled != "float32":
        notes.append(
            f"The model is computed in {settled} (--dtype): what that changes is in the reference too."
        )
    return Loaded(model, _called(names[0]), dict(others), special, pad, _identity(names[0]), tuple(notes))


def given(model: Any, tokenizer: Any = None) -> Loaded:
    """Take a live model, with its tokenizer where there is one."""
    special = tuple(getattr(tokenizer, "all_special_ids", ()))
    pad = getattr(tokenizer, "pad_token_id", None)
    name = str(getattr(unwrapped(model).config, "_name_or_path", "") or type(unwrapped(model)).__name__)
    return Loaded(model, name, {}, special, pad or 0)


def _opened(name: str, *, base: str | None, device: torch.device, dtype: str, attention: str | None) -> Any:
    """Load one model, or an adapter with its base."""
    folder = Path(name)
    if folder.exists():
        _require_files(folder)
    elif folder.is_absolute() or len(folder.parts) > 2:  # a model on the hub is NAME or OWNER/NAME
        raise UsageError(f"{name}: there is no such folder", WHICH)
    try:
        if (folder / ADAPTER).is_file():
            return _with_adapter(folder, base, device, dtype, attention)
        return _moved(_model(name, dtype, device, attention), device)
    except OffpolError:
        raise
    except Exception as error:  # whatever the code of an architecture, or a damaged file, raises
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        if any(words in str(error) for words in NO_MEMORY):
            what = f"{name}: there is not enough memory for the model on {device} ({why})"
            raise MemoryShortage(what, "give --dtype bfloat16, or --device cpu") from error
        raise UsageError(f"{name}: the model cannot be loaded ({why})", WHICH) from error


def _model(name: str, dtype: str, device: torch.device, attention: str | None) -> Any:
    from transformers import AutoModelForCausalLM

    how: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    if dtype != "auto":
        return AutoModelForCausalLM.from_pretrained(name, dtype=TYPES[dtype], **how)
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", **how)
    many = sum(one.numel() for one in model.parameters())
    if 4 * many * SPARE <= free_memory(device):
        return model.float()
    return model.to(torch.bfloat16)


def _moved(model: Any, device: torch.device) -> Any:
    model.requires_grad_(False)
    return model.to(device).eval()


def _with_adapter(
    folder: Path, base: str | None, device: torch.device, dtype: str, attention: str | None
) -> Any:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise UsageError(
            f"{folder}: an adapter needs peft, which is not installed", install("rescore")
        ) from error
    said = json.loads((folder / ADAPTER).read_text()).get("base_model_name_or_path")
    under = base or said
    if not under:
        raise UsageError(f"{folder}: an adapter, and its base model is not said", "name it: --base")
    beside = folder / under
    if (beside / CONFIG).is_file() and not (base and Path(base).exists()):
        under = str(beside)
    return _moved(
        PeftModel.from_pretrained(_model(str(under), dtype, device, attention), str(folder)), device
    )


def _require_files(folder: Path) -> None:
    """Refuse a folder that holds no model."""
    if folder.is_file():
        raise UsageError(f"{folder}: a file, and the folder of a model is needed", f"give {folder.parent}")
    config = next((name for name in (ADAPTER, CONFIG) if (folder / name).is_file()), None)
    if config is None:
        raise UsageError(
            f"{folder}: no model: it has no {CONFIG}", "give the folder that save_pretrained wrote"
        )
    if not any(one for pattern in WEIGHTS for one in folder.glob(pattern)):
        hint = "give the folder that save_pretrained wrote; a sharded checkpoint has to be merged first"
        raise UsageError(f"{folder}: no weights: it has {config} and no safetensors", hint)


@contextlib.contextmanager
def _other(name: str, open_: Any, model: Any) -> Iterator[Any]:
    """Yield the model of another checkpoint, and let go of it."""
    other = open_(name)
    sizes = [int(unwrapped(one).get_input_embeddings().weight.shape[0]) for one in (model, other)]
    if len(set(sizes)) > 1:
        what = f"{name} has a vocabulary of {sizes[1]:,}, and the first --model of {sizes[0]:,}"
        raise UsageError(what, "give checkpoints of one run")
    yield other
    del other
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _short(name: str, names: Sequence[str]) -> str:
    """Return the last part of a path where that tells it from the others."""
    last = [Path(one).name for one in names]
    return Path(name).name if last.count(Path(name).name) == 1 else name


def _called(name: str) -> str:
    """Return what a model is called: the last two parts of a path, or its name on the hub."""
    return "/".join(Path(name).resolve().parts[-2:]) if Path(name).exists() else name


def _special(name: str, base: str | None) -> tuple[tuple[int, ...], int]:
    """Return the special tokens and the padding of the model's tokenizer; none where none is beside it."""
    from transformers import AutoTokenizer

    for one in filter(None, (name, base)):
        if not Path(one).exists() or any(Path(one).glob("tokenizer*")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                made = AutoTokenizer.from_pretrained(one)
                return tuple(made.all_special_ids), made.pad_token_id or 0
    return (), 0


def _identity(name: str) -> str:
    """Return what tells a model from another one: its files with their sizes and times."""
    folder = Path(name)
    if not folder.is_dir():
        return name
    states = ((one.name, one.stat()) for one in sorted(folder.iterdir()) if one.is_file())
    return ";".join(
        [str(folder.resolve()), *(f"{file},{at.st_size},{at.st_mtime_ns}" for file, at in states)]
    )
