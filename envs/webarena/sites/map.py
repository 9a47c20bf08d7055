"""The map: places of an invented region, what is near to them, and routes between them."""

import random
import sqlite3
from math import isqrt

from envs.webarena.sites import engine as web

# Positions are in metres. Roads are a quarter longer than the straight line.
SCHEMA = """
CREATE TABLE places (id INTEGER PRIMARY KEY, slug TEXT UNIQUE, name TEXT UNIQUE, category TEXT,
    street TEXT, town TEXT, phone TEXT, hours TEXT, x INTEGER, y INTEGER) STRICT;
"""
TOWNS = (
    "Ashwick,Birkdale,Calder,Dunmere,Elmstead,Fallow,Garnock,Heathrow Mill,Inver,Kelby,Lindow,Marsh"
).split(",")
CATEGORIES = "bakery,bank,bookshop,cafe,cinema,clinic,hotel,library,museum,park,pharmacy,school"
NAMES = (
    "Acorn,Amber,Beacon,Bluebell,Bridge,Castle,Cedar,Corner,Crown,Dove,Eagle,Falcon,Fern,Garden,"
    "Golden,Harbour,Heron,Hill,Holly,Ivory,Kestrel,Lantern,Laurel,Maple,Meadow,Mill,Oak,Olive,"
    "Orchard,Pearl,Pine,River,Robin,Rose,Silver,Star,Stone,Sun,Swan,Valley,Willow,Windmill"
).split(",")
STREETS = "Bridge Street,Church Lane,High Street,Mill Road,Park Avenue,Queen Street,Station Road"
SPEEDS = {"car": 50, "bike": 15, "foot": 5}  # kilometres in an hour


def make_rows(random: random.Random) -> dict[str, list[tuple]]:
    centers = {town: (random.randrange(40_000), random.randrange(40_000)) for town in TOWNS}
    rows = [
        (n, web.slug(town), town, "town", "", town, "", "", *centers[town])
        for n, town in enumerate(TOWNS, 1)
    ]
    names = [(name, kind) for name in NAMES for kind in CATEGORIES.split(",")]
    for number, (first, category) in enumerate(random.sample(names, 420), len(TOWNS) + 1):
        name, town = f"{first} {category.title()}", random.choice(TOWNS)
        x, y = (center + random.randrange(-1500, 1500) for center in centers[town])
        street = f"{random.randrange(1, 120)} {random.choice(STREETS.split(','))}"
        phone = f"555-{random.randrange(1000, 10_000)}"
        hours = f"{random.randrange(6, 12):02}:{random.choice(('00', '30'))} to "
        hours += f"{random.randrange(16, 23)}:{random.choice(('00', '30'))}"
        rows.append((number, web.slug(name), name, category, street, town, phone, hours, x, y))
    return {"places": rows}


def road(x1: int, y1: int, x2: int, y2: int) -> int:
    """Metres by road, rounded to 100. Integers only, so that it is the same on every machine.

    >>> road(0, 0, 3000, 4000)
    6300
    """
    straight = isqrt((x1 - x2) ** 2 + (y1 - y2) ** 2)
    return (straight * 5 // 4 + 50) // 100 * 100


def minutes(meters: int, mode: str) -> int:
    """Travel time.

    >>> minutes(6300, "foot")
    76
    """
    return max(1, round(meters * 60 / (SPEEDS[mode] * 1000)))


SITE = web.Site(
    "map",
    "OpenStreetMap",
    web.Data("map", SCHEMA, make_rows),
    nav={"Home": "/", "All places": "/search", "Directions": "/directions"},
    search="Search places",
)
DIRECTIONS = [
    *(web.Field("From", "from"), web.Field("To", "to")),
    web.Field("Travel by", "by", "car", tuple(SPEEDS)),
]
COLUMNS = {"Place": "name /places/{slug}", "Category": "category", "Town": "town"}


@SITE.page("")
def home(visit: web.Visit) -> web.Page:
    towns = web.Links("Towns", [(town, f"/places/{web.slug(town)}") for town in TOWNS])
    return web.Page("Map", web.Text("Search for a place, or ask for directions."), towns)


@SITE.page("/search")
def search(visit: web.Visit) -> web.Page:
    filters = [
        web.Filter("Category", "category", CATEGORIES.split(",")),
        web.Filter("Town", "town", TOWNS),
    ]
    return web.Page(
        "Places",
        web.Listing(COLUMNS, "SELECT * FROM places", search="name", filters=filters),
    )


@SITE.page("/places/{name}")
def place(visit: web.Visit, name: str) -> web.Page:
    row = visit.row("SELECT * FROM places WHERE slug = ?", name)
    facts = {"Category": row["category"], "Town": row["town"]}
    if row["phone"]:
        facts |= {"Address": f"{row['street']}, {row['town']}"}
        facts |= {"Phone": row["phone"], "Opening hours": row["hours"]}
    categories = web.Field("Category", "category", options=CATEGORIES.split(","))
    nearest = web.Form(f"/places/{name}/nearest", "Find nearest", [categories], method="get")
    return web.Page(row["name"], web.Facts(facts), nearest)


@SITE.page("/places/{name}/nearest")
def nearest(visit: web.Visit, name: str) -> web.Page:
    origin = visit.row("SELECT * FROM places WHERE slug = ?", name)
    category = visit.query.get("category", "")
    sql = "SELECT * FROM places WHERE category = ? AND slug <> ?"
    rows = visit.rows(sql, category, name)
    meters = {row["name"]: road(origin["x"], origin["y"], row["x"], row["y"]) for row in rows}
    near = sorted(meters, key=meters.__getitem__)[:5]
    facts = {name: f"{meters[name] / 1000:.1f} km" for name in near}
    return web.Page(f"Nearest {category} to {origin['name']}", web.Facts(facts))


@SITE.page("/directions")
def directions(visit: web.Visit) -> web.Page:
    form = web.Form("/directions", "Find route", DIRECTIONS, method="get")
    if not {"from", "to"} <= visit.query.keys():
        return web.Page("Directions", form)
    ends = [find_place(visit, visit.query[name]) for name in ("from", "to")]
    mode = visit.query.get("by", "car")
    if mode not in SPEEDS:
        raise web.Refusal(f"You can travel by {', '.join(SPEEDS)}.")
    meters = road(*(end[axis] for end in ends for axis in ("x", "y")))
    time = minutes(meters, mode)
    facts = {"Distance": f"{meters / 1000:.1f} km", "Time": f"{time} minutes", "Travel by": mode}
    return web.Page(f"From {ends[0]['name']} to {ends[1]['name']}", web.Facts(facts), form)


def find_place(visit: web.Visit, name: str) -> sqlite3.Row:
    for row in visit.rows("SELECT * FROM places WHERE name LIKE ?", name.strip()):
        return row
    raise web.Refusal(f"There is no place with the name {name!r:.60}. Search for its full name.")
