"""A browser without scripts and styles for the sites of envs/webarena. It reads the HTML with the
standard library, so tests can play thousands of actions without Chromium. It knows only what these
sites use, and it fails if a page is not well-formed or not accessible.

Also what tests with Chromium share: a site of their own, and the reason why they are skipped."""

import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlencode, urljoin, urlsplit

import httpx
import pytest

from envs.webarena.actions import read
from envs.webarena.browser import BrowserMissing, find_browser
from envs.webarena.sites import PUBLIC, SITES
from envs.webarena.tree import Node, Page

ROLES = {"a": "link", "button": "button", "h1": "heading", "h2": "heading", "td": "cell"}
ROLES |= {"th": "rowheader"}


def require_browser():
    """Skip a test if there is no Chromium; fail if CI is set."""
    try:
        find_browser()
    except BrowserMissing as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"NOT TESTED: {error}")


@contextmanager
def serving(answer):
    """Serve a site whose pages are `answer(host, path)`; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = answer(self.headers["Host"], self.path).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            if self.path.endswith(".bin"):
                self.send_header("Content-Disposition", "attachment")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@dataclass
class Form:
    method: str
    action: str
    values: dict = field(default_factory=dict)  # name -> value


class Reader(HTMLParser):
    """A page: its nodes as a policy sees them, and what happens when they are used."""

    def __init__(self, html):
        super().__init__()
        self.nodes, self.forms = [], []
        self.uses = {}  # index of a node -> its address, form, or form and name of the value
        self.options = {}  # index of a selection -> text -> value
        self.by_selector = {}  # "#price" or "h1" -> text
        self._labels, self._open = {}, []  # open elements: tag, attributes, text
        self.feed(html)
        assert not self._open

    def add(self, role, name, value="", options=(), use=None):
        assert role in ("StaticText", "cell") or name, f"a {role} has no name"
        self.uses[len(self.nodes)] = use
        number = len(self.nodes) + 1 if use else 0
        self.nodes.append(Node(role, name, value, options, {}, number))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if name := attributes.get("id"):
            assert f"#{name}" not in self.by_selector, f"two elements have the id {name}"
            self.by_selector[f"#{name}"] = ""
        if tag == "form":
            self.forms.append(Form(attributes.get("method", "get"), attributes.get("action", "")))
        if tag == "input":
            self._add_field(attributes, attributes.get("value", ""))
        elif tag not in ("meta", "link"):
            self._open.append((tag, attributes, []))

    def _add_field(self, attributes, value, options=()):
        form, name = self.forms[-1], attributes["name"]
        form.values[name] = value
        if attributes.get("type") == "hidden":
            return
        texts = {text: value for value, text in options}
        chosen = next((text for text in texts if texts[text] == value), value)
        self.options[len(self.nodes)] = texts
        role, label = "combobox" if options else "textbox", self._labels[attributes["id"]]
        self.add(role, label, chosen, tuple(texts), (form, name))

    def handle_data(self, data):
        if text := " ".join(data.split()):
            if self._open[-1][0] not in ("style", "title", "option", "label", "textarea"):
                self.add("StaticText", text)
            for _, _, texts in self._open:
                texts.append(text)

    def handle_endtag(self, tag):
        opened, attributes, texts = self._open.pop()
        assert opened == tag, f"<{opened}> is closed by </{tag}>"
        text = " ".join(texts)
        self.by_selector[f"#{attributes['id']}" if "id" in attributes else tag] = text
        if tag == "label":
            self._labels[attributes["for"]] = text
        elif tag == "textarea":
            self._add_field(attributes, text)
        elif tag == "option":
            select = self._open[-1][1]
            select.setdefault("options", []).append((attributes["value"], text))
            if "selected" in attributes:
                select["chosen"] = attributes["value"]
        elif tag == "select":
            options = attributes["options"]
            self._add_field(attributes, attributes.get("chosen", options[0][0]), options)
        elif tag in ROLES:
            uses = {"a": attributes.get("href"), "button": self.forms[-1] if self.forms else None}
            self.add(ROLES[tag], text, use=uses.get(tag))


class Reading:
    """A session that is played by reading; it is also the `Final` of the evaluators."""

    def __init__(self, sites, url):
        self.sites, self.token = sites, sites.open()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{sites.port}")
        self.cookies = {site: sites.sign_in(site) for site in SITES}
        self.goto(url)

    def close(self):
        self.http.close()
        self.sites.close(self.token)

    def goto(self, url, form=None):
        parts = urlsplit(url)
        origin = f"http://{parts.netloc}"
        site = next(site for site, public in PUBLIC.items() if public.startswith(origin))
        cookies = self.cookies[site]
        answer = self.http.request(
            "GET" if form is None else "POST",
            f"{parts.path or '/'}?{parts.query}",
            headers={
                "Host": urlsplit(self.sites.base_url(site, self.token)).netloc,
                "Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items()),
            },
            data=form,
        )
        for name, value in answer.cookies.items():
            cookies[name] = value.strip('"')
        if target := answer.headers.get("location"):
            return self.goto(urljoin(url, target))
        self.url, self.status, self.reader = url, answer.status_code, Reader(answer.text)
        return self

    @property
    def page(self):
        return Page(self.url, tuple(self.reader.nodes))

    def step(self, action):
        """Play an action, a text as the policy writes it."""
        action = read(action)
        if action.kind == "goto":
            return self.goto(action.text)
        nodes, index = self.reader.nodes, action.number - 1
        if action.kind == "press":  # Control+a, then Backspace, in the field with the focus
            if action.text == "Backspace":
                index = next(i for i, node in enumerate(nodes) if node.states.get("focused"))
                self._enter(index, "")
            return self
        use = self.reader.uses[index]
        if action.kind in ("type", "select"):
            value = nodes[index].value + action.text if action.kind == "type" else action.text
            self._enter(index, value)
            return self._send(use[0]) if action.enter else self
        if isinstance(use, tuple):
            nodes[:] = [
                replace(node, states={"focused": i == index}) for i, node in enumerate(nodes)
            ]
            return self
        return self._send(use) if isinstance(use, Form) else self.goto(urljoin(self.url, use))

    def _enter(self, index, text):
        form, name = self.reader.uses[index]
        texts = self.reader.options[index]
        form.values[name] = texts[text] if texts else text
        self.reader.nodes[index] = replace(self.reader.nodes[index], value=text)

    def _send(self, form):
        url = urljoin(self.url, form.action or self.url)
        if form.method == "post":
            return self.goto(url, form.values)
        return self.goto(f"{url.partition('?')[0]}?{urlencode(form.values)}")

    # What evaluators may look at.

    def read(self, url, locator, preparations=()):
        now = self.url
        selector = locator.removeprefix("document.querySelector('").removesuffix("').outerText")
        text = self.goto(url).reader.by_selector.get(selector, "")
        self.goto(now)
        return text

    def query(self, site, sql):
        return self.sites.query(self.token, site, sql)
