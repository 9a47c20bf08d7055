"""Look at a run in the browser: its curves, its trajectories turn by turn, and its failures.

    runs/NAME, an evaluation, a file ──> viewer/sources.py ──> viewer/server.py ──> viewer/page/
                                                          └──> viewer/export.py ──> one .html file
                                                          └──> --text ────────────> the terminal

It never changes a run. It can show a run that is still training, and updates the page as the run
grows. The page loads nothing from other machines. It opens only at the printed address, whose token
other users of this machine do not know. (A browser's command line shows it: use --no-browser where
others can list your processes.) To view the page from another machine, run
`ssh -L 8610:127.0.0.1:8610 HOST` on it, where HOST runs replay.py, and open the printed address.

How to run:

    python replay.py                                     the newest run in runs/
    python replay.py runs/A runs/B                       two runs in the same charts
    python replay.py results/NAME trajectories.jsonl demonstrations.json
    python replay.py runs/A --export page.html           one file that opens from disk
    python replay.py runs/A --text --failures            in the terminal
    python replay.py runs/A --text --trajectory s000003-t0001-k00
    python replay.py runs/A --api-base http://127.0.0.1:8000 --api-model NAME
                                                         play live with this model

Exit codes: 0 done, 1 a failure at run time, 2 misuse (one line).

Read next: viewer/trajectories.py, then viewer/server.py. Lesson: tutorials/11_reading_a_run.md.
"""

import argparse
import contextlib
import os
import secrets
import shutil
import socket
import sys
import textwrap
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from envs.http import key_in
from run.errors import print_error
from viewer.overview import overview, summarize_failures
from viewer.sources import NoSource, Source, open_source
from viewer.trajectories import outcome_of, trajectory_view

PROG = "replay.py"
PORT = 8610
MAX_ROWS = 40  # trajectories in a list in the terminal
MAX_EXAMPLE = 100  # characters of a text in an overview


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(PROG, description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        help="folders of runs or evaluations, or trajectory files; if not given, the newest run",
    )
    parser.add_argument("--port", type=int, default=PORT, help="port of the page; 0: any free port")
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the page to this file")
    parser.add_argument(
        "--limit", type=int, help="with --export: only the newest LIMIT trajectories of each path"
    )
    parser.add_argument("--text", action="store_true", help="print to the terminal, without a page")
    parser.add_argument("--trajectory", metavar="ID", help="with --text: print this trajectory")
    parser.add_argument(
        "--failures", action="store_true", help="with --text: list only failed episodes"
    )
    parser.add_argument(
        "--file", metavar="NAME", help="with --text: file to read; if not given, the newest"
    )
    parser.add_argument("--api-base", help="URL of a chat server whose model can play live")
    parser.add_argument("--api-model", help="model name to send to that server")
    parser.add_argument("--api-key-env", help="environment variable that holds the server's key")
    options = parser.parse_args(argv)
    if bool(options.api_base) != bool(options.api_model):
        parser.error("give --api-base and --api-model together")
    if options.api_key_env and not os.environ.get(options.api_key_env):
        parser.error(f"--api-key-env {options.api_key_env}: this variable is not set")
    return options


def open_sources(paths: Sequence[Path]) -> list[Source]:
    """The sources at these paths, by default the newest run. Raises: NoSource if a path holds
    nothing to show."""
    if not paths:
        runs = [path for path in Path("runs").glob("*/config.json") if path.is_file()]
        if not runs:
            raise NoSource("there is no run in runs/; name one: python replay.py runs/NAME")
        paths = [max(runs, key=lambda path: path.stat().st_mtime).parent]
    return [open_source(number, path) for number, path in enumerate(paths)]


def serve(sources: list[Source], options: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C. Raises: NoSource if --api-base is wrong or the port is in
    use."""
    import uvicorn

    from viewer.play import Environments, Play
    from viewer.server import create_app

    model = None
    try:
        if options.api_base:
            from sampling.chatapi import ChatApi  # imports torch, which takes seconds

            key = key_in(options.api_key_env)
            model = ChatApi(options.api_base, options.api_model, key)
        listener = socket.create_server(("127.0.0.1", options.port))
    except ValueError as error:
        raise NoSource(str(error)) from None
    except (OSError, OverflowError) as error:
        raise NoSource(f"--port {options.port}: {error}; --port 0 uses a free one") from None
    token = secrets.token_hex(16)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/?token={token}"
    with contextlib.closing(Environments()) as environments:
        app = create_app(sources, token, Play(environments, Path("runs"), model))
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=2
        )
        names = ", ".join(source.name for source in sources)  # folders can come from strangers
        print(escape_controls(f"{names}: {url}  (stop with Ctrl-C)"), flush=True)
        # Without a screen, a text browser would take over the terminal.
        has_screen = sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
        if has_screen and not options.no_browser:
            webbrowser.open(url)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


# ------------------------------------------------------------------------------------ the terminal


def print_text(sources: Sequence[Source], options: argparse.Namespace) -> None:
    """Print the overview and a list, or one trajectory. Raises: NoSource if a file or trajectory
    does not exist."""
    for source in sources:
        names = [file.name for file in source.files()]
        if options.file and options.file not in names:
            raise NoSource(f"{source.path} has no {options.file}; it has {', '.join(names[-5:])}")
        if options.trajectory:
            file, line = find(source, options.trajectory, options.file)
            print(escape_controls(trajectory_text(source, file, line)))
            continue
        name = options.file or (names[-1] if names else None)
        print(escape_controls(overview_text(source, name)))
        if name:
            print(escape_controls(f"\n{list_text(source, name, options.failures)}"))


def escape_controls(text: str) -> str:
    """Make control characters visible. Otherwise a model's text could move the cursor, rename the
    window, or make the terminal send input.

    >>> escape_controls("a\\x1b[31mb\\u202ec\\nd")
    'a⟨U+001B⟩[31mb⟨U+202E⟩c\\nd'
    """
    return "".join(c if c in "\n\t" or c.isprintable() else f"⟨U+{ord(c):04X}⟩" for c in text)


def overview_text(source: Source, name: str | None) -> str:
    """The state of the run, and a summary of the failures in the file `name`."""
    summary = overview(source)
    lines = [f"{source.name}: {summary['env'] or 'unknown'}, {summary['model'] or 'model unknown'}"]
    lines += [f"  {sentence}" for sentence in summary["headline"]]
    if name is None:
        return "\n".join([*lines, "  no trajectories yet"])
    failures = summarize_failures(source.lines(name))
    lines += ["", f"{name}: {failures['failures']} of {failures['episodes']} episodes failed"]
    titles = {
        "stops": "stopped by",
        "observations": "last observation",
        "repeated": "repeated action",
    }
    for key, title in titles.items():
        lines += [f"  {title}:"] if failures[key] else []
        for entry in failures[key]:
            lines.append(
                f"    {entry['count']:4d}  {' '.join(entry['text'].split())[:MAX_EXAMPLE]}"
            )
    return "\n".join(lines)


def list_text(source: Source, name: str, only_failures: bool) -> str:
    """The trajectories of a file, one per line."""
    index = source.lines(name)
    rows, broken = index.rows, f", {index.broken} unreadable" if index.broken else ""
    selection = [row for row in rows if outcome_of(row) == "failed" or not only_failures]
    lines = [
        f"{name}: {len(selection)} of {len(rows)} trajectories{broken}",
        f"{'id':22} {'task':20} {'sub-task':16} {'ended':12} {'return':>6} {'turns':>5}",
    ]
    for row in selection[:MAX_ROWS]:
        score = "-" if row["return"] is None else f"{row['return']:.2f}"
        lines.append(
            f"{row['trajectory_id'] or '-':22.22} {row['task_id'] or '-':20.20} "
            f"{row['subtask'] or '-':16.16} {row['stop_reason'] or '-':12.12} "
            f"{score:>6} {row['num_turns']:5d}"
        )
    if len(selection) > MAX_ROWS:
        lines.append(f"... and {len(selection) - MAX_ROWS} more; --trajectory ID prints one")
    return "\n".join(lines)


def trajectory_text(source: Source, name: str, number: int) -> str:
    """One trajectory, turn by turn."""
    view = trajectory_view(source, name, number)
    row = view["row"]
    lines = [
        f"{row['trajectory_id']}  {row['task_id']}  {row['subtask'] or ''}  {outcome_of(row)}"
        f"  return {row['return']}  stopped by {row['stop_reason']}"
    ]
    if row["error"]:
        lines.append(f"lost: {row['error']}")
    lines += block("observation", view["opening"][-1]["content"] if view["opening"] else "")
    for turn_number, turn in enumerate(view["turns"], start=1):
        label = {"plan": "plan", "reflect": "reflection"}.get(turn["kind"], "action")
        lines += block(f"{label} {turn_number}", turn["action_text"])
        if turn["advice"]:
            lines += block("oracle", turn["advice"])
        reward = f" ({turn['reward']:+.2f})" if turn["reward"] else ""
        lines += block(f"observation{reward}", turn["observation_text"])
    return "\n".join(lines)


def block(title: str, text: str) -> list[str]:
    """Wrapped text with a title to its left."""
    width = max(40, min(100, shutil.get_terminal_size().columns) - 22)
    pieces = [p for line in text.split("\n") for p in textwrap.wrap(line, width) or [""]]
    return [f"{title if i == 0 else '':>20}  {piece}" for i, piece in enumerate(pieces)]


def find(source: Source, trajectory_id: str, file_name: str | None = None) -> tuple[str, int]:
    """(file, line) of a trajectory, in `file_name` or else in the newest file that has it. An
    evaluation uses the same ids as the training step before it.

    Raises: NoSource if there is none; the message lists similar ids.
    """
    similar: list[str] = []
    for file in reversed(source.files()):
        if file_name in (None, file.name):
            ids = [str(row["trajectory_id"]) for row in source.lines(file.name).rows]
            if trajectory_id in ids:
                return file.name, ids.index(trajectory_id)
            similar += [i for i in ids if i.startswith(trajectory_id.rpartition("-")[0])]
    raise NoSource(f"no trajectory {trajectory_id}; similar: {', '.join(similar[:3]) or 'none'}")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    try:
        sources = open_sources(options.paths)
        if options.text:
            print_text(sources, options)
        elif options.export:
            from viewer.export import export

            size = export(sources, options.export, options.limit)
            print(f"wrote {options.export} ({size / 1e6:.1f} MB); open it in a browser")
        else:
            serve(sources, options)
    except NoSource as error:
        print_error(PROG, escape_controls(str(error)))
        return 2
    except BrokenPipeError:  # | head
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    except (OSError, RecursionError) as error:
        print_error(PROG, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
