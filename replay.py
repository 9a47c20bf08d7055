"""Look at what the agent did: curves, trajectories turn by turn, and what goes wrong, in a browser.

    runs/NAME, an evaluation, a file ──> viewer/sources.py ──> viewer/server.py ──> viewer/page/
                                                          └──> viewer/export.py ──> one .html file
                                                          └──> viewer/text.py ────> the terminal

Everything is only read, and a run that is still training is shown as it grows. The page is served
to this machine alone and loads nothing from elsewhere; from another machine:
ssh -L 8610:127.0.0.1:8610 HOST.

How to run:

    python replay.py                                     the newest run in runs/
    python replay.py runs/A runs/B                       two runs in the same charts
    python replay.py results/NAME trajectories.jsonl demonstrations.json
    python replay.py runs/A --export page.html           one file that opens from disk
    python replay.py runs/A --text --failures            in the terminal
    python replay.py runs/A --text --trajectory s000003-t0001-k00
    python replay.py runs/A --api-base http://127.0.0.1:8000 --api-model NAME
                                                         lets a model act in live play

Exit codes: 0 done, 1 a failure at run time, 2 misuse (one line).

Read next: viewer/trajectories.py, then viewer/server.py. Lesson: tutorials/11_reading_a_run.md.
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
MAX_MEGABYTES = 200  # of an export without --limit


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(PROG, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="runs, evaluations, trajectory files")
    parser.add_argument("--port", type=int, default=PORT, help="of the page; 0 takes a free one")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write one .html file instead")
    parser.add_argument("--limit", type=int, help="trajectories in the export, the newest ones")
    parser.add_argument("--text", action="store_true", help="print to the terminal instead")
    parser.add_argument("--trajectory", metavar="ID", help="with --text: this one, turn by turn")
    parser.add_argument("--failures", action="store_true", help="with --text: list what failed")
    parser.add_argument("--file", metavar="NAME", help="with --text: e.g. step_000003 (the newest)")
    parser.add_argument("--api-base", help="chat server of a model that may act in live play")
    parser.add_argument("--api-model", help="the model's name there")
    parser.add_argument("--api-key-env", help="environment variable that holds its key")
    options = parser.parse_args(argv)
    if bool(options.api_base) != bool(options.api_model):
        parser.error("--api-base and --api-model go together")
    if options.api_key_env and not os.environ.get(options.api_key_env):
        parser.error(f"--api-key-env {options.api_key_env}: this variable is not set")
    return options


def open_sources(paths: Sequence[Path]) -> list[Source]:
    """Raises: NoSource if one of them holds nothing to look at."""
    if not paths:
        runs = sorted(Path("runs").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
        if not runs:
            raise NoSource("there is no run in runs/; name one: python replay.py runs/NAME")
        paths = [runs[-1].parent]
    return [open_source(number, path) for number, path in enumerate(paths)]


def print_text(sources: Sequence[Source], options: argparse.Namespace) -> None:
    """Raises: NoSource if a file or trajectory is not there."""
    from viewer import text

    for source in sources:
        names = [file.name for file in source.files()]
        if options.file and options.file not in names:
            raise NoSource(f"{source.path} has no {options.file}; it has {', '.join(names[-5:])}")
        if options.trajectory:
            try:
                file, line = text.find(source, options.trajectory, options.file)
            except LookupError as error:
                raise NoSource(str(error)) from None
            print(text.trajectory_text(source, file, line))
            continue
        name = options.file or (names[-1] if names else None)
        print(text.overview_text(source, name))
        if name:
            print(f"\n{text.list_text(source, name, options.failures)}")


def serve(sources: list[Source], options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    import uvicorn

    from viewer.play import Environments, Play
    from viewer.server import create_app

    try:
        listener = socket.create_server(("127.0.0.1", options.port))
    except (OSError, OverflowError) as error:
        complain(PROG, f"--port {options.port}: {error}; --port 0 takes a free one")
        return 2
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    with contextlib.closing(Environments()) as environments:
        app = create_app(sources, Play(environments, Path("runs"), chat_model(options)))
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=2
        )
        names = ", ".join(source.name for source in sources)
        print(f"{names}: {url}  (Ctrl-C ends it)", flush=True)
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


def chat_model(options: argparse.Namespace) -> ChatApi | None:
    """The chat server's model, if one was named."""
    if not options.api_base:
        return None
    from sampling.chatapi import ChatApi

    key = os.environ.get(options.api_key_env or "")
    try:
        return ChatApi(options.api_base, options.api_model, key)
    except ValueError as error:
        raise NoSource(str(error)) from None


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    try:
        sources = open_sources(options.paths)
        if options.text:
            print_text(sources, options)
        elif options.export:
            from viewer.export import export

            size = export(sources, options.export, options.limit, MAX_MEGABYTES)
            print(f"wrote {options.export} ({size / 1e6:.1f} MB); open it in a browser")
        else:
            return serve(sources, options)
    except NoSource as error:
        complain(PROG, error)
        return 2
    except BrokenPipeError:  # | head
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    except OSError as error:
        complain(PROG, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
