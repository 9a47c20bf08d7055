"""The page and its data in one file, to be opened from disk or sent to a colleague.

What the page would ask a server for is computed beforehand and put into the file as JSON, path by
path. Its modules become one script, for a page that is opened from disk may load no module, and the
Content-Security-Policy names that one script by its hash: nothing that a model or a world wrote
could run, and nothing is asked of anybody.

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
from run.media import PATH, texts_changed
from viewer.overview import differing, overview
from viewer.server import PAGE, as_json, describe
from viewer.sources import NoSource, Source
from viewer.trajectories import Filter, groups_of, list_rows, one
from viewer.wrong import what_goes_wrong

ENTRY = "app.js"
POLICY = (
    "default-src 'none'; script-src 'sha256-{hash}'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
IMPORT = re.compile(r'^import\s+(\{[^}]*\}|\w+)\s+from\s+"(\./[^"]+|\.\./[^"]+)";?$', re.MULTILINE)
EXPORTED = re.compile(r"^export (?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
LIST = re.compile(r"^export \{([^}]*)\};?$", re.MULTILINE)

Kept = dict[str, list[int]]  # of a source: file -> its lines that the export holds


def export(sources: Sequence[Source], out: Path, limit: int | None, most_megabytes: int) -> int:
    """Write the file; returns its bytes.

    Raises: NoSource: it would be larger than `most_megabytes` and no `limit` was given; nothing is
        written then.
    """
    most = most_megabytes * 1_000_000 if limit is None else None
    kept = [newest(source, limit) for source in sources]
    size = 0
    with aside(out) as new, open(new, "w", encoding="ascii", errors="xmlcharrefreplace") as file:
        before, after = page_around()
        size += file.write(before)
        separator = "{"
        for path, answer in answers(sources, kept):
            text = f"{separator}{as_json(path)}:{as_json(answer)}".replace("<", "\\u003c")
            size += file.write(text)
            separator = ",\n"
            if most is not None and size > most:
                raise NoSource(
                    f"the export would be larger than {most_megabytes} MB; give --limit N for the "
                    "N newest trajectories"
                )
        size += file.write("}" + after)
    return size


def newest(source: Source, limit: int | None) -> Kept:
    """The lines that go in: whole groups, the newest files first; all without a limit."""
    kept: Kept = {}
    left = limit
    for file in reversed(source.files()):
        lines = source.lines(file.name)
        if left is None:
            kept[file.name] = list(range(len(lines)))
            continue
        for group in groups_of(lines):
            if left <= 0:
                break
            kept.setdefault(file.name, []).extend(row["line"] for row in group["rows"])
            left -= len(group["rows"])
    return {name: sorted(numbers) for name, numbers in kept.items()}


# ---------------------------------------------------------------------------------------- the data


def answers(sources: Sequence[Source], kept: Sequence[Kept]) -> Iterator[tuple[str, Any]]:
    """(path, answer) of all that the page asks for."""
    about = [describe(source) for source in sources]
    for one_source, lines in zip(about, kept, strict=True):
        held = [file for file in one_source["files"] if file["name"] in lines]
        one_source["files"] = [file | {"count": len(lines[file["name"]])} for file in held]
    several = differing(sources) if len(sources) > 1 else {}
    found = {"version": 1, "live": False, "can_play": False}
    yield "sources", found | {"sources": about, "differing": several}
    for source, lines in zip(sources, kept, strict=True):
        yield f"overview/{source.number}", overview(source)
        for name, numbers in lines.items():
            yield from of_file(source, name, numbers)


def of_file(source: Source, name: str, numbers: Sequence[int]) -> Iterator[tuple[str, Any]]:
    lines, where = source.lines(name), f"{source.number}/{quote(name, safe='')}"
    chosen = set(numbers)
    table = list_rows(lines, Filter(), limit=len(lines))
    table["rows"] = [row for row in table["rows"] if row["line"] in chosen]
    yield f"list/{where}", table | {"total": len(chosen), "matching": len(chosen)}
    groups = groups_of(lines)
    for group in groups:
        group["rows"] = [row for row in group["rows"] if row["line"] in chosen]
    yield f"groups/{where}", {"groups": [group for group in groups if group["rows"]]}
    wrong = what_goes_wrong(lines)
    for entry in (*wrong["observations"], *wrong["repeated"], *wrong["stops"]):
        entry["lines"] = [n for n in entry["lines"] if n in chosen]
    yield f"wrong/{where}", wrong
    folder = {file.name: file.path.parent for file in source.files()}[name]
    for place, number in enumerate(numbers):
        shown = one(source, name, number) | {"can_reenact": False}
        shown["group"] = [row for row in shown["group"] if row["line"] in chosen]
        shown["previous"] = numbers[place - 1] if place else None
        shown["next"] = numbers[place + 1] if place + 1 < len(numbers) else None
        yield f"trajectory/{where}/{number}", with_pictures(shown, folder)


def with_pictures(content: Any, folder: Path) -> Any:
    """States' pictures as data addresses."""

    def inlined(text: str) -> str:
        found = PATH.fullmatch(text)
        if not found or not (folder / text).is_file():
            return text
        encoded = base64.b64encode((folder / text).read_bytes()).decode()
        return f"data:image/{found[1].rpartition('.')[2]};base64,{encoded}"

    return texts_changed(content, inlined)


# ---------------------------------------------------------------------------------------- the page


def page_around() -> tuple[str, str]:
    """What stands before the data and after it."""
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    script = bundle(ENTRY)
    digest = base64.b64encode(hashlib.sha256(script.encode("ascii")).digest()).decode()
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(hash=digest)}">'
    html = html.replace("<head>", f"<head>\n{policy}", 1)
    html = re.sub(r'\s*<link rel="stylesheet" href="page/([^"]+)">', styled, html)
    html, count = re.subn(r'\s*<script type="module" src="page/app.js"></script>', "", html)
    if count != 1 or "</body>" not in html:
        raise RuntimeError("page/index.html has no place for its script")
    before, _, after = html.partition("</body>")
    data = '<script type="application/json" id="replay-data">'
    end = f"</script>\n<script>{script}</script>\n</body>{after}"
    return ascii_html(before) + data, end


def styled(link: re.Match[str]) -> str:
    return f"\n<style>\n{(PAGE / link[1]).read_text(encoding='utf-8')}</style>"


def ascii_html(text: str) -> str:
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def bundle(entry: str) -> str:
    """One classic script of a module and all that it imports, each in a function of its own.

    It knows the forms of import and export that the page's modules keep to: named ones, and the
    default of a vendored library.
    Raises: RuntimeError: a module has another form.
    """
    done: dict[str, str] = {}

    def visit(name: str) -> None:
        source = (PAGE / name).read_text(encoding="utf-8")
        for found in IMPORT.finditer(source):
            needed = resolved(name, found[2])
            if needed not in done:
                visit(needed)
        done[name] = wrapped(name, source)

    visit(entry)
    text = '"use strict";\nconst MODULES = {};\n' + "\n".join(done.values())
    if "</script" in text.lower():
        raise RuntimeError("a module of the page holds the end of a script")
    return re.sub(r"[^\x00-\x7f]", escaped, text)


def resolved(name: str, relative: str) -> str:
    path = (PAGE / name).parent / relative
    return path.resolve().relative_to(PAGE.resolve()).as_posix()


def wrapped(name: str, source: str) -> str:
    """A module as a function that returns what it exports."""
    spoken = COMMENT.sub("", source)  # what a comment exports is not there
    names = {exported: exported for exported in EXPORTED.findall(spoken)}
    for found in LIST.finditer(spoken):
        for part in found[1].split(","):
            inner, _, outer = part.strip().partition(" as ")
            names[outer or inner] = inner

    def bound(found: re.Match[str]) -> str:
        module = f"MODULES[{as_json(resolved(name, found[2]))}]"
        if found[1].startswith("{"):
            names_there = re.sub(r"\bas\b", ":", found[1])
            return f"const {names_there} = {module};"
        return f"const {found[1]} = {module}.default;"

    body = LIST.sub("", IMPORT.sub(bound, source))
    body = re.sub(r"^export (?=async |function|class|const|let)", "", body, flags=re.MULTILINE)
    if re.search(r"^(import|export)\b", body, re.MULTILINE):
        raise RuntimeError(f"page/{name} imports or exports in a form that export.py does not know")
    returned = ", ".join(f"{as_json(outer)}: {inner}" for outer, inner in names.items())
    return f"MODULES[{as_json(name)}] = (() => {{\n{body}\nreturn {{ {returned} }};\n}})();"


def escaped(found: re.Match[str]) -> str:
    """A letter beyond ASCII as JavaScript writes it in strings and patterns."""
    units = found[0].encode("utf-16-be").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
