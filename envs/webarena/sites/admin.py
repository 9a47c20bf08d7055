"""The shop's administration: orders, products, customers, reviews, content pages and reports.

It has the shop's tables, so the shop of the same session shows what is changed here. Each table has
a list and a page per row, with a small form for each value that can be changed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import envs.webarena.sites.engine as web
from envs.webarena.sites.map import TOWNS
from envs.webarena.sites.shop import CATEGORIES, ORDER_STATUS, REVIEW_STATUS
from envs.webarena.sites.shop import SITE as SHOP

SITE = web.Site(
    "shopping_admin",
    "Luma Administration",
    SHOP.data,
    nav={"Dashboard": "/", "Orders": "/orders", "Products": "/products"}
    | {"Customers": "/customers", "Reviews": "/reviews", "Pages": "/pages"}
    | {"Sales": "/sales", "Bestsellers": "/bestsellers"},
    root="/admin",
    account=("admin", "admin1234"),
    is_private=True,
)
PRODUCT_STATUS = ("enabled", "disabled")
QUARTERS = tuple(f"{year}-Q{n}" for year in (2024, 2025, 2026) for n in (1, 2, 3, 4))[2:10]


class Edit(NamedTuple):
    """A value that can be changed; `sql` converts the entry to the column's unit."""

    column: str
    options: Sequence[str] = ()
    sql: str = "{}"


class Table(NamedTuple):
    """A list of rows, and what the page of one row shows and changes."""

    listing: web.Listing
    title: str  # heading of a row's page
    facts: str
    edits: Sequence[Edit] = ()


TABLES = {
    "orders": Table(
        web.Listing(
            "id /orders/{id}, placed, customer, status, total $",
            "SELECT * FROM all_orders",
            search="id || ' ' || customer",
            filters=[web.Filter("Status", "status", ORDER_STATUS), web.Filter("Date", "placed")],
            sorts={"Newest": "placed DESC, id DESC", "Oldest": "placed, id"}
            | {"Total: high to low": "total DESC, id"},
        ),
        "Order {id}",
        "customer, placed, status, town, total $, products",
        [Edit("status", ORDER_STATUS)],
    ),
    "products": Table(
        web.Listing(
            "name /products/{id}, category, price $, stock, status",
            "SELECT * FROM products",
            search="name",
            filters=[
                web.Filter("Category", "category", [web.slug(name) for name in CATEGORIES]),
                web.Filter("Status", "status", PRODUCT_STATUS),
                web.Filter("Stock", "stock", scale=1),
            ],
            sorts={"Name": "name", "Price: high to low": "price DESC, name"}
            | {"Stock: low to high": "stock, name"},
        ),
        "{name}",
        "category, price $, stock, status, description",
        [Edit("price", sql="round({} * 100)"), Edit("stock"), Edit("status", PRODUCT_STATUS)],
    ),
    "customers": Table(
        web.Listing(
            "name /customers/{id}, email, town, orders",
            "SELECT c.*, (SELECT count(*) FROM orders WHERE customer = c.name) AS orders "
            "FROM customers c",
            search="name || ' ' || email || ' ' || phone",
            filters=[web.Filter("Town", "town", TOWNS)],
            sorts={"Name": "name", "Most orders": "orders DESC, name"},
        ),
        "{name}",
        "email, phone, street, town, orders",
        [Edit("phone"), Edit("street"), Edit("town", TOWNS)],
    ),
    "reviews": Table(
        web.Listing(
            "title /reviews/{id}, product_name, author, stars, status",
            "SELECT r.*, name AS product_name FROM reviews r JOIN products p ON p.id = product",
            search="product_name || ' ' || author",
            filters=[
                web.Filter("Status", "status", REVIEW_STATUS),
                web.Filter("Stars", "stars", "12345", "= 0 +"),
            ],
            sorts={"Newest": "created DESC, id"},
        ),
        "{title}",
        "product_name, author, stars, text, created, status",
        [Edit("status", REVIEW_STATUS)],
    ),
    "pages": Table(
        web.Listing("title /pages/{id}", "SELECT * FROM pages", search="title"),
        "{title}",
        "slug, text",
        [Edit("title"), Edit("text")],
    ),
}
REPORTS = {
    "Sales": web.Listing(
        "month, orders, total $",
        "SELECT substr(placed, 1, 7) AS month, count(*) AS orders, sum(total) AS total "
        "FROM all_orders GROUP BY month",
        filters=[web.Filter("Month", "month")],
        sorts={"Newest": "month DESC", "Total: high to low": "total DESC"},
    ),
    "Bestsellers": web.Listing(
        "name /products/{id}, quarter, sold",
        "SELECT * FROM sold",
        filters=[
            web.Filter("Quarter", "quarter", QUARTERS),
            web.Filter("Category", "category", [web.slug(name) for name in CATEGORIES]),
        ],
        sorts={"Most sold": "sold DESC, name"},
    ),
}


SITE.page(
    "",
    "Dashboard",
    web.Facts("pending_orders, pending_reviews"),
    row="SELECT (SELECT count(*) FROM orders WHERE status = 'pending') AS pending_orders, "
    "(SELECT count(*) FROM reviews WHERE status = 'pending') AS pending_reviews",
)
for title, listing in REPORTS.items():
    SITE.page(f"/{title.lower()}", title, listing)
for name, table in TABLES.items():
    SITE.page(f"/{name}", name.capitalize(), table.listing)
    SITE.page(
        f"/{name}/{{id}}",
        table.title,
        web.Facts(table.facts),
        *(
            web.Form(
                f"/{name}/{{id}}/{edit.column}",
                f"Set {edit.column}",
                {f"New {edit.column}": edit.options},
            )
            for edit in table.edits
        ),
        row=f"SELECT * FROM ({table.listing.sql}) WHERE id = :id",
    )
    for column, _, sql in table.edits:
        SITE.change(
            f"/{name}/{{id}}/{column}",
            f"UPDATE {name} SET {column} = {sql.format(f':new_{column}')} WHERE id = :id",
            then=f"/{name}/{{id}}",
        )
