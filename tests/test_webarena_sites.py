"""The five sites: the same rows everywhere, sessions that are apart, accessible pages."""

import hashlib
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from urllib.parse import urljoin

import httpx
import pytest
from webarena_reader import Reading

from envs.webarena import sites as sites_module
from envs.webarena.sites import HOSTS, PUBLIC, SITES, Session, Sites, engine, open_masters
from envs.webarena.sites.engine import Filter, Values, Visit

SHOP, ADMIN, FORUM, FORGE, MAP = (PUBLIC[site] for site in SITES)


@pytest.fixture(scope="module")
def sites():
    sites = Sites()
    yield sites
    sites.shutdown()


@pytest.fixture
def open_page(sites):
    readings = []

    def open_page(url):
        readings.append(Reading(sites, url))
        return readings[-1]

    yield open_page
    for reading in readings:
        reading.close()


def ask(sites, host, path="/", **options):
    url = f"http://127.0.0.1:{sites.port}{path}"
    return httpx.request("GET", url, headers={"Host": host}, **options)


def use(reading, role, name, text=""):
    """Click an element, or enter a text in it."""
    node = reading.page.find(role, name)
    verb = {"textbox": "type", "combobox": "select"}.get(role, "click")
    arguments = f" [{text}]" if role in ("textbox", "combobox") else ""
    return reading.step(f"{verb} [{node.element_id}]{arguments}" + " [0]" * (role == "textbox"))


def cells(reading):
    return [node.name for node in reading.page.nodes if node.role == "cell"]


# ---- the rows


@pytest.mark.parametrize(
    ("name", "digest", "least"),
    [
        ("shop", "92efb2b77aae", 5000),
        ("forum", "6d55e0143369", 3000),
        ("forge", "6a2f6e9f0eac", 4000),
        ("map", "b53023a8e513", 400),
    ],
)
def test_the_rows_are_the_same_on_every_machine(name, digest, least, tmp_path):
    data = next(site.data for site in HOSTS.values() if site.data.name == name)
    data.build(tmp_path / "new.sqlite")
    database = sqlite3.connect(tmp_path / "new.sqlite")
    tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")
    rows = [list(database.execute(f"SELECT * FROM {table}")) for (table,) in tables.fetchall()]
    database.close()
    assert sum(map(len, rows)) > least
    assert hashlib.sha256(repr(rows).encode()).hexdigest()[:12] == digest


def test_the_files_are_built_once(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "it's 100% a #1 path?"))
    paths = sites_module.build_masters()
    for master in open_masters().values():
        assert master.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0
        master.close()
    times = {path: path.stat().st_mtime_ns for path in paths.values()}
    assert sites_module.build_masters() == paths
    assert {path: path.stat().st_mtime_ns for path in paths.values()} == times


# ---- sessions


def test_hosts_exist_while_their_session_is_open(sites):
    token, other = sites.open(), sites.open()
    host = sites.base_url("shopping_admin", token).removeprefix("http://").removesuffix("/admin")
    assert host == f"cms-{token}.test" and len(token) == 32
    assert ask(sites, f"{host}:80", "/admin/login").status_code == 200
    assert ask(sites, host.replace(".test", ".localhost"), "/admin/login").status_code == 200
    sites.close(token)
    for absent in (host, "127.0.0.1", f"cms-{'0' * 32}.test", f"news-{other}.test", f"x{host}"):
        assert ask(sites, absent, "/admin/login").status_code == 404, absent
    assert ask(sites, f"cms-{other}.test", "/admin/login").status_code == 200
    sites.close(other)


def test_a_session_copies_the_rows_at_its_first_write_only(sites):
    masters = open_masters()
    session, other = Session(masters), Session(masters)
    sql = "SELECT stock FROM products WHERE id = 7"
    before = session.query("shop", sql)[0]["stock"]
    assert not session._copies
    session.write("shop", ["UPDATE products SET stock = :n WHERE id = 7"], {"n": 1000})
    assert session.query("shop", sql)[0]["stock"] == 1000 and list(session._copies) == ["shop"]
    assert other.query("shop", sql)[0]["stock"] == before
    broken = ["UPDATE products SET stock = 5 WHERE id = 7", "INSERT INTO cart VALUES (7, 0)"]
    with pytest.raises(sqlite3.IntegrityError):  # all statements, or none
        session.write("shop", broken, {})
    assert session.query("shop", sql)[0]["stock"] == 1000
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        masters["shop"].execute("DELETE FROM products")
    session.close()


def test_sessions_that_change_the_same_row_at_once_do_not_see_each_other(sites):
    readings = [Reading(sites, f"{ADMIN}/products/7") for _ in range(8)]

    def change(number, reading):
        for stock in range(5):
            use(reading, "textbox", "New stock", str(100 * number + stock))
            use(reading, "button", "Set stock")

    threads = [threading.Thread(target=change, args=pair) for pair in enumerate(readings)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, reading in enumerate(readings):
        assert reading.read(reading.url, "document.querySelector('#stock').outerText") == str(
            100 * number + 4
        )
        reading.close()


def test_the_shop_shows_what_its_administration_changes(open_page):
    reading = open_page(f"{ADMIN}/products/7")
    name = reading.reader.by_selector["h1"]
    use(reading, "textbox", "New price", "12.5")
    use(reading, "button", "Set price")
    assert "$12.50" in cells(reading)
    reading.goto(f"{SHOP}/search?q={name}")
    assert "$12.50" in cells(reading)


def test_an_order_takes_what_is_in_the_cart(open_page):
    reading = open_page(f"{SHOP}/cart")
    use(reading, "button", "Place order")
    sql = "SELECT count(*) AS n FROM orders WHERE id > 2200"
    assert reading.query("shopping", sql)[0]["n"] == 0  # nothing is in the cart
    for _ in range(2):  # a repeated click changes nothing
        reading.goto(f"{SHOP}/search?q=kettle")
        product = next(
            n.name for n in reading.page.nodes if n.role == "link" and "kettle" in n.name
        )
        use(reading, "link", product)
        use(reading, "combobox", "Quantity", "3")
        use(reading, "button", "Add to cart")
    use(reading, "button", "Place order")
    use(reading, "link", "2201")
    assert {product, "3", "pending"} <= {node.name for node in reading.page.nodes}
    assert reading.query("shopping", "SELECT * FROM cart") == []


def test_the_map_measures_roads(open_page):
    """A road is a quarter longer than the straight line; a bike rides 15 km in an hour."""
    reading = open_page(f"{MAP}/route?from=Calder&to=Marsh&travel_by=bike")
    sql = "SELECT x, y FROM places WHERE name IN ('Calder', 'Marsh')"
    (x1, y1), (x2, y2) = (tuple(row) for row in reading.query("map", sql))
    km = round(((x1 - x2) ** 2 + (y1 - y2) ** 2) ** 0.5 * 1.25 / 1000, 1)
    assert cells(reading) == [f"{km} km", f"{round(km * 60 / 15)} minutes", "bike"]
    distances = [
        float(text.split()[0])
        for text in cells(reading.goto(f"{MAP}/places/calder/nearest?category=bank"))[1::2]
    ]
    assert distances == sorted(distances) and len(distances) == 12


# ---- accounts


def test_changes_and_private_pages_need_the_account(open_page, sites):
    reading = open_page(SHOP)
    for cookies in reading.cookies.values():
        cookies.clear()
    reading.goto(f"{SHOP}/cart").goto(f"{SHOP}/wishes/add", {"product": "7"})
    assert reading.page.path.endswith("/login")
    user, password = sites.log_in("shopping_admin")
    reading.goto(f"{ADMIN}/orders?status=pending")
    assert reading.page.query == {"next": "/admin/orders"}
    for word, status in (("wrong", 422), (password, 200)):
        reading.goto(f"{ADMIN}/login?next=/admin/orders")
        use(reading, "textbox", "User name", user)
        use(reading, "textbox", "Password", word)
        use(reading, "button", "Sign in")
        assert reading.status == status
    assert reading.url == f"{ADMIN}/orders" and reading.reader.by_selector["h1"] == "Orders"
    assert sites.sign_in("map") == {} and sites.log_in("map") == ("", "")


# ---- lists and entries


def test_a_listing_equals_a_slow_search(sites):
    """All combinations of two words, two filters and both orders, against a loop over the rows."""
    rows = sites.query(token := sites.open(), "shopping", "SELECT * FROM catalog ORDER BY name")
    site, session = HOSTS["shop"], sites._sessions[token]
    listing = engine.Listing(
        "name",
        "SELECT * FROM catalog",
        search="name",
        filters=[Filter("Category", "category", ("garden",)), Filter("Price", "price", scale=100)],
        sorts={"Name": "name", "Price": "price DESC, name"},
    )
    for words in ("", "a", "light BLUE"):
        for category in ("", "garden"):
            for low, high in (("", ""), ("20", ""), ("20.5", "80")):
                for sort in ("name", "price"):
                    query = {"q": words, "category": category, "sort": sort}
                    query |= {"price_from": low, "price_to": high}
                    visit = Visit(site, session, query, Values(query))
                    view = engine.select_rows(visit, listing)
                    expected = [
                        row
                        for row in rows
                        if all(word.lower() in row["name"].lower() for word in words.split())
                        and category in ("", row["category"])
                        and float(low or 0) * 100 <= row["price"] <= float(high or 999) * 100
                    ]
                    if sort == "price":
                        expected.sort(key=lambda row: (-row["price"], row["name"]))
                    assert view["count"].split()[0] == str(len(expected))
                    assert view["rows"] == [{"name": row["name"]} for row in expected[:12]]
    sites.close(token)


def test_pages_of_a_listing_show_each_row_once(open_page):
    reading = open_page(f"{MAP}/search?town=Calder")
    names, num_pages = [], 1
    while reading.page.find("link", "Next page"):
        names += cells(reading)[::3]
        use(reading, "link", "Next page")
        num_pages += 1
    names += cells(reading)[::3]
    count = reading.query("map", "SELECT count(*) AS n FROM places WHERE town = 'Calder'")[0]["n"]
    assert len(set(names)) == len(names) == count and num_pages == -(-count // 12) > 2
    assert reading.goto(f"{MAP}/search?q={'a+' * 3000}").status == 200
    for page in ("0", "-3", "99999999", "x", "²"):
        assert reading.goto(f"{MAP}/search?town=Calder&page={page}").status == 200


def test_a_list_has_one_address(open_page):
    """A GET form also sends its empty fields."""
    reading = open_page(f"{ADMIN}/orders?q=&status=pending&date_from=&page=2&date_to=")
    assert reading.url == f"{ADMIN}/orders?status=pending&page=2"
    reading.goto(f"{MAP}/places/calder/nearest?category=")
    assert reading.page.find("StaticText", "0 results")


@pytest.mark.parametrize(
    ("site", "path", "form", "message"),
    [
        ("shopping", "/search?price_to=cheap", None, "'cheap' is not a number."),
        ("shopping", "/search?price_to=1e400", None, "'1e400' is not a number."),
        ("shopping", "/cart/add", {"product": "7", "quantity": "many"}, "not accepted"),
        ("shopping", "/cart/add", {"product": "7", "quantity": ""}, "The field quantity is empty."),
        ("shopping_admin", "/products/7/price", {"new_price": "abc"}, "not accepted"),
        ("shopping_admin", "/products/7/stock", {"new_stock": "9" * 30}, "not accepted"),
        ("gitlab", "/projects/new", {"name": "Two words", "description": "x"}, "not accepted"),
        ("reddit", "/posts/1/vote", {"value": "100"}, "not accepted"),
    ],
)
def test_a_wrong_entry_is_refused_with_the_reason(open_page, site, path, form, message):
    reading = open_page(PUBLIC[site]).goto(PUBLIC[site] + path, form)
    assert reading.status == 422 and message in reading.reader.by_selector["main"]


@pytest.mark.parametrize(
    "url", [f"{FORUM}/nothing", f"{FORUM}/posts/x'", f"{FORUM}/boards/%00", f"{MAP}/route?to=x"]
)
def test_an_unknown_page_is_not_found(open_page, url):
    reading = open_page(url)
    assert reading.status == 404 and reading.reader.by_selector["h1"] == "Not found"


def test_what_users_write_is_text(open_page):
    reading = open_page(f"{FORUM}/boards/books/submit")
    hostile = "<script>alert(1)</script> {user} {{ 7 * 7 }} %s :id"
    use(reading, "textbox", "Title", hostile)
    use(reading, "textbox", "Text", hostile)
    use(reading, "button", "Submit post")
    assert reading.reader.by_selector["h1"] == hostile == reading.page.find("heading", hostile).name


# ---- all pages


@pytest.mark.parametrize("site", SITES)
def test_each_link_leads_to_an_accessible_page(open_page, site):
    """Reader fails if two elements have the same id, or if a field, link or button has no name."""
    reading, queue, kinds = open_page(PUBLIC[site]), [PUBLIC[site]], Counter()
    for url in queue:  # which grows
        path = url.removeprefix(PUBLIC[site]).partition("?")[0].split("/")
        kind = (*path[1:2], len(path))
        if kinds[kind] == 4:
            continue
        kinds[kind] += 1
        assert reading.goto(url).status == 200, url
        assert any(node.role == "heading" for node in reading.page.nodes)
        targets = [target for target in reading.reader.uses.values() if isinstance(target, str)]
        queue += sorted({urljoin(url, target) for target in targets}.difference(queue))
    assert len(kinds) > 3


def test_people_can_open_the_sites():
    command = [sys.executable, "-m", "envs.webarena.sites", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(6)]
        process.terminate()
    assert "user Emma Lopez, password kettle42" in lines[0] and ".localhost:" in lines[0]
    assert lines[4].startswith("http://map-") and lines[5].startswith("Ctrl-C")
