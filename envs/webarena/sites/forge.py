"""The forge: projects with issues, merge requests, commits and members."""

import random
from itertools import product

import envs.webarena.sites.engine as web

SCHEMA = """
CREATE TABLE users (name TEXT PRIMARY KEY) STRICT;
CREATE TABLE projects (path TEXT PRIMARY KEY, owner TEXT, description TEXT, stars INTEGER,
    name TEXT CHECK (name NOT GLOB '*[^a-z0-9-]*'), visibility TEXT) STRICT;
CREATE TABLE issues (id INTEGER PRIMARY KEY, project TEXT, number INTEGER, title TEXT, text TEXT,
    author TEXT, assignee TEXT, label TEXT, state TEXT, created TEXT,
    UNIQUE (project, title)) STRICT;
CREATE TABLE commits (hash TEXT PRIMARY KEY, project TEXT, author TEXT, message TEXT, created TEXT)
    STRICT;
CREATE TABLE merge_requests (id INTEGER PRIMARY KEY, project TEXT, number INTEGER, title TEXT,
    branch TEXT, author TEXT, state TEXT, created TEXT, UNIQUE (project, title)) STRICT;
CREATE TABLE members (project TEXT, user TEXT, role TEXT, PRIMARY KEY (project, user)) STRICT;
CREATE INDEX commits_of_project ON commits (project);
CREATE INDEX issues_of_project ON issues (project);
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
ROLES = ("guest", "reporter", "developer", "maintainer")
STATES = ("open", "closed")
OUTCOMES = ("open", "merged", "closed")
VISIBILITIES = ("private", "internal", "public")
USER = "ada.quill"


def make_rows(random: random.Random) -> web.Rows:
    names = ["Ada Quill", *web.invent_people(random, 60)]
    users = [name.lower().replace(" ", ".") for name in names]
    teams: dict[str, list[str]] = {}
    yield from (("users", (user,)) for user in users)
    for number, words in enumerate(random.sample([*product(ADJECTIVES, NOUNS)], 50)):
        team = random.sample(users[1:], 5)
        team[0] = USER if number % 6 == 0 else team[0]
        name, path = "-".join(words), f"{team[0]}/{'-'.join(words)}"
        teams[path] = team
        about = f"The {' '.join(words)} project.", random.randrange(900), name
        yield "projects", (path, team[0], *about, random.choice(VISIBILITIES[1:]))
        for user in team:
            yield "members", (path, user, random.choice(ROLES) if user != team[0] else ROLES[-1])
        topics = random.sample([*product(PROBLEMS, PARTS)], random.randrange(8, 30))
        for index, (problem, part) in enumerate(topics, 1):
            title, people = problem.format(part), random.sample(team, 2)
            issue = path, index, title, f"{title}.", *people, random.choice(LABELS)
            yield "issues", (None, *issue, random.choice(STATES), web.recent_day(random, 300))
        for _ in range(random.randrange(20, 80)):
            message = f"{random.choice(VERBS)} the {random.choice(PARTS)}"
            commit = f"{random.getrandbits(40):010x}", path, random.choice(team), message
            yield "commits", (*commit, web.recent_day(random, 400))
    for path, team in teams.items():
        changes = random.sample([*product(VERBS, PARTS)], random.randrange(3, 15))
        for number, (verb, part) in enumerate(changes, 1):
            title, branch = f"{verb} the {part}", f"{verb}-{part}".lower().replace(" ", "-")
            request = path, number, title, branch, random.choice(team), random.choice(OUTCOMES)
            yield "merge_requests", (None, *request, web.recent_day(random, 200))


SITE = web.Site(
    "gitlab",
    "forge",
    "http://gitlab.com",
    "Forge",
    nav={"Projects": "/", "New project": "/projects/new", "My issues": "/issues"},
    search="Search projects",
    user=USER,
)
PROJECTS = web.Listing(
    "path /{path}, description, stars",
    "SELECT * FROM projects",
    [web.keyword("path")],
    {"Name": "name", "Most stars": "stars DESC, name"},
)
HERE, PATH = "/{owner}/{name}", ":owner || '/' || :name"
PROJECT = f"SELECT * FROM projects WHERE path = {PATH}"
ISSUES = web.Listing(
    "title /{project}/issues/{number}, author, assignee, label, state",
    f"SELECT * FROM issues WHERE project = {PATH}",
    [web.keyword("title"), web.Filter("State", STATES), web.Filter("Label", LABELS)],
    {"Newest": "created DESC, number DESC", "Oldest": "created, number"},
)
REQUESTS = web.Listing(
    "title /{project}/merge_requests/{number}, author, branch, state",
    f"SELECT * FROM merge_requests WHERE project = {PATH}",
    [web.keyword("title"), web.Filter("State", OUTCOMES)],
    {"Newest": "created DESC, number DESC"},
)
SITE.page("", "Projects", PROJECTS)
SITE.page("/search", "Search results", PROJECTS)
SITE.page(
    "/issues",
    "Issues assigned to me",
    ISSUES._replace(sql="SELECT * FROM issues WHERE assignee = :user"),
)
SITE.page(
    "/projects/new",
    "New project",
    web.Form(
        "Create project",
        {"Name": (), "Description": (), "Visibility": VISIBILITIES},
        (
            "INSERT INTO projects VALUES (:user || '/' || :name, :user, :description, 0, :name, "
            ":visibility)",
            "INSERT INTO members VALUES (:user || '/' || :name, :user, 'maintainer')",
        ),
        then="/{user}/{name}",
    ),
)
SITE.page(
    HERE,
    "{path}",
    web.Facts("description, visibility, stars"),
    web.Links(
        {"Issues": f"{HERE}/issues", "New issue": f"{HERE}/issues/new"}
        | {"Merge requests": f"{HERE}/merge_requests"}
        | {"Commits": f"{HERE}/commits", "Members": f"{HERE}/members"}
    ),
    row=PROJECT,
)
SITE.page(f"{HERE}/issues", "Issues of {path}", ISSUES, row=PROJECT)
SITE.page(f"{HERE}/merge_requests", "Merge requests of {path}", REQUESTS, row=PROJECT)
SITE.page(
    f"{HERE}/commits",
    "Commits of {path}",
    web.Listing(
        "message, author, created, hash",
        "SELECT * FROM commits WHERE project = :path",
        [web.keyword("author || ' ' || message")],
        {"Newest": "created DESC, hash"},
    ),
    row=PROJECT,
)
SITE.page(
    f"{HERE}/members",
    "Members of {path}",
    web.Form(
        "Add member",
        {"User name": (), "Role": ROLES},
        "REPLACE INTO members SELECT :path, name, :role FROM users WHERE name = :user_name",
    ),
    web.Listing("user, role", "SELECT * FROM members WHERE project = :path"),
    row=PROJECT,
)
SITE.page(
    f"{HERE}/issues/new",
    "New issue in {path}",
    web.Form(
        "Create issue",
        {"Title": (), "Assignee": (), "Label": LABELS},
        "INSERT INTO issues SELECT NULL, :path, coalesce(max(number), 0) + 1, :title, :title, "
        ":user, :assignee, :label, 'open', :today FROM issues WHERE project = :path",
        then=f"{HERE}/issues",
    ),
    row=PROJECT,
)
SET_STATE = "UPDATE {} SET state = '{}' WHERE id = :id"
SITE.page(
    f"{HERE}/issues/{{number}}",
    "{title}",
    web.Facts("text, project /{project}, author, assignee, label, state, created"),
    web.Form("Close issue", {}, SET_STATE.format("issues", "closed")),
    web.Form("Reopen issue", {}, SET_STATE.format("issues", "open")),
    row=f"SELECT * FROM issues WHERE project = {PATH} AND number = :number",
)
SET_OPEN = f"{SET_STATE} AND state = 'open'"  # what is merged or closed stays so
SITE.page(
    f"{HERE}/merge_requests/{{number}}",
    "{title}",
    web.Facts("project /{project}, branch, author, state, created"),
    web.Form("Merge", {}, SET_OPEN.format("merge_requests", "merged")),
    web.Form("Close merge request", {}, SET_OPEN.format("merge_requests", "closed")),
    row=f"SELECT * FROM merge_requests WHERE project = {PATH} AND number = :number",
)
