"""Export: the page and its data in one file that opens from disk, e.g. to send to a colleague.

The file holds every response that the page would fetch from the server, as JSON keyed by request
path. A page opened from disk cannot load modules, so all modules are joined into one script. The
Content-Security-Policy allows only that script, by its hash. So no text from a model or an
environment can run, and the page cannot send requests.

Read next: page/data.js, which reads the answers from the file.
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
from viewer.overview import overview
from viewer.server import FILE_VIEWS, PAGE, as_json, describe
from viewer.sources import NoSource, Source
from viewer.trajectories import groups_of, trajectory_view

MAX_MEGABYTES = 200  # larger exports need --limit
POLICY = (
    "default-src 'none'; script-src 'sha256-{hash}'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
# The page's modules use only these forms of import and export. All module names differ.
IMPORT = re.compile(r'^import (\{[^}]*\}) from "[^"]*?([^/"]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|class|const) (\w+))", re.MULTILINE)


def export(sources: Sequence[Source], out: Path, limit: int | None) -> int:
    """Write the file with the newest `limit` trajectories of each source; returns its size in
    bytes.

    Raises: NoSource if the file would be too large and `limit` is None; nothing is written.
    """
    if limit is not None:
        for source in sources:
            keep_newest(source, limit)
    page_start, page_end = split_page()
    with atomic_path(out) as new, open(new, "w", encoding="utf-8") as file:
        file.write(page_start)
        separator = "{"
        for path, answer in answers(sources):
            file.write(f"{separator}{as_json(path)}:{as_json(answer)}".replace("<", "\\u003c"))
            separator = ",\n"
            if limit is None and file.tell() > MAX_MEGABYTES * 1_000_000:
                raise NoSource(
                    f"the export would be larger than {MAX_MEGABYTES} MB; give --limit N to export "
                    "only the N newest trajectories"
                )
        file.write("}" + page_end)
    return out.stat().st_size


def keep_newest(source: Source, limit: int) -> None:
    """Drop all but the newest trajectories from the source's indices, without splitting groups."""
    for file in reversed(source.files()):
        lines, numbers = source.lines(file.name), []
        for group in reversed(groups_of(lines)):  # the newest are at the end
            if limit > 0:
                numbers += [row["line"] for row in group["rows"]]
                limit -= len(group["rows"])
        lines.keep(sorted(numbers))


def answers(sources: Sequence[Source]) -> Iterator[tuple[str, Any]]:
    """(path, answer) for every request that the page can make."""
    site = describe(sources, can_play=False) | {"live": False}
    for source_info, source in zip(site["sources"], sources, strict=True):
        for file in source_info["files"]:
            file["count"] = len(source.lines(file["name"]))
        source_info["files"] = [file for file in source_info["files"] if file["count"]]
    yield "sources", site
    for source_info, source in zip(site["sources"], sources, strict=True):
        yield f"overview/{source.number}", overview(source)
        for file in source_info["files"]:
            yield from answers_of_file(source, file["name"])


def answers_of_file(source: Source, name: str) -> Iterator[tuple[str, Any]]:
    lines, path = source.lines(name), f"{source.number}/{quote(name, safe='')}"
    for kind, file_view in FILE_VIEWS.items():
        yield f"{kind}/{path}", file_view(lines)
    for number in range(len(lines)):
        view = trajectory_view(source, name, number) | {"can_reenact": False}
        yield f"trajectory/{path}/{number}", view


def split_page() -> tuple[str, str]:
    """The page's HTML before the data and after it."""
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
    page_start, _, page_end = html.partition("</body>")
    page_start += '<script type="application/json" id="replay-data">'
    return page_start, f"</script>\n<script>{script}</script>\n</body>{page_end}"


def read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def bundle(entry: str) -> str:
    """One script with uPlot, the module `entry` and everything that it imports. Each module becomes
    a function that returns the module's exports."""
    modules: dict[str, str] = {}

    def add(path: Path) -> None:
        source = path.read_text(encoding="utf-8")
        for imported in re.findall(r'^import .* from "([^"]+)";$', source, re.MULTILINE):
            if Path(imported).name not in modules:
                add(path.parent / imported)
        exports = ", ".join(EXPORT.findall(source))
        body = EXPORT.sub("", IMPORT.sub(r'const \1 = MODULES["\2"];', source))
        modules[path.name] = (
            f'MODULES["{path.name}"] = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();'
        )

    add(PAGE / entry)
    return "\n".join([read("vendor/uPlot.iife.min.js"), "const MODULES = {};", *modules.values()])
