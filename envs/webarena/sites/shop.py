"""The shop: products with reviews, orders, a cart. `admin.py` administers its tables."""

import random
from itertools import product

import envs.webarena.sites.engine as web
from envs.webarena.sites.map import TOWNS

SCHEMA = """
CREATE TABLE products (id INTEGER PRIMARY KEY, slug TEXT UNIQUE, name TEXT UNIQUE, category TEXT,
    price INTEGER CHECK (price > 0), stock INTEGER CHECK (stock >= 0), description TEXT) STRICT;
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT UNIQUE, email TEXT, phone TEXT,
    street TEXT, town TEXT) STRICT;
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, placed TEXT, town TEXT, status TEXT
    CHECK (status IN ('pending', 'processing', 'shipped', 'complete', 'canceled'))) STRICT;
CREATE TABLE items (order_id INTEGER, product INTEGER, quantity INTEGER, price INTEGER) STRICT;
CREATE TABLE reviews (id INTEGER PRIMARY KEY, product INTEGER, author TEXT, stars INTEGER,
    title TEXT, text TEXT, created TEXT, status TEXT CHECK (status IN ('pending', 'approved',
    'rejected')), UNIQUE (product, author)) STRICT;
CREATE TABLE cart (product INTEGER PRIMARY KEY, quantity INTEGER CHECK (quantity > 0)) STRICT;
CREATE INDEX items_of_order ON items (order_id);
CREATE INDEX reviews_of_product ON reviews (product);
CREATE VIEW catalog AS SELECT p.*, count(r.id) AS reviews, coalesce(round(avg(r.stars), 1), 0.0)
    AS rating FROM products p LEFT JOIN reviews r ON r.product = p.id AND r.status = 'approved'
    GROUP BY p.id;
CREATE VIEW all_orders AS SELECT o.*, sum(i.quantity * i.price) AS total, group_concat(p.name, ', ')
    AS products FROM orders o JOIN items i ON i.order_id = o.id JOIN products p ON p.id = i.product
    GROUP BY o.id;
CREATE VIEW sold AS SELECT p.id, name, category, substr(placed, 1, 4) || '-Q' ||
    ((substr(placed, 6, 2) + 2) / 3) AS quarter, sum(quantity) AS sold FROM items JOIN orders o
    ON o.id = order_id JOIN products p ON p.id = product GROUP BY p.id, quarter;
"""
CATEGORIES = {
    "Kitchen": "kettle,toaster,frying pan,bread knife,teapot,mixing bowl,coffee grinder",
    "Lighting": "desk lamp,floor lamp,lantern,night light,reading light,string lights",
    "Garden": "watering can,spade,bird feeder,plant pot,garden hose,rake,wheelbarrow",
    "Office": "notebook,stapler,desk organizer,fountain pen,paper tray,whiteboard",
    "Outdoor": "tent,sleeping bag,camping stove,backpack,water bottle,hammock,compass",
    "Music": "ukulele,music stand,harmonica,drum pad,guitar strap,metronome",
    "Toys": "wooden train,puzzle,kite,building blocks,toy boat,spinning top",
    "Bathroom": "bath mat,soap dish,towel rack,shower caddy,laundry basket,mirror",
}
BRANDS = (
    "Alder Brook Copperline Fennwick Harrow Juniper Larkfield Northmoor Pebble Quill Tamsin".split()
)
STYLES = (
    "classic compact folding large light small striped sturdy travel blue green red grey".split()
)
ORDER_STATUS = ("pending", "processing", "shipped", "complete", "canceled")
REVIEW_STATUS = ("pending", "approved", "rejected")
OPINIONS = (  # stars, title, text
    (1, "Broke quickly", "It broke in the first week and nobody answered my letters."),
    (2, "Disappointing", "It looks cheaper than in the picture."),
    (3, "It is okay", "It does what it should and nothing more."),
    (4, "Good value", "I use it every day and would buy it again."),
    (5, "Wonderful", "The best one that I have ever had."),
)
USER = "Emma Lopez"


def make_rows(random: random.Random) -> web.Rows:
    names = [USER, *web.invent_people(random, 200)]
    for name in names:
        contact = f"{web.slug(name)}@example.com", f"555-{random.randrange(1000, 10_000)}"
        street = f"{random.randrange(1, 99)} {random.choice(('Mill', 'Church', 'Park'))} Street"
        yield "customers", (None, name, *contact, street, random.choice(TOWNS))
    prices: list[int] = []
    for category, things in CATEGORIES.items():
        for kind in random.sample([*product(BRANDS, STYLES, things.split(","))], 45):
            name, text = " ".join(kind), f"A {kind[1]} {kind[2]} by {kind[0]}."
            prices.append(random.randrange(80, 3000) * 5 + 4)
            about = category, prices[-1], random.randrange(200), text
            yield "products", (None, web.slug(name), name, *about)
            for author in random.sample(names[1:], random.randrange(8)):
                (status,) = random.choices(REVIEW_STATUS, (3, 13, 1))
                when = web.recent_day(random, 500), status
                yield "reviews", (None, len(prices), author, *random.choice(OPINIONS), *when)
    dates = sorted(web.recent_day(random, 700) for _ in range(1200))
    for number, date in enumerate(dates, 1001):
        customer = USER if number % 24 == 0 else random.choice(names[1:])
        status = random.choice(ORDER_STATUS if date > "2026-04" else ORDER_STATUS[3:])
        yield "orders", (number, customer, date, random.choice(TOWNS), status)
        for item in random.sample(range(len(prices)), random.choice((1, 1, 2, 3))):
            yield "items", (number, item + 1, random.choice((1, 1, 1, 2, 3)), prices[item])


SITE = web.Site(
    "shopping",
    "shop",
    "http://onestopmarket.com",
    "One Stop Market",
    nav={"Home": "/", "Orders": "/orders", "Cart": "/cart", "Account": "/account"},
    search="Search products",
    user=USER,
)
STARS = web.Filter("Stars", "12345")
BY_DATE = [
    web.Filter("Date from", test="placed >= :date_from"),
    web.Filter("Date to", test="placed <= :date_to"),
]
BY_STATUS = web.Filter("Status", ORDER_STATUS)
PRODUCTS = web.Listing(
    "name /products/{slug}, price $, rating, reviews",
    "SELECT * FROM catalog",
    [
        web.keyword("name"),
        web.Filter("Price from", test="price / 100.0 >= 0 + :price_from"),
        web.Filter("Price to", test="price / 100.0 <= 0 + :price_to"),
    ],
    {"Name": "name", "Price: low to high": "price, name"}
    | {"Price: high to low": "price DESC, name", "Rating": "rating DESC, name"},
)
SITE.page(
    "",
    "One Stop Market",
    web.Links({name: f"/categories/{name}" for name in CATEGORIES}, "Categories"),
)
SITE.page("/search", "Search results", PRODUCTS)
SITE.page(
    "/categories/{name}",
    "Category {name}",
    PRODUCTS._replace(sql="SELECT * FROM catalog WHERE category = :name"),
)
SITE.page(
    "/products/{slug}",
    "{name}",
    web.Facts("description, price $, rating, category"),
    # A product that is added again is replaced, so that a repeated click changes nothing.
    web.Form(
        "Add to cart",
        {"Quantity": "123456789"},
        "REPLACE INTO cart VALUES (:id, :quantity)",
        then="/cart",
    ),
    web.Links({"Write a review": "/products/{slug}/review"}),
    web.Listing(
        "stars, title, author, created",
        "SELECT * FROM reviews WHERE product = :id AND status = 'approved'",
        [STARS],
        {"Newest": "created DESC, id"},
        title="Reviews",
    ),
    row="SELECT * FROM catalog WHERE slug = :slug",
)
SITE.page(
    "/products/{slug}/review",
    "Review of {name}",
    web.Form(
        "Submit review",
        {"Stars": "12345", "Title": (), "Text": ()},
        "INSERT INTO reviews VALUES (NULL, :id, :user, :stars, :title, :text, :today, 'pending')",
    ),
    web.Listing(
        "stars, title, text, status",
        "SELECT * FROM reviews WHERE product = :id AND author = :user",
        title="My review, shown to others after we have checked it",
    ),
    row="SELECT * FROM catalog WHERE slug = :slug",
)
SITE.page(
    "/cart",
    "Cart",
    web.Listing(
        "name /products/{slug}, quantity, price $",
        "SELECT * FROM cart JOIN products ON id = product",
    ),
    web.Facts("total $"),
    web.Form(  # an empty cart makes no order
        "Place order",
        {},
        (
            "INSERT INTO items SELECT (SELECT max(id) + 1 FROM orders), product, quantity, price "
            "FROM cart JOIN products ON id = product",
            "DELETE FROM cart",
            "INSERT INTO orders SELECT NULL, name, :today, town, 'pending' FROM customers WHERE "
            "name = :user AND (SELECT max(order_id) FROM items) > (SELECT max(id) FROM orders)",
        ),
        then="/orders",
    ),
    web.Form("Empty cart", {}, "DELETE FROM cart"),
    row="SELECT ifnull(sum(quantity * price), 0) AS total FROM cart JOIN products ON id = product",
)
SITE.page(
    "/orders",
    "My orders",
    web.Listing(
        "id /orders/{id}, placed, status, total $, products",
        "SELECT * FROM all_orders WHERE customer = :user",
        [web.keyword("id || ' ' || products"), *BY_DATE, BY_STATUS],
        {"Newest": "id DESC", "Oldest": "id"},
    ),
)
SITE.page(
    "/orders/{id}",
    "Order {id}",
    web.Facts("placed, status, town, total $"),
    web.Listing(
        "name /products/{slug}, quantity, price $",
        "SELECT name, slug, quantity, i.price FROM items i JOIN products p ON p.id = product "
        "WHERE order_id = :id",
    ),
    row="SELECT * FROM all_orders WHERE id = :id AND customer = :user",
)
SITE.page(
    "/account",
    "Account",
    web.Facts("name, email, phone, street, town"),
    web.Form(
        "Save",
        {"New phone": (), "New street": (), "New town": ()},
        "UPDATE customers SET phone = :new_phone, street = :new_street, town = :new_town "
        "WHERE name = :user",
    ),
    row="SELECT * FROM customers WHERE name = :user",
)
