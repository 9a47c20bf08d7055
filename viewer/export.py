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

from run.files import aside
from viewer.overview import differing, overview, what_goes_wrong
from viewer.server import PAGE, as_json, describe
from viewer.sources import NoSource, Source
from viewer.trajectories import Filter, groups_of, list_rows, trajectory_view

POLICY = (
    "default-src 'none'; script-src 'sha256-{hash}'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
IMPORT = re.compile(r'^import\s+(\{[^}]*\}|\w+)\s+from\s+"(\./[^"]+|\.\./[^"]+)";?$', re.MULTILINE)
EXPORTED = re.compile(r"^export (?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)
EXPORT_LIST = re.compile(r"^export \{([^}]*)\};?$", re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


def export(sources: Sequence[Source], out: Path, limit: int | None, max_megabytes: int) -> int:
    """Write the file, with the newest `limit` trajectories of each source; returns its bytes.

    Raises: NoSource if there is no `limit` and the file would be larger than `max_megabytes`;
        nothing is written then.
    """
    if limit is not None:
        for source in sources:
            keep_newest(source, limit)
    before, after = page_around()
    with aside(out) as new, open(new, "w", encoding="ascii") as file:
        size = file.write(before)
        separator = "{"
        for path, answer in answers(sources):
            text = f"{separator}{as_json(path)}:{as_json(answer)}".replace("<", "\\u003c")
            size += file.write(text)
            separator = ",\n"
            if limit is None and size > max_megabytes * 1_000_000:
                raise NoSource(
                    f"the export would be larger than {max_megabytes} MB; give --limit N for the "
                    "N newest trajectories"
                )
        size += file.write("}" + after)
    return size


def keep_newest(source: Source, limit: int) -> None:
    """Drop all but the newest trajectories from the source's indices; groups stay whole."""
    for file in reversed(source.files()):
        lines, kept = source.lines(file.name), []
        for group in groups_of(lines):
            if limit > 0:
                kept += [row["line"] for row in group["rows"]]
                limit -= len(group["rows"])
        lines.keep(sorted(kept))


# -------------------------------------------------------------------------------------- the data


def answers(sources: Sequence[Source]) -> Iterator[tuple[str, Any]]:
    """(path, answer) of all that the page asks for."""
    described = [describe(source) for source in sources]
    for about, source in zip(described, sources, strict=True):
        about["files"] = [
            file | {"count": count}
            for file in about["files"]
            if (count := len(source.lines(file["name"])))
        ]
    differences = differing(sources) if len(sources) > 1 else {}
    first = {"version": 1, "live": False, "can_play": False}
    yield "sources", first | {"sources": described, "differing": differences}
    for source, about in zip(sources, described, strict=True):
        yield f"overview/{source.number}", overview(source)
        for file in about["files"]:
            yield from answers_of_file(source, file["name"])


def answers_of_file(source: Source, name: str) -> Iterator[tuple[str, Any]]:
    lines, where = source.lines(name), f"{source.number}/{quote(name, safe='')}"
    yield f"list/{where}", list_rows(lines, Filter(), limit=len(lines))
    yield f"groups/{where}", {"groups": groups_of(lines)}
    yield f"wrong/{where}", what_goes_wrong(lines)
    for number in range(len(lines)):
        view = trajectory_view(source, name, number) | {"can_reenact": False}
        yield f"trajectory/{where}/{number}", view


# -------------------------------------------------------------------------------------- the page


def page_around() -> tuple[str, str]:
    """The page before the data and after it, in ASCII."""
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    script = bundle("app.js")
    digest = base64.b64encode(hashlib.sha256(script.encode("ascii")).digest()).decode()
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(hash=digest)}">'
    html = html.replace("<head>", f"<head>\n{policy}", 1)
    html = re.sub(
        r'\s*<link rel="stylesheet" href="page/([^"]+)">',
        lambda link: f"\n<style>\n{(PAGE / link[1]).read_text(encoding='utf-8')}</style>",
        html,
    )
    html = html.replace('<script type="module" src="page/app.js"></script>', "", 1)
    before, _, after = html.encode("ascii", "xmlcharrefreplace").decode().partition("</body>")
    before += '<script type="application/json" id="replay-data">'
    return before, f"</script>\n<script>{script}</script>\n</body>{after}"


def bundle(entry: str) -> str:
    """One ASCII script of a module and all that it imports, each module in a function of its own.

    It knows the forms of import and export that the page's modules use.
    Raises: RuntimeError if a module uses another form.
    """
    done: dict[str, str] = {}

    def visit(name: str) -> None:
        source = (PAGE / name).read_text(encoding="utf-8")
        for match in IMPORT.finditer(source):
            if (needed := module_name(name, match[2])) not in done:
                visit(needed)
        done[name] = wrap_module(name, source)

    visit(entry)
    text = '"use strict";\nconst MODULES = {};\n' + "\n".join(done.values())
    if "</script" in text.lower():
        raise RuntimeError("a module of the page contains </script")
    return re.sub(r"[^\x00-\x7f]", javascript_escape, text)


def module_name(importer: str, relative: str) -> str:
    path = (PAGE / importer).parent / relative
    return path.resolve().relative_to(PAGE.resolve()).as_posix()


def wrap_module(name: str, source: str) -> str:
    """A module as a function that returns what it exports."""
    code = COMMENT.sub("", source)  # an `export` in a comment is not one
    exports = {exported: exported for exported in EXPORTED.findall(code)}
    for match in EXPORT_LIST.finditer(code):
        for part in match[1].split(","):
            inner, _, outer = part.strip().partition(" as ")
            exports[outer or inner] = inner

    def bind(match: re.Match[str]) -> str:
        module = f"MODULES[{as_json(module_name(name, match[2]))}]"
        if match[1].startswith("{"):
            names = re.sub(r"\bas\b", ":", match[1])
            return f"const {names} = {module};"
        return f"const {match[1]} = {module}.default;"

    body = EXPORT_LIST.sub("", IMPORT.sub(bind, source))
    body = re.sub(r"^export (?=async |function|class|const|let)", "", body, flags=re.MULTILINE)
    if re.search(r"^(import|export)\b", body, re.MULTILINE):
        raise RuntimeError(f"page/{name} imports or exports in a form that export.py does not know")
    returned = ", ".join(f"{as_json(outer)}: {inner}" for outer, inner in exports.items())
    return f"MODULES[{as_json(name)}] = (() => {{\n{body}\nreturn {{ {returned} }};\n}})();"


def javascript_escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
