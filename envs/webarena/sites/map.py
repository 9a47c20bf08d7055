"""The map: places of an invented region, what is near to them, and routes between them."""

import random
from itertools import product
from math import isqrt

import envs.webarena.sites.engine as web

# Positions are in meters. Roads are a quarter longer than the straight line.
SCHEMA = """
CREATE TABLE places (id INTEGER PRIMARY KEY, slug TEXT UNIQUE, name TEXT UNIQUE, category TEXT,
    street TEXT, town TEXT, phone TEXT, hours TEXT, x INTEGER, y INTEGER) STRICT;
"""
TOWNS = (
    "Ashwick,Birkdale,Calder,Dunmere,Elmstead,Fallow,Garnock,Heathrow Mill,Inver,Kelby,Lindow,Marsh"
).split(",")
CATEGORIES = (
    "bakery,bank,bookshop,cafe,cinema,clinic,hotel,library,museum,park,pharmacy,school"
).split(",")
NAMES = (
    "Acorn,Amber,Beacon,Bluebell,Bridge,Castle,Cedar,Corner,Crown,Dove,Eagle,Falcon,Fern,Garden,"
    "Golden,Harbor,Heron,Hill,Holly,Ivory,Kestrel,Lantern,Laurel,Maple,Meadow,Mill,Oak,Olive,"
    "Orchard,Pearl,Pine,River,Robin,Rose,Silver,Star,Stone,Sun,Swan,Valley,Willow,Windmill"
).split(",")
STREETS = "Bridge Street,Church Lane,High Street,Mill Road,Park Avenue,Station Road".split(",")
SPEEDS = {"car": 50, "bike": 15, "foot": 5}  # kilometers in an hour


def make_rows(random: random.Random) -> web.Rows:
    centers = {town: (random.randrange(40_000), random.randrange(40_000)) for town in TOWNS}
    for town, position in centers.items():
        yield "places", (None, web.slug(town), town, "town", "", town, "", "", *position)
    for words in random.sample([*product(NAMES, CATEGORIES)], 420):
        name, town = " ".join(words).title(), random.choice(TOWNS)
        street = f"{random.randrange(1, 120)} {random.choice(STREETS)}"
        phone = f"555-{random.randrange(1000, 10_000)}"
        hours = f"{random.randrange(6, 12):02}:00 to {random.randrange(16, 23)}:30"
        x, y = (center + random.randrange(-1500, 1500) for center in centers[town])
        where = words[1], street, town, phone, hours, x, y
        yield "places", (None, web.slug(name), name, *where)


def road(x1: int, y1: int, x2: int, y2: int) -> int:
    """Meters by road, rounded to 100. Integers only, so that it is the same on every machine.

    >>> road(0, 0, 3000, 4000)
    6300
    """
    straight = isqrt((x1 - x2) ** 2 + (y1 - y2) ** 2)
    return (straight * 5 // 4 + 50) // 100 * 100


def minutes(meters: int, mode: str) -> int:
    """Travel time; by car if there is no such mode.

    >>> minutes(6300, "foot")
    76
    """
    return max(1, round(meters * 60 / (SPEEDS.get(mode, SPEEDS["car"]) * 1000)))


SITE = web.Site(
    "map",
    "OpenStreetMap",
    web.Data("map", SCHEMA, make_rows),
    nav={"Home": "/", "All places": "/search", "Directions": "/directions"},
    search="Search places",
)
SITE.page(
    "",
    "Map",
    web.Text("Search for a place, or ask for directions."),
    web.Links({town: f"/places/{web.slug(town)}" for town in TOWNS}, "Towns"),
)
SITE.page(
    "/search",
    "Places",
    web.Listing(
        "name /places/{slug}, category, town",
        "SELECT * FROM places",
        search="name",
        filters=[web.Filter("Category", "category", CATEGORIES), web.Filter("Town", "town", TOWNS)],
        sorts={"Name": "name"},
    ),
)
SITE.page(
    "/places/{name}",
    "{name}",
    web.Facts("category, address, phone, hours"),
    web.Form("/places/{slug}/nearest", "Find nearest", {"Category": CATEGORIES}, method="get"),
    row="SELECT *, street || ', ' || town AS address FROM places WHERE slug = :name",
)
SITE.page(
    "/places/{slug}/nearest",
    "Nearest {category} to {name}",
    web.Listing(
        "name /places/{slug}, distance",
        "SELECT b.*, road(a.x, a.y, b.x, b.y) AS meters, "
        "(road(a.x, a.y, b.x, b.y) / 1000.0) || ' km' AS distance FROM places a "
        "JOIN places b ON a.id <> b.id WHERE a.name = :name AND b.category = :category",
        sorts={"Distance": "meters"},
    ),
    row="SELECT name FROM places WHERE slug = :slug",
)
ROUTE = web.Form(
    "/route", "Find route", {"From": (), "To": (), "Travel by": tuple(SPEEDS)}, method="get"
)
SITE.page("/directions", "Directions", ROUTE, web.Text("Enter the full names of two places."))
SITE.page(
    "/route",
    "From {a} to {b}",
    web.Facts("distance, time, travel_by"),
    ROUTE,
    row="SELECT a.name AS a, b.name AS b, "
    "(road(a.x, a.y, b.x, b.y) / 1000.0) || ' km' AS distance, "
    "minutes(road(a.x, a.y, b.x, b.y), :travel_by) || ' minutes' AS time "
    "FROM places a JOIN places b ON b.name LIKE :to WHERE a.name LIKE :from",
)
