"""The commands that make a result, and draw it: on the screen, and in the files that are asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from offpol_diag.cli.exits import COULD_NOT_SAY, FAILED
from offpol_diag.cli.other import explain
from offpol_diag.cli.output import STDOUT, Outputs, default_html, emit, note, say_where
from offpol_diag.cli.settings import dumps
from offpol_diag.errors import UsageError

if TYPE_CHECKING:
    from offpol_diag import requests
    from offpol_diag.check import Checked
    from offpol_diag.result import Result

TWO = 2
CHECK, HEAD = '"offpol-diag check', 100
"""What a check's JSON says it is, and the characters of a result that say so."""
EXITS = {"passed": 0, "failed": FAILED, "could not say": COULD_NOT_SAY}


def analyze(request: requests.Analyze) -> None:
    """How bad is the mismatch, how sure is that, and where is it: terminal summary and one HTML file.

    The HTML goes to offpol-diag-<name>.html in the working directory unless -o says otherwise. With --json -
    or --md - stdout holds that and nothing else. The exit code is 0 whatever the diagnosis, and with --strict
    1 where it is a bug.
    """

    def made(asked: requests.Analyze) -> Result:
        from offpol_diag.report.vocabulary import with_texts

        return with_texts(computed("analyze", read, asked), request.tokenizer)

    read = dumps(request)
    fail_on_bug(request.strict, drawn(request, made, *read, html=default_html(read)))


def doctor(request: requests.Doctor) -> None:
    """Is the mismatch a bug, and which one: the verdict, its causes with their evidence, and the fix.

    Says in one sentence whether the log-probs are logged wrongly, then what speaks for each cause, where it
    is, how to confirm it, what to change and the numbers after that, then what was ruled out and what this
    dump cannot decide. No correction is evaluated and none is recommended: `offpol-diag analyze` does both.

    The exit code is 0 whatever the verdict, and with --strict 1 where it is a bug.

    With --explain no dump is read: it says what is known of one cause.
    """
    if request.explain is not None:
        explain(request, request.explain)
        return
    read = dumps(request)
    fail_on_bug(request.strict, drawn(request, partial(computed, "doctor", read), *read))


def compare(request: requests.Compare) -> None:
    """Corrections side by side on one dump, or further runs against the first.

    One DUMP: what each correction keeps, drops and weighs, which does better, and what each drops that the
    first one keeps. Differences are paired, with intervals of their own.

    Several DUMPs: the first is run A, the others are B, C, … (FP8 against BF16, before against after an
    upgrade); what differs from A, by how much, and whether it is real after a correction for looking at many
    numbers. Prompts that runs share (group_id) are resampled together. With --as-one they are the parts of
    one dump; a quoted glob or a directory is one DUMP as well.
    """
    from offpol_diag.printable import clean

    given = () if request.from_file("dump") else request.dump
    if len(given) > len(ascii_uppercase) and not request.as_one:
        raise UsageError(
            f"{len(given)} DUMPs given: at most {len(ascii_uppercase)} runs are compared",
            "add --as-one to read them as the parts of one dump, or name each run by a directory or a quoted "
            "glob: compare 'before/*.parquet' 'after/*.parquet'",
        )
    if len(given) < TWO or request.as_one:
        read, others = dumps(request), []
    else:
        read, *others = ([one] for one in given)
        runs = [f"{clean(one)} is run {letter}" for one, letter in zip(given, ascii_uppercase, strict=False)]
        note(f"{len(given)} DUMPs given: {', '.join(runs)} (--as-one reads them as one)", request.quiet)
    drawn(request, partial(computed, "compare", read, others=others), *read, *(one for (one,) in others))


def sweep(request: requests.Sweep) -> None:
    """Threshold against what is kept, ESS, bias and variance: one preset at many thresholds, in one reading.

    Shown overall and by response length, with a warning where a threshold drops long responses,
    or tokens of policy lag 0. With --keep the bounds that keep an asked share. With -o an HTML report.
    """
    read = dumps(request)
    drawn(request, partial(computed, "sweep", read), *read)


def check(request: requests.Check) -> None:
    """What does a trainer log of this dump? Step by step, and its own curves beside it.

    Each training step of the dump is taken as one batch of the trainer that --for names. With --logged every
    metric is compared with the curve of that name: where they are furthest apart, and from which step on
    they differ by more than float32 rounds.

    The exit code is 0 whatever is found, and with --strict 1 where a metric differs.
    """
    read = dumps(request)
    found = drawn(request, partial(computed, "check", read), *read, *(request.logged or ()))
    if request.strict and found.different:
        raise SystemExit(FAILED)


def gate(request: requests.Gate) -> None:
    """Hold numbers against bounds, or against an earlier result; the exit code is the verdict.

    0: every bound holds. 1: a bound failed. 2: no bound failed, but one could not be judged (a name that is
    no metric, a value that cannot be known from this dump or is unreliable, NaN), or nothing could be judged.

    A bound fails only when the whole 95% interval lies beyond it. An interval with values on both sides
    passes, and the table says that it is open. A number without an interval is judged by its value; a value
    on its bound passes.

    --fail-on bug fails where the diagnosis is a bug; it could not be judged (2) where a bug is among several
    causes that fit, or cannot be looked for: columns that are copies, fewer than 16 sequences or 4 prompts.
    Causes that fit and are all honest pass as open. --fail-on cannot_tell is the strict way: it fails for all
    of these.

    Against a baseline none may be worse, in the order healthy, honest_mismatch, cannot_tell, bug.

    NAME is a metric (k3, drift2.k3), a preset's (seq_mis.ess_tokens), what a trainer logs that equals one
    (rollout_corr/kl), or any of them at every training step (step:NAME).

    Under GitHub Actions the job summary gets the Markdown, and the run is annotated.
    """
    from offpol_diag import commands
    from offpol_diag.gate import outcome

    def made(asked: requests.Gate) -> Result:
        if (result := _result(asked)) is not None:
            return commands.gate(result, asked, must)
        return computed("gate", asked.dump, asked, must=must)

    must = commands.required(request)
    judged = drawn(request, made, *request.dump, *([must.baseline] if must.baseline else []))
    _report_to_github(judged, STDOUT in (request.out, request.json_file, request.md, request.junit))
    raise SystemExit(EXITS[outcome(judged.gates)])


def _result(request: requests.Gate) -> Result | None:
    """Load the result that is given; None where a dump is."""
    from offpol_diag.commands import saved

    if request.dump == (str(STDOUT),):
        from offpol_diag.result import loads

        return loads(_piped(), "stdin")
    return saved(request.dump)


def _piped() -> str:
    """Return the text of a result that is piped into standard input."""
    from offpol_diag.result import text_of_stream

    if sys.stdin is None or sys.stdin.closed:
        hint = "pipe a result in: offpol-diag analyze dump.parquet --json - | offpol-diag report -"
        raise UsageError("-: nothing is piped into standard input", hint)
    return text_of_stream(sys.stdin.buffer, "stdin")


def _report_to_github(summary: Result, aside: bool) -> None:
    """Add to the job summary where there is one, and annotate the run of GitHub Actions.

    Annotations go to stdout, or `aside` to stderr, which GitHub also reads. Failing to write the job summary
    does not fail a gate.
    """
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    if place:
        from offpol_diag.report import answered
        from offpol_diag.report.markdown import markdown

        try:
            with Path(place).open("a", encoding="utf-8") as file:
                file.write("\n" + markdown(answered(summary)))
        except OSError as error:
            note(f"GITHUB_STEP_SUMMARY: {place} cannot be written ({error.strerror})")
    if os.environ.get("GITHUB_ACTIONS") == "true":
        from offpol_diag.report.annotations import annotated

        lines = "".join(f"{line}\n" for line in annotated(summary.gates))
        if aside:
            sys.stderr.flush()
            sys.stderr.buffer.write(lines.encode())
            sys.stderr.buffer.flush()
        else:
            emit(lines)


def rescore(request: requests.Rescore) -> None:
    """Who is wrong, the engine or the trainer? The run's model scores the responses again: a third opinion.

    Says which column that model does not reproduce, and tries the hypotheses instead of guessing them:
    without the adapter, at another scale, with other checkpoints, temperature, top-k and top-p, another
    prompt, window, RoPE or sinks, weights or cache of fewer bits. Each column is judged by itself, of all
    responses and by host, step and prompt, against what bf16 alone changes of the model.

    Needs token_ids and prompt_ids in the dump (docs/dumps.md), and the extra rescore. The scored responses
    are written with the reference's log-probs, entropies and ranks beside their columns. Interrupted, the
    same command goes on where it was.

    The exit code is 0 whatever is found, and with --strict 1 where a side is not reproduced.
    """
    from offpol_diag import commands
    from offpol_diag.cli.output import check as writable
    from offpol_diag.cli.running import progress
    from offpol_diag.printable import clean

    read = dumps(request)
    to = request.to or Path(f"{default_html(read).stem.removeprefix('offpol-diag-')}-rescored.parquet")
    writable(to, *map(clean, read))

    def made(asked: requests.Rescore) -> Result:
        with progress(request.quiet, "scoring", "tokens") as report:
            asked = asked.model_copy(update={"progress": report, "to": to})
            return commands.rescore(read, asked, partial(note, quiet=request.quiet))

    found = drawn(request, made, *read)
    if not request.quiet:
        say_where("dump", to, STDOUT in (request.out, request.json_file, request.md))
    if request.strict and found.reference is not None and found.reference.odd:
        raise SystemExit(FAILED)


def report(request: requests.Report) -> None:
    """Draw a report again from the JSON of a result; equal to the one first drawn."""
    from offpol_diag.report.vocabulary import with_texts
    from offpol_diag.result import loads, text_of

    def made(asked: requests.Report) -> Result | Checked:
        name = "stdin" if stdin else str(result)
        text = _piped() if stdin else text_of(result)
        if CHECK in text[:HEAD]:
            from offpol_diag.check import loads as load_check

            return load_check(text, name)
        return with_texts(loads(text, name), request.tokenizer)

    result, stdin = request.result, request.result == STDOUT
    drawn(request, made, result, html=default_html([str(result)]))


# ---------------------------------------------------------------- what they share


def computed(command: str, dumps: Sequence[str], request: Any, **more: Any) -> Result:
    """Return what a function of `commands` makes of dumps, with a progress bar and its remarks on stderr."""
    from offpol_diag import commands
    from offpol_diag.cli.running import running

    with running(request) as asked:
        does = getattr(commands, command)
        found: Result = does(dumps, request=asked, say=partial(note, quiet=request.quiet), **more)
    return found


def drawn(request: Any, make: Callable[[Any], Any], *sources: object, html: Path | None = None) -> Any:
    """Make a result, and write all that is asked for of it; `html` is where a page goes anyway."""
    files = Outputs.of(request, *sources, html=html)
    with files.begin() as staged:
        found = make(request.model_copy(update=staged))
        files.write(found, request.verbose)
    return found


def fail_on_bug(strict: bool, summary: Result) -> None:
    """Exit with 1, if that is asked for, where the log-probs are logged wrongly."""
    if strict and summary.is_bug:
        raise SystemExit(FAILED)
