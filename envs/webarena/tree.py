"""The page as the policy reads it."""

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit


@dataclass(frozen=True)
class Node:
    """One node of the accessibility tree of a whole page, also outside the viewport."""

    role: str  # "link", "button", "textbox", "combobox", "heading", "cell", "StaticText", ...
    name: str
    value: str = ""  # the text in a field, the chosen option of a combobox
    options: tuple[str, ...] = ()  # of a combobox or listbox
    is_checked: bool = False  # of a checkbox or radio
    element_id: int = 0  # the number in brackets; 0 outside the viewport and for plain text
    top: float = 0.0  # of its box below the viewport's upper edge, in pixels: negative is above


@dataclass(frozen=True)
class Page:
    """A page as the policy sees it: its public URL and its nodes in document order."""

    url: str
    nodes: tuple[Node, ...] = ()

    @property
    def path(self) -> str:
        """Host and path without a final slash: "onestopmarket.com/cart"."""
        parts = urlsplit(self.url)
        return f"{parts.netloc}{parts.path}".rstrip("/")

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.url).query, keep_blank_values=True))

    def find(self, role: str, name: str) -> Node | None:
        """The first node with exactly this role and name."""
        return next((n for n in self.nodes if (n.role, n.name) == (role, name)), None)
