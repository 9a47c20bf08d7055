"""The accessibility tree as text: what a policy reads of a web page.

A browser computes this tree for screen readers: a role, a name and a state for everything that has
a meaning, and nothing for boxes and styles. Chromium gives us the tree of the whole page and the
boxes of all elements. A line of the text is one node in the viewport, with tabs for the depth:

    heading 'Kettles'
    [4] searchbox 'Search products' value: 'kettle' focused: True
    [5] combobox 'Sort by' value: 'Price' options: 'Price' | 'Name'
    row
        [6] link 'Copper kettle'
        cell '24.99'

Numbers: Elements that one can act on are numbered from 1 in the order of the lines: those with a
    role such as link, the focusable ones, and those that listen to clicks. Chromium's own numbers
    differ between two sessions that show the same page; ours do not, so the same page gives the
    same text. Plain text has no number, which saves a fifth of the tokens.
Left out: nodes of which less than 60 % is inside the viewport, as in WebArena; unnamed nodes that
    only group others; text that is part of the name of the node around it, or that is the name of
    the field below it; lines beyond the limit, whose number is told; frames inside the page.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl, urlsplit

WIDTH, HEIGHT = 1280, 720  # of the viewport, in pixels
MIN_IN_VIEW = 0.6  # of a node's area
MAX_NAME = 1000  # characters of a name or value
MAX_OPTIONS = 20  # of a combobox
MAX_LINES = 200  # of a page
FIELDS = {"textbox", "searchbox", "spinbutton", "combobox", "slider", "Date", "DateTime"}
ACTIONABLE = FIELDS | {
    *("link", "button", "checkbox", "radio", "switch", "tab", "option", "listbox", "treeitem"),
    *("menuitem", "menuitemcheckbox", "menuitemradio", "DisclosureTriangle"),
}
GROUPS = {"table", "row", "article"}  # shown without a name: they tell what belongs together
NOISE = {"InlineTextBox", "LineBreak", "ListMarker", "RootWebArea", "none"}
CELLS = {"cell", "gridcell", "columnheader", "rowheader"}
STATES = ("checked", "selected", "expanded", "pressed", "disabled", "required", "focused")
SHOWN_WHEN_FALSE = ("checked", "expanded", "pressed")


Box = tuple[float, float, float, float]  # left, top, width, height in pixels of the viewport


@dataclass(frozen=True)
class Node:
    """One node of the accessibility tree of a whole page, also outside the viewport."""

    role: str  # "link", "button", "textbox", "combobox", "heading", "cell", "StaticText", ...
    name: str
    value: str = ""  # the text in a field, the chosen option of a combobox
    options: tuple[str, ...] = ()  # of a combobox
    states: Mapping[str, bool] = field(default_factory=dict)  # of STATES
    element_id: int = 0  # the number in brackets; 0 outside the viewport and for plain text
    backend_id: int = 0  # Chromium's number
    box: Box = (0, 0, 0, 0)

    def line(self) -> str:
        parts = [f"[{self.element_id}]"] if self.element_id else []
        parts += [self.role, *([repr(self.name)] if self.name or self.element_id else [])]
        if self.value:
            parts.append(f"value: {self.value!r}")
        if self.options:
            more = len(self.options) - MAX_OPTIONS
            names = " | ".join(map(repr, self.options[:MAX_OPTIONS]))
            parts.append(f"options: {names}{f' and {more} more' if more > 0 else ''}")
        states = {k: v for k, v in self.states.items() if v or k in SHOWN_WHEN_FALSE}
        return " ".join([*parts, *(f"{name}: {value}" for name, value in states.items())])


@dataclass(frozen=True)
class Page:
    """A page as the policy sees it: its public URL and its nodes in document order."""

    url: str
    nodes: tuple[Node, ...] = ()
    text: str = ""  # the lines of the nodes in the viewport

    @property
    def path(self) -> str:
        """Host and path without a final slash: "onestopmarket.com/cart"."""
        parts = urlsplit(self.url)
        return f"{parts.netloc}{parts.path}".rstrip("/")

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.url).query, keep_blank_values=True))

    def is_at(self, place: str) -> bool:
        """Whether this page has the path of a public URL, and the parameters of its query."""
        other = Page(place)
        return other.path == self.path and other.query.items() <= self.query.items()

    def find(self, role: str, name: str) -> Node | None:
        """The first node with exactly this role and name."""
        return next((n for n in self.nodes if (n.role, n.name) == (role, name)), None)

    def element(self, element_id: int) -> Node | None:
        """The node with this number, which the text shows; there is no element 0."""
        return next((n for n in self.nodes if 0 < n.element_id == element_id), None)


def read_page(url: str, tree: list[dict], snapshot: dict) -> Page:
    """Build a page from the nodes of Chromium's Accessibility.getFullAXTree and the answer of
    DOMSnapshot.captureSnapshot."""
    layout = _Layout(snapshot)
    nodes: list[Node] = []
    lines: list[str] = []
    num_elements = num_cut = 0
    for depth, node, is_actionable in _walk(tree, layout):
        if depth is not None and lines and _is_label(lines[-1], node):
            lines.pop()
        if depth is not None and len(lines) >= MAX_LINES:
            num_cut += 1
        elif depth is not None:
            if is_actionable:
                num_elements += 1
                node = replace(node, element_id=num_elements)
            lines.append("\t" * depth + node.line())
        nodes.append(node)
    if num_cut:
        lines.append(f"({num_cut} more lines of this screen are not shown)")
    if layout.top > 0:
        lines.insert(0, "(more above: scroll [up])")
    if layout.top + HEIGHT < layout.height - 1:
        lines.append("(more below: scroll [down])")
    return Page(url, tuple(nodes), "\n".join(lines))


class _Layout:
    """Boxes of the DOM nodes in the viewport's coordinates, and which of them listen to clicks."""

    def __init__(self, snapshot: dict) -> None:
        document = snapshot["documents"][0]
        left, self.top = document["scrollOffsetX"], document["scrollOffsetY"]
        self.height = document["contentHeight"]
        ids = document["nodes"]["backendNodeId"]
        self.clickable = {ids[i] for i in document["nodes"]["isClickable"]["index"]}
        layout = document["layout"]
        self.boxes: dict[int, Box] = {}
        for index, (x, y, width, height) in zip(layout["nodeIndex"], layout["bounds"]):
            self.boxes.setdefault(ids[index], (x - left, y - self.top, width, height))


def _is_in_view(box: Box) -> bool:
    x, y, width, height = box
    inside_x = max(0.0, min(x + width, WIDTH) - max(x, 0))
    inside_y = max(0.0, min(y + height, HEIGHT) - max(y, 0))
    return width > 0 < height and inside_x * inside_y >= MIN_IN_VIEW * width * height


def _walk(tree: list[dict], layout: _Layout) -> Iterator[tuple[int | None, Node, bool]]:
    """The nodes in document order: depth of the line (None: no line), node, can be acted on."""
    by_id = {node["nodeId"]: node for node in tree}
    stack = [(tree[0]["nodeId"], 0, "")] if tree else []
    while stack:  # not recursive, because a page can be nested thousands of levels deep
        node_id, depth, name_around = stack.pop()
        raw = by_id.pop(node_id, None)  # Chromium lists a few nodes twice
        if raw is None:
            continue
        role = _text(raw, "role")
        children = raw.get("childIds", ())
        if not raw.get("ignored") and role not in NOISE:
            properties = {p["name"]: p["value"].get("value") for p in raw.get("properties", ())}
            backend_id = raw.get("backendDOMNodeId", 0)
            node = Node(
                role,
                _text(raw, "name"),
                _text(raw, "value") if role in FIELDS else "",
                _options(raw, by_id) if role == "combobox" else (),
                {
                    name: properties[name] in (True, "true")
                    for name in STATES
                    if name in properties and (name, role) != ("expanded", "combobox")
                },
                backend_id=backend_id,
                box=layout.boxes.get(backend_id, (0, 0, 0, 0)),
            )
            can_act = role in ACTIONABLE or properties.get("focusable") is True
            can_act |= backend_id in layout.clickable and role not in ("StaticText", "LabelText")
            if role in FIELDS:
                children = ()  # its value is in its line
            is_shown = (node.name or can_act or role in GROUPS) and _is_in_view(node.box)
            if role in CELLS and not can_act and _has_same_name(node.name, children, by_id):
                is_shown = False
            if role == "StaticText" and node.name in name_around:
                is_shown = False
            yield (depth if is_shown else None), node, can_act
            if is_shown:
                depth, name_around = depth + 1, node.name
        stack += [(child, depth, name_around) for child in reversed(children)]


def _text(raw: dict, name: str) -> str:
    """The role, name or value of one of Chromium's nodes, in one line of limited length."""
    text = " ".join(str(raw.get(name, {}).get("value", ""))[: 2 * MAX_NAME].split())
    return text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}..."


def _options(combobox: dict, by_id: Mapping[str, dict]) -> tuple[str, ...]:
    names, stack = [], list(reversed(combobox.get("childIds", ())))
    while stack:
        node = by_id.get(stack.pop(), {})
        if _text(node, "role") == "option":
            names.append(_text(node, "name"))
        stack += reversed(node.get("childIds", ()))
    return tuple(names)


def _has_same_name(name: str, children: Iterable[str], by_id: Mapping[str, dict]) -> bool:
    """Whether the only child is a link or button with this name, so that one line is enough."""
    nodes = [by_id[child] for child in children if child in by_id]
    return [_text(node, "name") for node in nodes if _text(node, "role") in ACTIONABLE] == [name]


def _is_label(line: str, node: Node) -> bool:
    """Whether a line is the visible label of this field, whose name it is."""
    is_field = node.role in FIELDS or node.role in ("checkbox", "radio")
    return is_field and line.strip() == f"StaticText {node.name!r}"
