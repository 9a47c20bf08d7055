"""Look at what the agent did: curves, trajectories turn by turn, and what goes wrong, in a browser.

    runs/NAME, an evaluation, a file ──> viewer/sources.py ──> viewer/server.py ──> viewer/page/
                                                          └──> viewer/export.py ──> one .html file
                                                          └──> viewer/text.py ────> the terminal

Everything is only read; a run that is still training is shown as it grows. The page is served to
this machine alone and asks nothing of any other; from afar: ssh -L 8610:127.0.0.1:8610 HOST.

How to run:

    python replay.py                                     the newest run in runs/
    python replay.py runs/A runs/B                       two runs in the same charts
    python replay.py results/NAME trajectories.jsonl demonstrations.json
    python replay.py runs/A --export page.html           one file that opens from disk, to be sent
    python replay.py runs/A --text --failures            in the terminal
    python replay.py runs/A --text --trajectory s000003-t0001-k00
    python replay.py runs/A --api-base http://127.0.0.1:8000 --api-model NAME
                                                         a model may move in live play

Exit codes: 0 done, 1 a failure at run time, 2 misuse (one line).

Read next: viewer/lines.py, then viewer/server.py. Lesson: tutorials/11_reading_a_run.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from run.errors import complain
from viewer.sources import NoSource, Source, open_source

if TYPE_CHECKING:
    from sampling.chatapi import ChatApi

PROG = "replay.py"
PORT = 8610
MOST_MEGABYTES = 200  # of an export without --limit


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(PROG, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="runs, evaluations, trajectory files")
    parser.add_argument("--port", type=int, default=PORT, help="of the page; 0 takes a free one")
    parser.add_argument("--no-browser", action="store_true", help="print the address and no more")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write one .html file instead")
    parser.add_argument(
        "--limit", type=int, help="trajectories in the export, the newest (without it: all)"
    )
    parser.add_argument("--text", action="store_true", help="print to the terminal instead")
    parser.add_argument("--trajectory", metavar="ID", help="with --text: this one, turn by turn")
    parser.add_argument("--failures", action="store_true", help="with --text: list what failed")
    parser.add_argument("--file", metavar="NAME", help="with --text: as step_000003 (the newest)")
    parser.add_argument("--api-base", help="chat server of a model that may move in live play")
    parser.add_argument("--api-model", help="the model's name there")
    parser.add_argument("--api-key-env", help="environment variable that holds its key")
    options = parser.parse_args(argv)
    if not options.text and (options.trajectory or options.failures or options.file):
        parser.error("--trajectory, --failures and --file go with --text")
    if options.text and options.export:
        parser.error("--text prints and --export writes a page: give one of them")
    if options.limit is not None and not options.export:
        parser.error("--limit goes with --export")
    if bool(options.api_base) != bool(options.api_model):
        parser.error("--api-base and --api-model go together")
    if options.api_key_env and not os.environ.get(options.api_key_env):
        parser.error(
            f"--api-key-env {options.api_key_env}: there is no such variable, or it is empty"
        )
    return options


def open_sources(paths: Sequence[Path]) -> list[Source]:
    """Raises: NoSource: one of them holds nothing to look at."""
    if not paths:
        runs = sorted(Path("runs").glob("*/config.json"), key=lambda p: p.stat().st_mtime)
        if not runs:
            raise NoSource("there is no run in runs/; name one: python replay.py runs/NAME")
        paths = [runs[-1].parent]
    return [open_source(number, path) for number, path in enumerate(paths)]


def print_text(sources: Sequence[Source], options: argparse.Namespace) -> None:
    """Raises: NoSource: what was asked for is not there."""
    from viewer import text

    for source in sources:
        names = [file.name for file in source.files()]
        if options.file and options.file not in names:
            raise NoSource(f"{source.path} has no {options.file}; it has {', '.join(names[-5:])}")
        if options.trajectory:
            try:
                found = text.find(source, options.trajectory, options.file)
                print(text.trajectory_text(source, *found))
            except LookupError as error:
                raise NoSource(str(error)) from None
            continue
        name = options.file or (names[-1] if names else None)
        print(text.overview_text(source, name))
        if name:
            print()
            print(text.list_text(source, name, options.failures))


def serve(sources: Sequence[Source], options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    import uvicorn

    from viewer.play import Play, Worlds
    from viewer.server import create_app

    try:
        listener = socket.create_server(("127.0.0.1", options.port))
    except (OSError, OverflowError) as error:
        complain(PROG, f"--port {options.port}: {error}; --port 0 takes a free one")
        return 2
    port = listener.getsockname()[1]
    with contextlib.ExitStack() as stack:
        worlds = Worlds()
        stack.callback(worlds.close)
        play = Play(worlds, Path("runs"), model_of(options))
        app = create_app(list(sources), worlds, play)
        config = uvicorn.Config(app, log_level="warning", access_log=False, ws="none")
        config.timeout_graceful_shutdown = 2
        url = f"http://127.0.0.1:{port}/"
        print(
            f"{', '.join(source.name for source in sources)}: {url}  (Ctrl-C ends it)", flush=True
        )
        if not options.no_browser and has_screen():
            webbrowser.open(url)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
    return 0


def has_screen() -> bool:
    """Whether a browser would open a window; in a terminal it would take the terminal."""
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )


def model_of(options: argparse.Namespace) -> ChatApi | None:
    """The chat server's model, if one was named."""
    if not options.api_base:
        return None
    from sampling.chatapi import ChatApi

    try:
        return ChatApi(
            options.api_base, options.api_model, os.environ.get(options.api_key_env or "") or None
        )
    except ValueError as error:  # no address
        raise NoSource(str(error)) from None


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    try:
        sources = open_sources(options.paths)
        if options.text:
            print_text(sources, options)
            return 0
        if options.export:
            from viewer.export import export

            size = export(sources, options.export, options.limit, MOST_MEGABYTES)
            print(f"wrote {options.export} ({size / 1e6:.1f} MB); open it in a browser")
            return 0
        return serve(sources, options)
    except NoSource as error:
        complain(PROG, error)
        return 2
    except BrokenPipeError:  # | head
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0
    except OSError as error:
        complain(PROG, error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
