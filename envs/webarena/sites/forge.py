"""The forge: projects with issues, merge requests, commits and members."""

import random

from envs.webarena.sites import engine as web
from envs.webarena.sites.shop import FIRST_NAMES, LAST_NAMES

SCHEMA = """
CREATE TABLE users (name TEXT PRIMARY KEY, full_name TEXT UNIQUE) STRICT;
CREATE TABLE projects (path TEXT PRIMARY KEY, owner TEXT, description TEXT, points INTEGER,
    name TEXT CHECK (name NOT GLOB '*[^a-z0-9-]*'), visibility TEXT) STRICT;
CREATE TABLE issues (id INTEGER PRIMARY KEY, project TEXT, number INTEGER, title TEXT, text TEXT,
    author TEXT, assignee TEXT, label TEXT, milestone TEXT, state TEXT, created TEXT,
    UNIQUE (project, title)) STRICT;
CREATE TABLE merge_requests (project TEXT, number INTEGER, title TEXT, author TEXT, reviewer TEXT,
    state TEXT, created TEXT, PRIMARY KEY (project, number)) STRICT;
CREATE TABLE commits (hash TEXT PRIMARY KEY, project TEXT, author TEXT, message TEXT, created TEXT)
    STRICT;
CREATE TABLE members (project TEXT, user TEXT, role TEXT, PRIMARY KEY (project, user)) STRICT;
CREATE TABLE stars (project TEXT, user TEXT, PRIMARY KEY (project, user)) STRICT;
CREATE INDEX commits_of_project ON commits (project);
CREATE INDEX issues_of_project ON issues (project);
CREATE VIEW all_projects AS SELECT *, points + (SELECT count(*) FROM stars WHERE project = path)
    AS stars FROM projects;
"""

ADJECTIVES = "amber,brave,calm,daily,early,fast,gentle,hidden,iron,jolly,kind,little".split(",")
NOUNS = "atlas,bridge,cache,diary,engine,forest,graph,harbor,index,journal,kernel,ledger".split(",")
PARTS = (
    "login page,search field,start page,settings,export,import,test suite,command line,"
    "documentation,error message,time zone,dark mode,printer,calendar,upload,user menu"
).split(",")
PROBLEMS = (
    "The {} is too slow,The {} crashes on an empty file,Translate the {},"
    "The {} ignores the keyboard,Add an example for the {},"
    "The {} looks wrong on a small screen,Remove the old {},"
    "The {} does not remember its state"
).split(",")
VERBS = "Fix,Improve,Rewrite,Document,Simplify,Test".split(",")
LABELS = ("bug", "feature", "documentation", "performance", "question")
MILESTONES = ("v1.0", "v1.1", "v2.0")
ROLES = ("guest", "reporter", "developer", "maintainer")
STATES = ("open", "closed")
MERGE_STATES = ("open", "merged", "closed")
VISIBILITIES = ("private", "internal", "public")
USER = "ada.quill"


def make_rows(random: random.Random) -> dict[str, list[tuple]]:
    names = [
        f"{first} {last}" for first in FIRST_NAMES.split(",") for last in LAST_NAMES.split(",")
    ]
    names = ["Ada Quill", *random.sample(names, 60)]
    users = [name.lower().replace(" ", ".") for name in names]
    paths = [f"{a}-{noun}" for a in ADJECTIVES for noun in NOUNS]
    tables: dict[str, list[tuple]] = {"users": list(zip(users, names))}
    for table in ("projects", "issues", "merge_requests", "commits", "members"):
        tables[table] = []
    for n, name in enumerate(random.sample(paths, 50)):
        team = random.sample(users[1:], 5)
        owner = USER if n % 6 == 0 else team[0]
        path, text = f"{owner}/{name}", f"The {name.replace('-', ' ')} project."
        public = random.choice(VISIBILITIES[1:])
        tables["projects"].append((path, owner, text, random.randrange(900), name, public))
        roles = {owner: "maintainer"} | {user: random.choice(ROLES) for user in team[1:]}
        tables["members"] += [(path, user, role) for user, role in roles.items()]
        for kind, words, most in (("issues", PROBLEMS, 30), ("merge_requests", VERBS, 20)):
            form = "{0}" if kind == "issues" else "{0} the {1}"
            titles = [form.format(word, part).format(part) for word in words for part in PARTS]
            for number, title in enumerate(random.sample(titles, random.randrange(8, most)), 1):
                people, made = (
                    random.sample(sorted(roles), 2),
                    web.day_before(random, web.TODAY, 300),
                )
                if kind == "merge_requests":
                    state = random.choice(MERGE_STATES)
                    tables[kind].append((path, number, title, *people, state, made))
                    continue
                about = random.choice(LABELS), random.choice(MILESTONES), random.choice(STATES)
                row = (
                    len(tables[kind]) + 1,
                    path,
                    number,
                    title,
                    f"{title}.",
                    *people,
                    *about,
                    made,
                )
                tables[kind].append(row)
        for _ in range(random.randrange(20, 80)):
            message = f"{random.choice(VERBS)} the {random.choice(PARTS)}"
            commit = f"{random.getrandbits(40):010x}", path, random.choice(sorted(roles)), message
            tables["commits"].append((*commit, web.day_before(random, web.TODAY, 400)))
    return tables


SITE = web.Site(
    "gitlab",
    "Forge",
    web.Data("forge", SCHEMA, make_rows),
    nav={"Projects": "/", "New project": "/projects/new", "My issues": "/issues"}
    | {"My merge requests": "/merge_requests"},
    search="Search projects",
    account=(USER, "engine1843"),
)
PROJECTS = web.Listing(
    {"Project": "path /{path}", "Description": "description", "Stars": "stars"},
    "SELECT * FROM all_projects",
    search="path",
    sorts={"Name": "name", "Most stars": "stars DESC, name"},
)
ISSUES = web.Listing(
    {"Issue": "title /{project}/issues/{number}", "Author": "author", "Assignee": "assignee"}
    | {"Label": "label", "Milestone": "milestone", "State": "state"},
    "SELECT * FROM issues WHERE project = ?",
    search="title",
    filters=[
        web.Filter("State", "state", STATES),
        web.Filter("Label", "label", LABELS),
        web.Filter("Milestone", "milestone", MILESTONES),
    ],
    sorts={"Newest": "created DESC, number DESC", "Oldest": "created, number"},
)
MERGE_REQUESTS = web.Listing(
    {"Title": "title", "Project": "project /{project}", "Author": "author", "Reviewer": "reviewer"}
    | {"State": "state", "Created": "created"},
    "SELECT * FROM merge_requests WHERE project = ?",
    search="title",
    filters=[web.Filter("State", "state", MERGE_STATES)],
    sorts={"Newest": "created DESC, number DESC"},
)
COMMITS = web.Listing(
    {"Message": "message", "Author": "author", "Date": "created", "Commit": "hash"},
    "SELECT * FROM commits WHERE project = ?",
    search="author || ' ' || message",
    filters=[web.Filter("Date", "created")],
    sorts={"Newest": "created DESC, hash"},
)
MEMBERS = web.Listing(
    {"Member": "user", "Role": "role"},
    "SELECT * FROM members WHERE project = ?",
    sorts={"Name": "user"},
)


@SITE.page("")
def home(visit: web.Visit) -> web.Page:
    return web.Page("Projects", PROJECTS)


@SITE.page("/search")
def search(visit: web.Visit) -> web.Page:
    return web.Page("Search results", PROJECTS)


@SITE.page("/issues")
def my_issues(visit: web.Visit) -> web.Page:
    sql = "SELECT * FROM issues WHERE assignee = ?"
    return web.Page("Issues assigned to me", ISSUES._replace(sql=sql, parameters=[visit.member]))


@SITE.page("/merge_requests")
def my_merge_requests(visit: web.Visit) -> web.Page:
    sql = "SELECT * FROM merge_requests WHERE reviewer = ?"
    listing = MERGE_REQUESTS._replace(sql=sql, parameters=[visit.member])
    return web.Page("Merge requests to review", listing)


@SITE.page("/projects/new")
def new_project(visit: web.Visit) -> web.Page:
    fields = [
        web.Field("Project name", "name"),
        web.Field("Description", "description"),
        web.Field("Visibility", "visibility", options=VISIBILITIES),
    ]
    return web.Page("New project", web.Form("", "Create project", fields))


SITE.change(
    "/projects/new",
    "INSERT INTO projects VALUES (:user || '/' || :name, :user, :description, 0, :name, "
    ":visibility)",
    "INSERT INTO members VALUES (:user || '/' || :name, :user, 'maintainer')",
    then="/{user}/{name}",
)


@SITE.page("/{owner}/{name}")
def project(visit: web.Visit, owner: str, name: str) -> web.Page:
    path = f"{owner}/{name}"
    row = visit.row("SELECT * FROM all_projects WHERE path = ?", path)
    sql = "SELECT * FROM stars WHERE project = ? AND user = ?"
    star = "Unstar" if visit.rows(sql, path, visit.user) else "Star"
    pages = {"Issues": "issues", "New issue": "issues/new", "Merge requests": "merge_requests"}
    pages |= {"Commits": "commits", "Members": "members"}
    return web.Page(
        path,
        web.Text(row["description"]),
        web.Links("", [(text, f"/{path}/{page}") for text, page in pages.items()]),
        web.Facts({"Stars": row["stars"], "Visibility": row["visibility"]}),
        web.Form(f"/{path}/{star.lower()}", star),
    )


PROJECT = ":owner || '/' || :name"
SITE.change(
    "/{owner}/{name}/star", f"REPLACE INTO stars VALUES ({PROJECT}, :user)", then="/{owner}/{name}"
)
SITE.change(
    "/{owner}/{name}/unstar",
    f"DELETE FROM stars WHERE project = {PROJECT} AND user = :user",
    then="/{owner}/{name}",
)


@SITE.page("/{owner}/{name}/(?P<kind>issues|merge_requests|commits|members)")
def part_of_project(visit: web.Visit, owner: str, name: str, kind: str) -> web.Page:
    listings = {"issues": ISSUES, "merge_requests": MERGE_REQUESTS, "commits": COMMITS}
    listing = listings.get(kind, MEMBERS)._replace(parameters=[f"{owner}/{name}"])
    fields = [web.Field("User name", "member"), web.Field("Role", "role", options=ROLES)]
    forms = [web.Form("", "Add member", fields)] if kind == "members" else []
    title = kind.replace("_", " ").capitalize()
    return web.Page(f"{title} of {owner}/{name}", *forms, listing)


SITE.change(
    "/{owner}/{name}/members",
    f"REPLACE INTO members SELECT {PROJECT}, name, :role FROM users WHERE name = :member",
)


@SITE.page("/{owner}/{name}/issues/new")
def new_issue(visit: web.Visit, owner: str, name: str) -> web.Page:
    members = visit.rows("SELECT user FROM members WHERE project = ? ORDER BY 1", f"{owner}/{name}")
    fields = [
        web.Field("Title", "title"),
        web.Field("Assignee", "assignee", options=[user for (user,) in members]),
        web.Field("Label", "label", options=LABELS),
    ]
    return web.Page(f"New issue in {owner}/{name}", web.Form("", "Create issue", fields))


SITE.change(
    "/{owner}/{name}/issues/new",
    f"INSERT INTO issues SELECT NULL, {PROJECT}, coalesce(max(number), 0) + 1, :title, :title, "
    f":user, :assignee, :label, 'none', 'open', :today FROM issues WHERE project = {PROJECT}",
    then="/{owner}/{name}/issues",
)


@SITE.page("/{owner}/{name}/issues/{number}")
def issue(visit: web.Visit, owner: str, name: str, number: str) -> web.Page:
    sql = "SELECT * FROM issues WHERE project = ? AND number = ?"
    row = visit.row(sql, f"{owner}/{name}", number)
    facts = ("Project", "Author", "Assignee", "Label", "Milestone", "State", "Created")
    change = "Close issue" if row["state"] == "open" else "Reopen issue"
    state = {"state": "closed" if row["state"] == "open" else "open"}
    return web.Page(
        row["title"],
        web.Text(row["text"]),
        web.Facts({fact: row[fact.lower()] for fact in facts}),
        web.Form(visit.path, change, hidden=state),
        *(
            web.Form(f"{visit.path}/{column}", f"Set {column}", [field])
            for column, field in (
                ("label", web.Field("New label", "label", options=LABELS)),
                ("milestone", web.Field("New milestone", "milestone", options=MILESTONES)),
            )
        ),
    )


for column in ("state", "label", "milestone"):
    SITE.change(
        "/{owner}/{name}/issues/{number}" + (f"/{column}" if column != "state" else ""),
        f"UPDATE issues SET {column} = :{column} WHERE project = {PROJECT} AND number = :number",
        then="/{owner}/{name}/issues/{number}",
    )
