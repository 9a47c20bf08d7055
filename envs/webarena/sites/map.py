"""The map: places of an invented region, what is near to them, and routes between them."""

import random
from itertools import product

import envs.webarena.sites.engine as web

# Positions are in meters.
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


SITE = web.Site(
    "map",
    "map",
    "http://openstreetmap.org",
    "OpenStreetMap",
    nav={"Home": "/", "All places": "/search", "Directions": "/directions"},
    search="Search places",
)
BY_CATEGORY = web.Filter("Category", CATEGORIES)
SITE.page("", "Map", web.Links({town: f"/places/{web.slug(town)}" for town in TOWNS}, "Towns"))
SITE.page(
    "/search",
    "Places",
    web.Listing(
        "name /places/{slug}, category, town",
        "SELECT * FROM places",
        [web.keyword("name"), BY_CATEGORY, web.Filter("Town", TOWNS)],
        {"Name": "name"},
    ),
)
SITE.page(
    "/places/{name}",
    "{name}",
    web.Facts("category, address, phone, hours"),
    web.Links({"What is near": "/places/{slug}/near"}),
    row="SELECT *, street || ', ' || town AS address FROM places WHERE slug = :name",
)
SITE.page(
    "/places/{slug}/near",
    "Near {name}",
    web.Listing(
        "name /places/{slug}, category, distance",
        "SELECT b.*, road(a.x, a.y, b.x, b.y) AS km, road(a.x, a.y, b.x, b.y) || ' km' AS distance "
        "FROM places a JOIN places b ON a.id <> b.id WHERE a.name = :name",
        [BY_CATEGORY],
        {"Distance": "km"},
    ),
    row="SELECT name FROM places WHERE slug = :slug",
)
SITE.page(
    "/directions",
    "Directions between two places",
    web.Listing(
        "a, b, distance, by_car, by_bike, by_foot",
        "SELECT *, km || ' km' AS distance, minutes(km, 'car') || ' min' AS by_car, "
        "minutes(km, 'bike') || ' min' AS by_bike, minutes(km, 'foot') || ' min' AS by_foot "
        "FROM (SELECT a.name AS a, b.name AS b, road(a.x, a.y, b.x, b.y) AS km FROM places a "
        "JOIN places b WHERE a.name = :from COLLATE NOCASE AND b.name = :to COLLATE NOCASE)",
        [web.Filter("From", test="true"), web.Filter("To", test="true")],  # the SQL above uses both
    ),
)
