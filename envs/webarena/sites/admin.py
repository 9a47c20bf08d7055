"""The shop's administration: orders, products, customers, reviews and reports.

It has the shop's tables, so the shop of the same session shows what is changed here. Each table has
a list and a page per row, with a small form for each value that can be changed.
"""

from collections.abc import Sequence

import envs.webarena.sites.engine as web
from envs.webarena.sites.map import TOWNS
from envs.webarena.sites.shop import (
    BY_DATE,
    BY_STATUS,
    CATEGORIES,
    ORDER_STATUS,
    REVIEW_STATUS,
    STARS,
)

QUARTERS = tuple(f"{year}-Q{n}" for year in (2024, 2025, 2026) for n in (1, 2, 3, 4))[2:10]
BY_CATEGORY = web.Filter("Category", tuple(CATEGORIES))
LISTINGS = {
    "orders": web.Listing(
        "id /admin/orders/{id}, placed, customer, status, total $",
        "SELECT * FROM all_orders",
        [web.keyword("id || ' ' || customer"), BY_STATUS, *BY_DATE],
        {"Newest": "placed DESC, id DESC", "Oldest": "placed, id"}
        | {"Total: high to low": "total DESC, id"},
    ),
    "products": web.Listing(
        "name /admin/products/{id}, category, price $, stock",
        "SELECT * FROM products",
        [web.keyword("name"), BY_CATEGORY],
        {"Name": "name", "Price: high to low": "price DESC, name"}
        | {"Stock: low to high": "stock, name"},
    ),
    "customers": web.Listing(
        "name /admin/customers/{id}, email, town, orders",
        "SELECT c.*, (SELECT count(*) FROM orders WHERE customer = c.name) AS orders "
        "FROM customers c",
        [web.keyword("name || ' ' || email || ' ' || phone"), web.Filter("Town", TOWNS)],
        {"Name": "name", "Most orders": "orders DESC, name"},
    ),
    "reviews": web.Listing(
        "title /admin/reviews/{id}, product_name, author, stars, status",
        "SELECT r.*, name AS product_name FROM reviews r JOIN products p ON p.id = product",
        [web.keyword("product_name || ' ' || author"), web.Filter("Status", REVIEW_STATUS), STARS],
        {"Newest": "created DESC, id"},
    ),
    "sales": web.Listing(
        "month, orders, total $",
        "SELECT substr(placed, 1, 7) AS month, count(*) AS orders, sum(total) AS total "
        "FROM all_orders GROUP BY month",
        [
            web.Filter("Month from", test="month >= :month_from"),
            web.Filter("Month to", test="month <= :month_to"),
        ],
        {"Newest": "month DESC", "Total: high to low": "total DESC"},
    ),
    "bestsellers": web.Listing(
        "name /admin/products/{id}, quarter, sold",
        "SELECT * FROM sold",
        [web.Filter("Quarter", QUARTERS), BY_CATEGORY],
        {"Most sold": "sold DESC, name"},
    ),
}
SITE = web.Site(
    "shopping_admin",
    "cms",
    "http://luma.com/admin",
    "Luma Administration",
    nav={"Dashboard": "/admin"} | {name.capitalize(): f"/admin/{name}" for name in LISTINGS},
    user="admin",
)
SITE.page(
    "/admin",
    "Dashboard",
    web.Facts("pending_orders, pending_reviews"),
    row="SELECT (SELECT count(*) FROM orders WHERE status = 'pending') AS pending_orders, "
    "(SELECT count(*) FROM reviews WHERE status = 'pending') AS pending_reviews",
)
for name, listing in LISTINGS.items():
    SITE.page(f"/admin/{name}", name.capitalize(), listing)


def edit(table: str, column: str, options: Sequence[str] = (), sql: str = "{}") -> web.Form:
    """A form for one value of a row; `sql` converts the entry to the column's unit."""
    value = sql.format(f":new_{column}")
    statement = f"UPDATE {table} SET {column} = {value} WHERE id = :id"
    return web.Form(f"Set {column}", {f"New {column}": options}, statement)


def row_page(name: str, title: str, *parts: web.Facts | web.Form) -> None:
    row = f"SELECT * FROM ({LISTINGS[name].sql}) WHERE id = :id"
    SITE.page(f"/admin/{name}/{{id}}", title, *parts, row=row)


row_page(
    "orders",
    "Order {id}",
    web.Facts("customer, placed, status, town, total $, products"),
    edit("orders", "status", ORDER_STATUS),
)
row_page(
    "products",
    "{name}",
    web.Facts("category, price $, stock, description"),
    edit("products", "price", sql="round({} * 100)"),
    edit("products", "stock"),
)
row_page("customers", "{name}", web.Facts("email, phone, street, town, orders"))
row_page(
    "reviews",
    "{title}",
    web.Facts("product_name, author, stars, text, created, status"),
    edit("reviews", "status", REVIEW_STATUS),
)
