"""A browser without JavaScript for the sites of envs/webarena: it reads the HTML with the standard
library, so that tests can play thousands of steps without Chromium.

It knows what these sites use: links, forms, labels, selections, tables. Addresses are the policy's.
"""

from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from urllib.parse import urlencode, urljoin, urlsplit

import httpx

from envs.webarena.sites import PUBLIC
from envs.webarena.tree import Node, Page

NAMED = {"a": "link", "button": "button", "h1": "heading", "h2": "heading"}
NAMED |= {"td": "cell", "th": "cell"}


@dataclass
class Form:
    method: str
    action: str
    values: dict = field(default_factory=dict)  # name -> value
    labels: dict = field(default_factory=dict)  # label -> name


class Reader(HTMLParser):
    """The nodes, links and forms of a page."""

    def __init__(self, html):
        super().__init__()
        self.nodes, self.links, self.buttons, self.labels, self.by_id = [], {}, {}, {}, {}
        self.options = {}  # label of a selection -> text -> value
        self.ids = set()
        self.forms = [Form("get", "")]
        self._open = []  # [tag, attributes, text] of the open elements
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if name := attributes.get("id"):
            assert name not in self.ids, f"two elements have the id {name}"
            self.ids.add(name)
        if tag == "form":
            self.forms.append(Form(attributes.get("method", "get"), attributes.get("action", "")))
        if tag == "input":
            self._control(attributes, attributes.get("value", ""))
        elif tag not in ("meta", "link"):
            self._open.append([tag, attributes, ""])

    def _control(self, attributes, value, options=()):
        name, form = attributes["name"], self.forms[-1]
        form.values[name] = value
        if label := self.labels.get(attributes.get("id")):
            form.labels[label] = name
            texts = dict(options)
            self.options[label] = {text: value for value, text in options}
            role = "combobox" if options else "textbox"
            self.nodes.append(Node(role, label, texts.get(value, value), tuple(texts.values())))

    def handle_data(self, data):
        if data.strip() and self._open and self._open[-1][0] not in ("style", "title"):
            if self._open[-1][0] not in ("option", "label"):
                self.nodes.append(Node("StaticText", " ".join(data.split())))
            for element in self._open:
                element[2] += data

    def handle_endtag(self, tag):
        opened, attributes, text = self._open.pop()
        assert opened == tag, f"<{opened}> is closed by </{tag}>"
        text = " ".join(text.split())
        if "id" in attributes:
            self.by_id[attributes["id"]] = text
        if tag in NAMED:
            self.nodes.append(Node(NAMED[tag], text))
        if tag in ("h1", "main"):
            self.by_id[tag] = text
        if tag == "a":
            self.links.setdefault(text, attributes["href"])
        elif tag == "button":
            self.buttons.setdefault(text, self.forms[-1])
        elif tag == "label":
            self.labels[attributes["for"]] = text
        elif tag == "textarea":
            self._control(attributes, text)
        elif tag == "option":
            options = self._open[-1][1].setdefault("options", [])
            options.append((attributes["value"], text))
            if "selected" in attributes:
                self._open[-1][1]["chosen"] = attributes["value"]
        elif tag == "select":
            options = attributes["options"]
            self._control(attributes, attributes.get("chosen", options[0][0]), options)


class Browser:
    """One session's browser, signed in everywhere."""

    def __init__(self, sites):
        self.sites, self.token = sites, sites.open()
        self.http = httpx.Client()

    def close(self):
        self.http.close()
        self.sites.close(self.token)

    def goto(self, url, data=None):
        site = max(
            (s for s, u in PUBLIC.items() if url.startswith(u.removesuffix("/admin"))), key=len
        )
        parts = urlsplit(url)
        host = urlsplit(self.sites.base_url(site, self.token)).netloc
        cookies = "; ".join(f"{k}={v}" for k, v in self.sites.sign_in(site).items())
        self.answer = self.http.request(
            "POST" if data is not None else "GET",
            f"http://127.0.0.1:{self.sites.port}{parts.path or '/'}?{parts.query}",
            headers={"Host": host, "Cookie": cookies},
            data=data,
        )
        if "location" in self.answer.headers:
            return self.goto(urljoin(url, self.answer.headers["location"]))
        self.reader, self.url = Reader(self.answer.text), url
        return self

    @property
    def page(self):
        return Page(self.url, tuple(self.reader.nodes))

    def act(self, verb, *arguments):
        """Do what a step of a plan says."""
        if verb == "goto":
            return self.goto(*arguments)
        role, name, *entry = arguments
        if role == "link":
            return self.goto(urljoin(self.url, self.reader.links[name]))
        if role == "button":
            return self.send(self.reader.buttons[name])
        form = next(form for form in self.reader.forms if name in form.labels)
        index = next(i for i, n in enumerate(self.reader.nodes) if (n.role, n.name) == (role, name))
        node = self.reader.nodes[index]
        assert role == "textbox" or entry[0] in node.options
        self.reader.nodes[index] = replace(node, value=entry[0])
        form.values[form.labels[name]] = self.reader.options[name].get(entry[0], entry[0])
        return self.send(form) if entry[1:] == ["1"] else self

    def send(self, form):
        url = urljoin(self.url, form.action or self.url)
        if form.method == "post":
            return self.goto(url, form.values)
        return self.goto(f"{url.partition('?')[0]}?{urlencode(form.values)}")
