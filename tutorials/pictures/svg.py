"""A sheet to draw on, as SVG text: the same bytes for the same calls, readable by day and by night.

A page shows a picture by its address, so the picture cannot take the page's colours. It brings a
background of its own, and two sets of colours, between which the reader's system chooses
(`prefers-color-scheme`). What is drawn names a role ("action", "soft"), never a colour. Lengths are
in pixels, y points down; texts are placed for fonts as wide as DejaVu: narrower ones leave space.
"""

from collections.abc import Sequence
from html import escape

PROSE = "system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
CHAR = 0.6  # width of a monospaced character, as a share of its size

# Role -> (fill, line, ink of what stands on it), by day and by night. Orange is what the policy
# wrote, blue what the world said, also for who cannot tell red from green.
DAY = {
    "sheet": ("#ffffff", "#d0d7de", "#1f2328"),
    "prompt": ("#eef0f2", "#b6bdc5", "#57606a"),
    "action": ("#ffd9a8", "#b8610e", "#3d2000"),
    "observation": ("#d3e5fa", "#2f6fb5", "#0b2f57"),
    "box": ("#f6f8fa", "#8a8f98", "#1f2328"),
    "faint": ("#ffffff", "#d0d7de", "#8a8f98"),
    "good": ("#3a8f5c", "#3a8f5c", "#2c7248"),
    "bad": ("#b0413e", "#b0413e", "#a03734"),
    "soft": ("#57606a", "#8a8f98", "#57606a"),
}
NIGHT = {
    "sheet": ("#0d1117", "#30363d", "#e6edf3"),
    "prompt": ("#21262d", "#59616b", "#aab3bd"),
    "action": ("#7a4509", "#f0a04b", "#ffe8cc"),
    "observation": ("#123a66", "#6aaaf0", "#d6e8ff"),
    "box": ("#161b22", "#7d8590", "#e6edf3"),
    "faint": ("#0d1117", "#30363d", "#7d8590"),
    "good": ("#4fb37a", "#4fb37a", "#63c78d"),
    "bad": ("#f47067", "#f47067", "#f58a82"),
    "soft": ("#9198a1", "#7d8590", "#9198a1"),
}


class Sheet:
    """Draw with its methods, then take `text()`.

    Args:
        width, height: pixels.
        title: one sentence, for who cannot see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []
        self.box(0.5, 0.5, width - 1, height - 1, "sheet", radius=8)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        role: str,
        radius: float = 3,
        dashed: bool = False,
    ) -> None:
        """A rectangle; (x, y) is its upper left corner."""
        dash = ' stroke-dasharray="3 3"' if dashed else ""
        self._parts.append(
            f'<rect class="{role}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" '
            f'height="{_n(height)}" rx="{_n(radius)}"{dash}/>'
        )

    def write(
        self,
        x: float,
        y: float,
        words: str,
        role: str = "sheet",
        size: float = 12,
        anchor: str = "start",
        mono: bool = False,
        bold: bool = False,
    ) -> None:
        """One line of text, its base line at y; anchor: start, middle or end is at x."""
        classes = " ".join(["t", role, *["m"] * mono, *["b"] * bold])
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(
            f'<text class="{classes}" x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"{place}>'
            f"{escape(words, quote=False)}</text>"
        )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        role: str = "soft",
        width: float = 1.4,
        arrow: bool = False,
        dashed: bool = False,
    ) -> None:
        """Straight from point to point; with `arrow`, a head at the last one."""
        self._path(
            "M" + " L".join(f"{_n(x)} {_n(y)}" for x, y in points), role, width, arrow, dashed
        )

    def arc(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        height: float,
        role: str = "soft",
    ) -> None:
        """A bent arrow from start to end that rises by about `height`."""
        (x0, y0), (x1, y1) = start, end
        top = min(y0, y1) - height * 4 / 3
        path = f"M{_n(x0)} {_n(y0)} C{_n(x0)} {_n(top)} {_n(x1)} {_n(top)} {_n(x1)} {_n(y1)}"
        self._path(path, role, 1.4, arrow=True, dashed=False)

    def _path(self, path: str, role: str, width: float, arrow: bool, dashed: bool) -> None:
        head = f' marker-end="url(#head-{role})"' if arrow else ""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<path class="l {role}" d="{path}" stroke-width="{_n(width)}"{dash}{head}/>'
        )

    def text(self) -> str:
        """The whole file."""
        drawn = "\n".join(self._parts)
        heads = "".join(
            f'<marker id="head-{role}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" '
            'markerHeight="9" markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
            f'<path class="h {role}" d="M0 0.5 L8 4 L0 7.5 Z"/></marker>'
            for role in DAY
            if f"#head-{role})" in drawn
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(self.width)} '
            f'{_n(self.height)}" width="{_n(self.width)}" height="{_n(self.height)}" role="img">\n'
            f"<title>{escape(self.title, quote=False)}</title>\n<style>\n"
            f".t{{font-family:{PROSE};stroke:none}}\n"
            f".m{{font-family:{MONO}}}\n"
            ".b{font-weight:600}\n.l{fill:none}\n"
            f"{_rules(DAY)}\n@media (prefers-color-scheme:dark){{\n{_rules(NIGHT)}\n}}\n"
            f"</style>\n<defs>{heads}</defs>\n{drawn}\n</svg>\n"
        )


def _rules(colours: dict[str, tuple[str, str, str]]) -> str:
    return "\n".join(
        f"rect.{role}{{fill:{fill};stroke:{line}}}.t.{role}{{fill:{ink}}}"
        f".l.{role}{{stroke:{line}}}.h.{role}{{fill:{line}}}"
        for role, (fill, line, ink) in colours.items()
    )


def _n(number: float) -> str:
    """Short, and without a sign on zero."""
    return f"{round(number, 1) + 0.0:g}"
