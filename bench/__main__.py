"""``python -m bench QUESTION``: how fast is Quiver on this machine, compared with other systems?

``python -m bench all`` runs every question and writes a JSON file for each, and the plots. ``--quick`` uses small data
and two rounds: it checks that the bench runs; its figures mean nothing.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.peers.registry import PEERS
from bench.questions.all import QUESTIONS
from bench.questions.base import Question, Setting
from bench.report import show, show_load, write_json

SHORT = {"raw": ("mapped", "gather", "sockets")}  # the machine's limits, for any tier
OUT = Path(__file__).parent / "results"


def _names(context: click.Context, parameter: click.Parameter, value: str) -> frozenset[str] | None:
    if not value:
        return None
    given = [part.strip() for part in value.split(",") if part.strip()]
    names = [name for part in given for name in SHORT.get(part, (part,))]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise click.BadParameter(f"no peer {unknown[0]!r}; there are {', '.join(PEERS)}, and raw")
    return frozenset(names)


def _pythons(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    for peer, _, path in pairs:
        if peer not in PEERS or not path:
            raise click.BadParameter(f"write PEER=PATH, with a peer out of {', '.join(PEERS)}")
    paths = {peer: path for peer, _, path in pairs}
    if "mds" in paths:  # another contender of the same package
        paths.setdefault("mds-indexed", paths["mds"])
    return paths


OPTIONS = [
    click.option("--quick", is_flag=True, help="Small data and two rounds, to check that it runs."),
    click.option("--rounds", type=click.IntRange(1), default=None, help="How often each runs. [default: 5; quick: 2]"),
    click.option("--samples", type=click.IntRange(2), default=None, help="How many. [default: about 1.2 GB of them]"),
    click.option(
        "--peers",
        callback=_names,
        default="",
        metavar="NAME,…",
        help="Only these, and Quiver; raw: the machine's limits.",
    ),
    click.option(
        "--python",
        "pythons",
        callback=_pythons,
        multiple=True,
        metavar="PEER=PATH",
        help="The interpreter of an environment with that peer's packages; repeat for several.",
    ),
    click.option(
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        default=OUT,
        show_default="bench/results",
        help="Where the JSON and the plots go.",
    ),
    click.option(
        "--scratch",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        default=None,
        help="Where the data goes meanwhile: up to 8 GB. [default: the temporary folder]",
    ),
]


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def main() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds the stack, which ends servers and removes folders


def _ask(question: Question, console: Console, out: Path, scratch: Path | None, **how: Any) -> bool:
    """Run one question; return whether Quiver could be measured."""
    rounds = how["rounds"] or (2 if how["quick"] else 5)
    with tempfile.TemporaryDirectory(prefix="quiver-bench-", dir=scratch) as folder:
        with console.status(question.name) as status:
            setting = Setting(
                Path(folder),
                quick=how["quick"],
                rounds=rounds,
                samples=how["samples"],
                peers=how["peers"],
                pythons=how["pythons"],
                say=lambda text: status.update(f"{question.name}: {text}"),
            )
            answer = question.answer(setting)
        write_json(question, setting, answer, out)
    show(question, answer, console)
    return bool(answer.ratios or answer.more)


def _options(command: Any) -> Any:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def _add(question: Question) -> None:
    @main.command(question.name, help=question.asks)
    @_options
    def command(**how: Any) -> None:
        if not _ask(question, Console(), **how):
            raise click.ClickException("nothing could be measured; the missing peers are listed above")


for _question in QUESTIONS.values():
    _add(_question)


@main.command("all", help="Run every question, and draw the plots.")
@_options
def every(out: Path, **how: Any) -> None:
    from bench.plots import draw

    console = Console()
    for question in QUESTIONS.values():
        _ask(question, console, out, **how)
    for path in draw(out):
        console.print(f"wrote {path}", highlight=False)


@main.command()
@click.option("--out", type=click.Path(path_type=Path, exists=True), default=OUT, help="Where the JSON is.")
def plots(out: Path) -> None:
    """Draw the plots again from existing JSON files."""
    from bench.plots import draw

    for path in draw(out):
        click.echo(f"wrote {path}")


@main.command()
@click.option("--cache", required=True, metavar="URL", help="The rack, as in cache=: http://node1:7717,node2:7717")
@click.option(
    "--manifest",
    metavar="PATH",
    default="",
    help="What to read. [default: random data, generated; they stay in the rack until they are evicted]",
)
@click.option("--readers", type=click.IntRange(1), default=4, show_default=True, help="Processes that read.")
@click.option("--seconds", type=click.FloatRange(0.1), default=30.0, show_default=True, help="How long.")
@click.option("--batch-size", type=click.IntRange(1), default=256, show_default=True)
@click.option(
    "--step-time",
    type=click.FloatRange(0),
    default=0.0,
    metavar="MS",
    show_default=True,
    help="How long an emulated accelerator works on a batch; 0: no accelerator.",
)
@click.option("--verify", type=click.Choice(["auto", "fast", "full", "off"]), default="fast", show_default=True)
@click.option("--size", default="1GiB", show_default=True, metavar="SIZE", help="Of the random data.")
@click.option(
    "--sample-size", default="110000B", show_default=True, metavar="SIZE", help="Mean size of generated samples."
)
@click.option("--warm/--as-it-is", default=None, help="Read everything once first. [default: only random data]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def load(**how: Any) -> None:
    """Read from a rack as training does, with several processes, and report throughput and waits.

    \b
    Example: eight readers with 20 ms of work per batch, for a minute
      python -m bench load --cache http://node1:7717 --manifest imagenet.quiver --readers 8 --seconds 60 --step-time 20
    """
    from bench.load import Load, bring_in, put_on, synthesised
    from quiver.errors import QuiverError
    from quiver.sizes import parse_size

    with tempfile.TemporaryDirectory(prefix="quiver-load-") as folder:
        try:
            made = (
                ""
                if how["manifest"]
                else str(synthesised(Path(folder), parse_size(how["size"]), parse_size(how["sample_size"])))
            )
            asked = Load(
                how["cache"],
                how["manifest"] or made,
                how["readers"],
                how["seconds"],
                how["batch_size"],
                how["step_time"] / 1000,
                how["verify"],
            )
            if how["warm"] or (how["warm"] is None and made):
                bring_in(asked.cache, asked.manifest)
            outcome = put_on(asked)
        except QuiverError as error:
            raise click.ClickException(str(error)) from error
    if how["as_json"]:
        click.echo(json.dumps({"load": {**asdict(asked), "manifest": how["manifest"]}, **outcome.encode()}, indent=1))
    else:
        show_load(asked, outcome, Console())
    if outcome.errors:
        raise click.ClickException(f"{outcome.errors} errors, such as: {outcome.error_texts[0]}")


@main.command("tls")
@click.option("--quick", is_flag=True, help="Small data and one short round, to check that it runs.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="How often each way is measured.")
@click.option("--seconds", type=click.FloatRange(0.05), default=1.0, show_default=True, help="How long a round takes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tls_cost(*, quick: bool, rounds: int, seconds: float, as_json: bool) -> None:
    """What do TLS and the verification of samples cost?"""
    from bench.tls import measure, show

    with tempfile.TemporaryDirectory(prefix="quiver-tls-") as folder:
        how = {"rounds": 1, "seconds": 0.1} if quick else {"rounds": rounds, "seconds": seconds}
        measured = measure(Path(folder), quick=quick, **how)  # type: ignore[arg-type]
    if as_json:
        click.echo(json.dumps(measured, indent=1))
    else:
        show(measured, Console())


@main.command("tokens")
@click.option("--quick", is_flag=True, help="Small data and one short round, to check that it runs.")
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True, help="How often each way is measured.")
@click.option("--seconds", type=click.FloatRange(0.05), default=1.0, show_default=True, help="How long a round takes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tokens_cost(*, quick: bool, rounds: int, seconds: float, as_json: bool) -> None:
    """What do tokens cost?"""
    from bench.tokens import measure, show

    with tempfile.TemporaryDirectory(prefix="quiver-tokens-") as folder:
        how = {"rounds": 1, "seconds": 0.1} if quick else {"rounds": rounds, "seconds": seconds}
        measured = measure(Path(folder), quick=quick, **how)  # type: ignore[arg-type]
    if as_json:
        click.echo(json.dumps(measured, indent=1))
    else:
        show(measured, Console())


@main.command()
@click.option("--quick", is_flag=True, help="A few sockets and short rounds, to check that it runs.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with each round.")
def abuse(quick: bool, rounds: int, as_json: bool) -> None:
    """What hostile clients and overload cost honest readers of a daemon, and the memory that they make it take.

    Prints the lines of docs/reliability.md: p99 beside 1,000 slow heads, 1,000 slow uploads and 5,000 idle sockets over
    p99 alone; goodput at twice the load that saturates over the peak; peak memory under each hostile input.
    """
    import dataclasses

    from bench.abuse import QUICK, Scale, lines, measured

    scale = QUICK if quick else dataclasses.replace(Scale(), rounds=rounds)
    with tempfile.TemporaryDirectory(prefix="quiver-abuse-") as folder:
        told = measured(Path(folder), scale)
    click.echo(json.dumps(told, indent=1) if as_json else "\n".join(lines(told, scale)))


if __name__ == "__main__":
    main()
