"""The commands that make a result, and draw it: on the screen, and in the files that are asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from offpol_diag.cli.exits import FAILED
from offpol_diag.cli.output import STDOUT, Outputs, default_html, note
from offpol_diag.errors import UsageError

if TYPE_CHECKING:
    from offpol_diag import requests
    from offpol_diag.result import Result

TWO = 2
HEAD = 100
"""Characters of a result that say what it is of."""


def analyze(request: requests.Analyze) -> None:
    """How bad is the mismatch, how sure is that, and where is it: terminal summary and one HTML file.

    The HTML goes to offpol-diag-<name>.html in the working directory unless -o says otherwise. With --json -
    or --md - stdout holds that and nothing else. The exit code is 0 whatever the diagnosis, and with --strict
    1 where it is a bug.

    To analyze a dump in pieces, on many machines, run this on each with --tally, then `offpol-diag merge` on
    the tallies. Cut between training steps: methods that judge a token by its whole step (M2PO, Pareto
    smoothing, advantages made of rewards) are exact only where each step lies whole in one piece.
    """
    from offpol_diag import commands
    from offpol_diag.cli.settings import dumps

    read = dumps(request)
    files = Outputs.of(request, *read, html=default_html(read))
    with files.begin() as staged:
        from offpol_diag.analysis.vocabulary import with_texts

        summary = computed(commands.analyze, read, request.model_copy(update=staged))
        files.write(with_texts(summary, request.tokenizer), request.verbose)
    fail_on_bug(request.strict, summary)


def doctor(request: requests.Doctor) -> None:
    """Is the mismatch a bug, and which one: the verdict, its causes with their evidence, and the fix.

    Says in one sentence whether the log-probs are logged wrongly, then what speaks for each cause, where it
    is, how to confirm it, what to change and the numbers after that, then what was ruled out and what this
    dump cannot decide. No correction is evaluated and none is recommended: `offpol-diag analyze` does both.

    The exit code is 0 whatever the verdict, and with --strict 1 where it is a bug.
    """
    from offpol_diag import commands

    fail_on_bug(request.strict, drawn(commands.doctor, request))


def compare(request: requests.Compare) -> None:
    """Corrections side by side on one dump, or run A against run B.

    One DUMP: what each correction keeps, drops and weighs, which does better, and what each drops that the
    first one keeps. Differences are paired, with intervals of their own.

    Two DUMPs: the first is run A, the second run B (FP8 against BF16, before against after an upgrade); what
    differs, by how much, and whether it is real after a correction for looking at many numbers. Prompts that
    both runs have (group_id) are resampled together. With --as-one they are the parts of one dump; a quoted
    glob or a directory is one DUMP as well.
    """
    from offpol_diag import commands

    given = () if request.from_file("dump") else request.dump
    if len(given) > TWO and not request.as_one:
        raise UsageError(
            f"{len(given)} DUMPs given: two are compared as run A and run B, more are not",
            "add --as-one to read them as the parts of one dump, or name each run by a directory or a quoted "
            "glob: compare 'before/*.parquet' 'after/*.parquet'",
        )
    if len(given) < TWO or request.as_one:
        drawn(partial(commands.compare, others=None), request)
        return
    from offpol_diag.readers.sources import clean

    (a, b), names = given, [clean(one) for one in given]
    files = Outputs.of(request, *given)
    with files.begin():
        said = "{} is run A, {} is run B".format(*names)
        note(f"2 DUMPs given: {said} (--as-one reads them as one)", request.quiet)
        files.write(computed(partial(commands.compare, others=[b]), [a], request), request.verbose)


def sweep(request: requests.Sweep) -> None:
    """Threshold against what is kept, ESS, bias and variance: one preset at many thresholds, in one reading.

    Shown overall and by quartile of response length, with a warning where a threshold drops long responses,
    lies under numerical noise, or beside the data. With --keep the bounds that keep an asked share, and what
    they would keep of responses of other lengths. With -o an HTML report.
    """
    from offpol_diag import commands

    drawn(commands.sweep, request)


def check(request: requests.Check) -> None:
    """Does the trainer log what its dump says? Its own curves beside the numbers they must be.

    Each training step of the dump is taken as one batch of the trainer, and every metric that the crosswalk
    knows is compared with the curve of that name. Where they differ by more than float32 rounds, variants
    are tried, alone and in pairs: masked tokens counted, means over micro-batches or ranks, the other
    direction of the ratio, other bounds, another pair of policies, sums, another step. The one that
    reproduces the curve is named.

    The exit code is 0 whatever is found, and with --strict 1 where a metric differs.
    """
    from offpol_diag import commands
    from offpol_diag.cli.settings import dumps

    read = dumps(request)
    files = Outputs.of(request, *read, *request.logged)
    found = commands.check(read, request, partial(note, quiet=request.quiet))
    files.write(found, request.verbose)
    if request.strict and not found.equal:
        raise SystemExit(FAILED)


def merge(request: requests.Merge) -> None:
    """Pieces of a dump, analysed apart on any machines, as one report: the same as of one run over the whole.

    The pieces must have been analysed alike: version, presets in full, columns, seed. A piece given twice is
    refused. Methods that judge a token by its whole training step (M2PO, Pareto smoothing, advantages made of
    rewards) need every step to lie whole in one piece. Where a step is torn, such presets are left out, with
    a note; advantages made of rewards are refused.

    The HTML goes to offpol-diag-merged.html in the working directory unless -o says otherwise. With --tally
    the merged tally is written as well, to be merged with others.
    """
    from offpol_diag import commands

    files = Outputs.of(request, *request.tallies, html=default_html(["merged"]))
    with files.begin() as staged:
        summary = commands.merge(request.tallies, request.model_copy(update=staged))
        files.write(summary, request.verbose)


def report(request: requests.Report) -> None:
    """Draw a report again from the JSON of a result; equal to the one first drawn."""
    from offpol_diag.analysis.vocabulary import with_texts
    from offpol_diag.check import result as of_check
    from offpol_diag.result import loads, text_of, text_of_stream

    result, stdin = request.result, request.result == STDOUT
    files = Outputs.of(request, result, html=default_html([str(result)]))
    with files.begin():
        name = "stdin" if stdin else str(result)
        if stdin and (sys.stdin is None or sys.stdin.closed):
            hint = "pipe a result in: offpol-diag analyze dump.parquet --json - | offpol-diag report -"
            raise UsageError("-: nothing is piped into standard input", hint)
        text = text_of_stream(sys.stdin.buffer, name) if stdin else text_of(result)
        if of_check.FORMAT in text[:HEAD]:
            found = of_check.loads(text, name)
            files.write(found, request.verbose)
        else:
            files.write(with_texts(loads(text, name), request.tokenizer), request.verbose)


# ---------------------------------------------------------------- what they share


def computed(does: Any, dumps: Sequence[str], request: Any) -> Any:
    """Return what a function of `commands` makes of dumps, with a progress bar and its remarks on stderr."""
    from offpol_diag.cli.running import running

    with running(request, dumps) as asked:
        return does(dumps, request=asked, say=partial(note, quiet=request.quiet))


def drawn(does: Any, request: Any) -> Result:
    """Compute a result, and write all that is asked for; no page unless it is."""
    from offpol_diag.cli.settings import dumps

    read = dumps(request)
    files = Outputs.of(request, *read)
    with files.begin():
        summary: Result = computed(does, read, request)
        files.write(summary, request.verbose)
    return summary


def fail_on_bug(strict: bool, summary: Result) -> None:
    """Exit with 1, if that is asked for, where the log-probs are logged wrongly."""
    if strict and summary.is_bug:
        raise SystemExit(FAILED)
