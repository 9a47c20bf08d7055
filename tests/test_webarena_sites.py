"""The five sites: the same rows everywhere, sessions that are apart, accessible pages."""

import hashlib
import re
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from html import unescape
from itertools import product
from urllib.parse import urlsplit

import httpx
import pytest

from envs.webarena.sites import SITES, Sites, open_master
from envs.webarena.sites.engine import Filter, Listing, Session, Values, Visit, keyword


@pytest.fixture(scope="module")
def sites():
    sites = Sites()
    yield sites
    sites.shutdown()


class Reader:
    """A session whose pages are read as HTML; "shopping:/cart" is a page of the shop."""

    def __init__(self, sites):
        self.sites, self.token = sites, sites.open()

    def get(self, address, **form):
        """The answer to a GET, or to a POST with these fields of a form."""
        site, _, path = address.partition(":")
        return httpx.request(
            "POST" if form else "GET",
            f"http://127.0.0.1:{self.sites.port}{path}",
            headers={"Host": urlsplit(self.sites.base_url(site, self.token)).netloc},
            data=form or None,
            follow_redirects=True,
        )

    def cells(self, address):
        """The texts of all cells of the page's tables."""
        texts = re.findall(r"<td.*?>(.*?)</td>", self.get(address).text)
        return [unescape(re.sub(r"<.*?>", "", text)) for text in texts]


@pytest.fixture
def reader(sites):
    reader = Reader(sites)
    yield reader
    sites.close(reader.token)


# ---- the rows


def test_the_rows_are_the_same_on_every_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "it's 100% a #1 path?"))
    master = open_master()
    tables = master.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")
    rows = [
        [tuple(row) for row in master.execute(f"SELECT * FROM {table}")]
        for (table,) in tables.fetchall()
    ]
    master.close()
    assert sum(map(len, rows)) > 12_000
    assert hashlib.sha256(repr(rows).encode()).hexdigest()[:12] == "a35a56971368"


# ---- sessions


def test_hosts_exist_while_their_session_is_open(sites):
    token, other = sites.open(), sites.open()
    host = urlsplit(sites.base_url("shopping_admin", token)).netloc
    assert host == f"cms-{token}.test" and len(token) == 32

    def status(host):
        url = f"http://127.0.0.1:{sites.port}/admin"
        return httpx.get(url, headers={"Host": host}).status_code

    assert status(f"{host}:80") == status(host.replace(".test", ".localhost")) == 200
    sites.close(token)
    for absent in (host, "127.0.0.1", f"cms-{'0' * 32}.test", f"news-{other}.test", f"x{host}"):
        assert status(absent) == 404, absent
    assert status(f"cms-{other}.test") == 200
    sites.close(other)


def test_a_session_copies_the_rows_at_its_first_write_only():
    master = open_master()
    session, other = Session(master), Session(master)
    sql = "SELECT stock FROM products WHERE id = 7"
    before = session.query(sql)[0]["stock"]
    assert not session.has_copy
    session.write(["UPDATE products SET stock = :n WHERE id = 7"], {"n": 1000})
    assert session.query(sql)[0]["stock"] == 1000 and session.has_copy
    assert other.query(sql)[0]["stock"] == before
    broken = ["UPDATE products SET stock = 5 WHERE id = 7", "INSERT INTO cart VALUES (7, 0)"]
    with pytest.raises(sqlite3.IntegrityError):  # all statements, or none
        session.write(broken)
    assert session.query(sql)[0]["stock"] == 1000
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        master.execute("DELETE FROM products")
    session.close()
    master.close()


def test_sessions_that_change_the_same_row_at_once_do_not_see_each_other(sites):
    readers = [Reader(sites) for _ in range(8)]

    def change(number, reader):
        for stock in range(5):
            form = {"button": "Set stock", "new_stock": str(100 * number + stock)}
            reader.get("shopping_admin:/admin/products/7", **form)

    threads = [threading.Thread(target=change, args=pair) for pair in enumerate(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, reader in enumerate(readers):
        assert str(100 * number + 4) in reader.cells("shopping_admin:/admin/products/7")
        sites.close(reader.token)


def test_an_order_takes_what_is_in_the_cart(reader):
    orders = "SELECT count(*) AS n FROM orders WHERE id > 2200"
    reader.get("shopping:/cart", button="Place order")
    assert reader.sites.query(reader.token, orders)[0]["n"] == 0, "nothing is in the cart"
    (slug,) = reader.sites.query(reader.token, "SELECT slug FROM products WHERE id = 7")[0]
    for _ in range(2):  # a repeated click changes nothing
        cart = reader.get(f"shopping:/products/{slug}", button="Add to cart", quantity="3")
        assert str(cart.url).endswith("/cart") and cart.text.count(f"/products/{slug}") == 1
    assert "/orders/2201" in reader.get("shopping:/cart", button="Place order").text
    assert reader.cells("shopping:/orders/2201")[1] == "pending"
    assert reader.cells("shopping:/cart") == ["$0.00"]


def test_a_form_changes_one_row_only(reader):
    sql = "SELECT project FROM issues WHERE number = 3 AND state = 'open'"
    first, *others = reader.sites.query(reader.token, sql)
    reader.get(f"gitlab:/{first[0]}/issues/3", button="Close issue")
    assert reader.sites.query(reader.token, sql) == others
    entries = {"new_phone": "1", "new_street": "a", "new_town": "b"}
    reader.get("shopping:/account?user=Ann", button="Save", **entries)
    sql = "SELECT name FROM customers WHERE phone = '1'"
    assert [name for (name,) in reader.sites.query(reader.token, sql)] == ["Emma Lopez"]
    for button in ("Upvote", "Downvote"):
        reader.get("reddit:/posts/36", button=button)
    ((vote,),) = reader.sites.query(reader.token, "SELECT value FROM votes")
    assert vote == -1


def test_a_review_is_shown_after_its_approval(reader):
    sql = "SELECT r.id, slug, author FROM reviews r JOIN products p ON p.id = product"
    (review, slug, author), *_ = reader.sites.query(reader.token, f"{sql} WHERE status = 'pending'")
    assert author not in reader.cells(f"shopping:/products/{slug}")
    form = {"button": "Set status", "new_status": "approved"}
    reader.get(f"shopping_admin:/admin/reviews/{review}", **form)
    assert author in reader.cells(f"shopping:/products/{slug}")


def test_the_map_measures_roads(reader):
    """A road is a quarter longer than the straight line; a bike rides 15 km in an hour."""
    sql = "SELECT x, y FROM places WHERE name IN ('Calder', 'Marsh')"
    (x1, y1), (x2, y2) = map(tuple, reader.sites.query(reader.token, sql))
    km = round(((x1 - x2) ** 2 + (y1 - y2) ** 2) ** 0.5 * 1.25 / 1000, 1)
    cells = reader.cells("map:/directions?from=calder&to=Marsh")
    assert cells[:3] == ["Calder", "Marsh", f"{km} km"]
    assert cells[4] == f"{round(km * 60 / 15)} min"
    cells = reader.cells("map:/places/calder/near?category=bank")
    distances = [float(text.split()[0]) for text in cells[2::3]]
    assert distances == sorted(distances) and len(distances) == 12


# ---- lists and entries


def test_a_listing_equals_a_slow_search():
    """All combinations of words, two filters and both orders, against a loop over the rows."""
    session = Session(master := open_master())
    rows = session.query("SELECT * FROM catalog ORDER BY name")
    filters = [
        keyword("name"),
        Filter("Category", ("Garden",)),
        Filter("Price from", test="price / 100.0 >= 0 + :price_from"),
        Filter("Price to", test="price / 100.0 <= 0 + :price_to"),
    ]
    sorts = {"Name": "name", "Price": "price DESC, name"}
    listing = Listing("name", "SELECT * FROM catalog", filters, sorts)
    prices = (("", ""), ("20", ""), ("20.49", "80"))
    for words, category, (low, high), sort in product(
        ("", "a", "BLUE a"), ("", "Garden"), prices, sorts
    ):
        query = {"keyword": words, "category": category, "price_from": low, "price_to": high}
        query["sort_by"] = sort
        view = listing.view(Visit(session, query, Values(query)))
        expected = [
            row
            for row in rows
            if re.search(words.lower().replace(" ", ".*"), row["name"].lower())
            and category in ("", row["category"])
            and float(low or 0) <= row["price"] / 100 <= float(high or 999)
        ]
        if sort == "Price":
            expected.sort(key=lambda row: (-row["price"], row["name"]))
        assert view["count"].split()[0] == str(len(expected))
        assert view["rows"] == [{"name": row["name"]} for row in expected[:12]]
    master.close()


def test_pages_of_a_listing_show_each_row_once(reader):
    names, num_pages, path = [], 0, "?town=Calder&category="
    while path:
        html = reader.get(f"map:/search{path}").text
        names += re.findall('<td><a href="/places/(.*?)">', html)
        num_pages += 1
        following = re.search('<a href="([^"]*)">Next page', html)
        path = unescape(following[1]) if following else ""
    sql = "SELECT count(*) FROM places WHERE town = 'Calder'"
    ((count,),) = reader.sites.query(reader.token, sql)
    assert len(set(names)) == len(names) == count and num_pages == -(-count // 12) > 2
    for entry in ("page=0", "page=-3", "page=99999999", "page=x", f"keyword={'a+' * 3000}"):
        assert reader.get(f"map:/search?{entry}").status_code == 200


def test_a_wrong_entry_is_refused_with_the_reason(reader):
    (slug,) = reader.sites.query(reader.token, "SELECT slug FROM products WHERE id = 7")[0]
    product, administration = f"shopping:/products/{slug}", "shopping_admin:/admin/products/7"
    project = {"name": "Two words", "description": "x", "visibility": "public"}
    for address, button, form, message in (
        (product, "Add to cart", {"quantity": "many"}, "not accepted"),
        (product, "Add to cart", {"quantity": " "}, "field Quantity is empty"),
        (administration, "Set price", {"new_price": "abc"}, "not accepted"),
        (administration, "Set stock", {"new_stock": "9" * 30}, "not accepted"),
        ("gitlab:/projects/new", "Create project", project, "not accepted"),
    ):
        answer = reader.get(address, button=button, **form)
        assert answer.status_code == 422 and message in answer.text


def test_a_page_that_cannot_be_shown_says_why(reader):
    unknown = [f"reddit:{path}" for path in ("/nothing", "/posts/x'", "/boards/%00", "/users/")]
    for address in (*unknown, "shopping:/orders/1001"):  # the order of another customer
        answer = reader.get(address)
        assert answer.status_code == 404 and "<h1>Not found</h1>" in answer.text
    answer = reader.get(f"reddit:/search?keyword={'a' * 51_000}")
    assert answer.status_code == 400 and "too complex" in answer.text


def test_what_users_write_is_text(reader):
    hostile = "<script>alert(1)</script> {user} {{ 7 * 7 }} %s :id"
    form = {"button": "Submit post", "title": hostile, "text": hostile}
    answer = reader.get("reddit:/boards/books/submit", **form)
    assert unescape(re.search("<h1>(.*)</h1>", answer.text)[1]) == hostile
    assert "<script>" not in answer.text


# ---- all pages


@pytest.mark.parametrize("site", SITES)
def test_each_link_leads_to_a_page_whose_fields_have_labels(reader, site):
    queue, kinds = [urlsplit(SITES[site].public).path or "/"], Counter()
    for path in queue:  # which grows
        parts = path.removeprefix("/admin").partition("?")[0].split("/")
        kind = (*parts[1:2], len(parts))
        if kinds[kind] == 4:
            continue
        kinds[kind] += 1
        answer = reader.get(f"{site}:{path}")
        assert answer.status_code == 200 and "<h1>" in answer.text, path
        fields = re.findall(r"<(?:input|select) ", answer.text)
        assert len(fields) == len(re.findall(r"<label>\w[\w ]*\s+<(?:input|select) ", answer.text))
        links = map(unescape, re.findall('<a href="(.*?)">', answer.text))
        links = [link if link[0] == "/" else path.partition("?")[0] + link for link in links]
        queue += [link for link in dict.fromkeys(links) if link not in queue]
    assert len(kinds) > 3


def test_people_can_open_the_sites():
    command = [sys.executable, "-m", "envs.webarena.sites", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(6)]
        process.terminate()
    assert lines[0].startswith("http://shop-") and ".localhost:" in lines[0]
    assert lines[4].startswith("http://map-") and lines[5].startswith("Ctrl-C")
