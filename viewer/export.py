"""The page and its data in one file, to be opened from disk or sent to a colleague.

Every answer that the page would ask a server for is computed beforehand and put into the file as
JSON, by path. A page that is opened from disk cannot load modules, so they become one script, and
the Content-Security-Policy allows only that script, by its hash: no text from a model or an
environment can run, and the page asks nobody for anything.

Read next: page/data.js, which answers from the inlined data.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from run.files import atomic_path
from viewer.overview import overview, what_goes_wrong
from viewer.server import PAGE, as_json, describe
from viewer.sources import NoSource, Source
from viewer.trajectories import groups_of, trajectory_view

MAX_MEGABYTES = 200  # without a limit
POLICY = (
    "default-src 'none'; script-src 'sha256-{hash}'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
# The forms of import and export that the page's modules use; no two modules have the same name.
IMPORT = re.compile(r'^import (\{[^}]*\}) from "[^"]*?([^/"]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|class|const) (\w+))", re.MULTILINE)


def export(sources: Sequence[Source], out: Path, limit: int | None) -> int:
    """Write the file, with the newest `limit` trajectories of each source; returns its bytes.

    Raises: NoSource if there is no `limit` and the file would be too large; nothing is written.
    """
    if limit is not None:
        for source in sources:
            keep_newest(source, limit)
    before, after = page_around()
    with atomic_path(out) as new, open(new, "w", encoding="utf-8") as file:
        file.write(before)
        separator = "{"
        for path, answer in answers(sources):
            file.write(f"{separator}{as_json(path)}:{as_json(answer)}".replace("<", "\\u003c"))
            separator = ",\n"
            if limit is None and file.tell() > MAX_MEGABYTES * 1_000_000:
                raise NoSource(
                    f"the export would be larger than {MAX_MEGABYTES} MB; give --limit N for the "
                    "N newest trajectories"
                )
        file.write("}" + after)
    return out.stat().st_size


def keep_newest(source: Source, limit: int) -> None:
    """Drop all but the newest trajectories from the source's indices; groups stay whole."""
    for file in reversed(source.files()):
        lines, kept = source.lines(file.name), []
        for group in groups_of(lines):
            if limit > 0:
                kept += [row["line"] for row in group["rows"]]
                limit -= len(group["rows"])
        lines.keep(sorted(kept))


def answers(sources: Sequence[Source]) -> Iterator[tuple[str, Any]]:
    """(path, answer) of all that the page asks for."""
    about = describe(sources, can_play=False) | {"live": False}
    for described, source in zip(about["sources"], sources, strict=True):
        counts = {file["name"]: len(source.lines(file["name"])) for file in described["files"]}
        files = [file | {"count": counts[file["name"]]} for file in described["files"]]
        described["files"] = [file for file in files if file["count"]]
    yield "sources", about
    for described, source in zip(about["sources"], sources, strict=True):
        yield f"overview/{source.number}", overview(source)
        for file in described["files"]:
            yield from answers_of_file(source, file["name"])


def answers_of_file(source: Source, name: str) -> Iterator[tuple[str, Any]]:
    lines, where = source.lines(name), f"{source.number}/{quote(name, safe='')}"
    yield f"list/{where}", {"rows": lines.rows}
    yield f"groups/{where}", {"groups": groups_of(lines)}
    yield f"wrong/{where}", what_goes_wrong(lines)
    for number in range(len(lines)):
        view = trajectory_view(source, name, number) | {"can_reenact": False}
        yield f"trajectory/{where}/{number}", view


def page_around() -> tuple[str, str]:
    """The page before the data and after it."""
    script = bundle("app.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(hash=digest)}">'
    html = read("index.html").replace("<head>", f"<head>\n{policy}")
    html = re.sub(
        r'<link rel="stylesheet" href="page/([^"]+)">',
        lambda link: f"<style>\n{read(link[1])}</style>",
        html,
    )
    html = re.sub(r"<script.*</script>\n", "", html)
    before, _, after = html.partition("</body>")
    before += '<script type="application/json" id="replay-data">'
    return before, f"</script>\n<script>{script}</script>\n</body>{after}"


def read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def bundle(entry: str) -> str:
    """One script of uPlot, a module and all that it imports, each in a function of its own that
    returns what it exports."""
    done: dict[str, str] = {}

    def add(path: Path) -> None:
        source = path.read_text(encoding="utf-8")
        for needed in re.findall(r'^import .* from "([^"]+)";$', source, re.MULTILINE):
            if Path(needed).name not in done:
                add(path.parent / needed)
        exported = ", ".join(EXPORT.findall(source))
        body = EXPORT.sub("", IMPORT.sub(r'const \1 = MODULES["\2"];', source))
        done[path.name] = (
            f'MODULES["{path.name}"] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();'
        )

    add(PAGE / entry)
    return "\n".join([read("vendor/uPlot.iife.min.js"), "const MODULES = {};", *done.values()])
