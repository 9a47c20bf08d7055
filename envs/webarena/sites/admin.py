"""The shop's administration: orders, products, customers, reviews, content pages and reports.

It has the shop's tables, so the shop of the same session shows what is changed here. Each table has
a list and a page per row, with a small form for each value that can be changed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from envs.webarena.sites import engine as web
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
    sql: str = ":{column}"


class Table(NamedTuple):
    """A list of rows, and what the page of one row shows and changes."""

    listing: web.Listing
    title: str  # the column that is the heading of a row's page
    facts: str  # columns, "total $" for money
    edits: Sequence[Edit] = ()


TABLES = {
    "orders": Table(
        web.Listing(
            {"Order": "id /admin/orders/{id}", "Date": "placed", "Customer": "customer"}
            | {"Status": "status", "Total": "total $"},
            "SELECT *, 'Order ' || id AS name FROM all_orders",
            search="id || ' ' || customer",
            filters=[web.Filter("Status", "status", ORDER_STATUS), web.Filter("Date", "placed")],
            sorts={"Newest": "placed DESC, id DESC", "Oldest": "placed, id"}
            | {"Total: high to low": "total DESC, id"},
        ),
        "name",
        "customer,placed,status,town,total $,products",
        [Edit("status", ORDER_STATUS)],
    ),
    "products": Table(
        web.Listing(
            {"Product": "name /admin/products/{id}", "Category": "category", "Price": "price $"}
            | {"Stock": "stock", "Status": "status"},
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
        "name",
        "category,price $,stock,status,description",
        [Edit("price", sql="round(:price * 100)"), Edit("stock"), Edit("status", PRODUCT_STATUS)],
    ),
    "customers": Table(
        web.Listing(
            {"Name": "name /admin/customers/{id}", "Email": "email", "Town": "town"}
            | {"Orders": "orders"},
            "SELECT c.*, (SELECT count(*) FROM orders WHERE customer = c.name) AS orders "
            "FROM customers c",
            search="name || ' ' || email || ' ' || phone",
            filters=[web.Filter("Town", "town", TOWNS)],
            sorts={"Name": "name", "Most orders": "orders DESC, name"},
        ),
        "name",
        "email,phone,street,town,orders",
        [Edit("phone"), Edit("street"), Edit("town", TOWNS)],
    ),
    "reviews": Table(
        web.Listing(
            {"Review": "title /admin/reviews/{id}", "Product": "product_name"}
            | {"Author": "author", "Stars": "stars", "Status": "status"},
            "SELECT r.*, name AS product_name FROM reviews r JOIN products p ON p.id = product",
            search="product_name || ' ' || author",
            filters=[
                web.Filter("Status", "status", REVIEW_STATUS),
                web.Filter("Stars", "stars", "12345", "= ? + 0"),
            ],
            sorts={"Newest": "created DESC, id"},
        ),
        "title",
        "product_name,author,stars,text,created,status",
        [Edit("status", REVIEW_STATUS)],
    ),
    "pages": Table(
        web.Listing({"Page": "title /admin/pages/{id}"}, "SELECT * FROM pages", search="title"),
        "title",
        "slug,text",
        [Edit("title"), Edit("text")],
    ),
}
REPORTS = {
    "Sales": web.Listing(
        {"Month": "month", "Orders": "orders", "Total": "total $"},
        "SELECT substr(placed, 1, 7) AS month, count(*) AS orders, sum(total) AS total "
        "FROM all_orders GROUP BY month",
        filters=[web.Filter("Month", "month")],
        sorts={"Newest": "month DESC", "Total: high to low": "total DESC"},
    ),
    "Bestsellers": web.Listing(
        {"Product": "name /admin/products/{id}", "Quarter": "quarter", "Sold": "sold"},
        "SELECT * FROM sold",
        filters=[
            web.Filter("Quarter", "quarter", QUARTERS),
            web.Filter("Category", "category", [web.slug(name) for name in CATEGORIES]),
        ],
        sorts={"Most sold": "sold DESC, name"},
    ),
}


@SITE.page("")
def dashboard(visit: web.Visit) -> web.Page:
    count = "SELECT count(*) FROM {} WHERE status = 'pending'"
    facts = {
        f"Pending {table}": visit.rows(count.format(table))[0][0] for table in ("orders", "reviews")
    }
    return web.Page("Dashboard", web.Facts(facts))


def add_pages(name: str, table: Table) -> None:
    """Register the list of a table, the page of a row, and its changes."""

    @SITE.page(f"/{name}")
    def show_list(visit: web.Visit) -> web.Page:
        return web.Page(name.capitalize(), table.listing)

    @SITE.page(f"/{name}/{{number}}")
    def show_row(visit: web.Visit, number: str) -> web.Page:
        row = visit.row(f"SELECT * FROM ({table.listing.sql}) WHERE id = ?", number)
        facts = {spec.split()[0]: web.cell(row, spec) for spec in table.facts.split(",")}
        heads = {column.replace("_", " ").capitalize(): value for column, value in facts.items()}
        forms = [
            web.Form(
                f"/admin/{name}/{number}/{edit.column}",
                f"Set {edit.column}",
                [web.Field(f"New {edit.column}", edit.column, options=edit.options)],
            )
            for edit in table.edits
        ]
        return web.Page(row[table.title], web.Facts(heads), *forms)

    for edit in table.edits:
        SITE.change(
            f"/{name}/{{number}}/{edit.column}",
            f"UPDATE {name} SET {edit.column} = {edit.sql.format(column=edit.column)} "
            "WHERE id = :number",
            then=f"/{name}/{{number}}",
        )


for name, table in TABLES.items():
    add_pages(name, table)


@SITE.page("/sales")
def sales(visit: web.Visit) -> web.Page:
    return web.Page("Sales", REPORTS["Sales"])


@SITE.page("/bestsellers")
def bestsellers(visit: web.Visit) -> web.Page:
    return web.Page("Bestsellers", REPORTS["Bestsellers"])
