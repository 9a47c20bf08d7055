"""The forge: projects with issues, merge requests, commits and members."""

import random
from itertools import product

import envs.webarena.sites.engine as web

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
STATES = ("open", "closed", "merged")  # an issue is not merged
VISIBILITIES = ("private", "internal", "public")
USER = "ada.quill"


def make_rows(random: random.Random) -> web.Rows:
    names = ["Ada Quill", *web.invent_people(random, 60)]
    users = [name.lower().replace(" ", ".") for name in names]
    yield from (("users", pair) for pair in zip(users, names))
    for number, words in enumerate(random.sample([*product(ADJECTIVES, NOUNS)], 50)):
        team = random.sample(users[1:], 5)
        team[0] = USER if number % 6 == 0 else team[0]
        name, path = "-".join(words), f"{team[0]}/{'-'.join(words)}"
        about = f"The {' '.join(words)} project.", random.randrange(900), name
        yield "projects", (path, team[0], *about, random.choice(VISIBILITIES[1:]))
        for user in team:
            yield "members", (path, user, random.choice(ROLES) if user != team[0] else ROLES[-1])
        topics = random.sample([*product(PROBLEMS, PARTS)], random.randrange(8, 30))
        for index, (problem, part) in enumerate(topics, 1):
            title, people = problem.format(part), random.sample(team, 2)
            labels = random.choice(LABELS), random.choice(MILESTONES), random.choice(STATES[:2])
            issue = path, index, title, f"{title}.", *people, *labels
            yield "issues", (None, *issue, web.recent_day(random, 300))
        topics = random.sample([*product(VERBS, PARTS)], random.randrange(8, 20))
        for index, (verb, part) in enumerate(topics, 1):
            request = path, index, f"{verb} the {part}", *random.sample(team, 2)
            yield "merge_requests", (*request, random.choice(STATES), web.recent_day(random, 300))
        for _ in range(random.randrange(20, 80)):
            message = f"{random.choice(VERBS)} the {random.choice(PARTS)}"
            commit = f"{random.getrandbits(40):010x}", path, random.choice(team), message
            yield "commits", (*commit, web.recent_day(random, 400))


SITE = web.Site(
    "gitlab",
    "Forge",
    web.Data("forge", SCHEMA, make_rows),
    nav={"Projects": "/", "New project": "/projects/new", "My issues": "/issues"}
    | {"My reviews": "/merge_requests"},
    search="Search projects",
    account=(USER, "engine1843"),
)
PROJECTS = web.Listing(
    "path /{path}, description, stars",
    "SELECT * FROM all_projects",
    search="path",
    sorts={"Name": "name", "Most stars": "stars DESC, name"},
)
ISSUES = web.Listing(
    "title /{project}/issues/{number}, author, assignee, label, milestone, state",
    "SELECT * FROM issues WHERE project = :owner || '/' || :name",
    search="title",
    filters=[
        web.Filter("State", "state", STATES[:2]),
        web.Filter("Label", "label", LABELS),
        web.Filter("Milestone", "milestone", MILESTONES),
    ],
    sorts={"Newest": "created DESC, number DESC", "Oldest": "created, number"},
)
MERGE_REQUESTS = web.Listing(
    "title, project /{project}, author, reviewer, state, created",
    "SELECT * FROM merge_requests WHERE project = :owner || '/' || :name",
    search="title",
    filters=[web.Filter("State", "state", STATES)],
    sorts={"Newest": "created DESC, number DESC"},
)
SITE.page("", "Projects", PROJECTS)
SITE.page("/search", "Search results", PROJECTS)
SITE.page(
    "/issues",
    "Issues assigned to me",
    ISSUES._replace(sql="SELECT * FROM issues WHERE assignee = :user"),
)
SITE.page(
    "/merge_requests",
    "Merge requests that I review",
    MERGE_REQUESTS._replace(sql="SELECT * FROM merge_requests WHERE reviewer = :user"),
)
SITE.page(
    "/projects/new",
    "New project",
    web.Form("", "Create project", {"Name": (), "Description": (), "Visibility": VISIBILITIES}),
)
SITE.change(
    "/projects/new",
    "INSERT INTO projects VALUES (:user || '/' || :name, :user, :description, 0, :name, "
    ":visibility)",
    "INSERT INTO members VALUES (:user || '/' || :name, :user, 'maintainer')",
    then="/{user}/{name}",
)
HERE, PATH = "/{owner}/{name}", ":owner || '/' || :name"
SITE.page(
    HERE,
    "{path}",
    web.Text("{description}"),
    web.Links(
        {"Issues": f"{HERE}/issues", "New issue": f"{HERE}/issues/new"}
        | {"Merge requests": f"{HERE}/merge_requests", "Commits": f"{HERE}/commits"}
        | {"Members": f"{HERE}/members"}
    ),
    web.Facts("visibility, stars, starred"),
    web.Form(f"{HERE}/star", "Star"),
    web.Form(f"{HERE}/unstar", "Unstar"),
    row="SELECT *, iif(EXISTS (SELECT * FROM stars WHERE project = path AND user = :user), 'yes', "
    f"'no') AS starred FROM all_projects WHERE path = {PATH}",
)
SITE.change(f"{HERE}/star", f"REPLACE INTO stars VALUES ({PATH}, :user)", then=HERE)
SITE.change(
    f"{HERE}/unstar", f"DELETE FROM stars WHERE project = {PATH} AND user = :user", then=HERE
)
SITE.page(f"{HERE}/issues", "Issues of {owner}/{name}", ISSUES)
SITE.page(f"{HERE}/merge_requests", "Merge requests of {owner}/{name}", MERGE_REQUESTS)
SITE.page(
    f"{HERE}/commits",
    "Commits of {owner}/{name}",
    web.Listing(
        "message, author, created, hash",
        f"SELECT * FROM commits WHERE project = {PATH}",
        search="author || ' ' || message",
        filters=[web.Filter("Date", "created")],
        sorts={"Newest": "created DESC, hash"},
    ),
)
SITE.page(
    f"{HERE}/members",
    "Members of {owner}/{name}",
    web.Form("", "Add member", {"User name": (), "Role": ROLES}),
    web.Listing("user, role", f"SELECT * FROM members WHERE project = {PATH}"),
)
SITE.change(
    f"{HERE}/members",
    f"REPLACE INTO members SELECT {PATH}, name, :role FROM users WHERE name = :user_name",
)
SITE.page(
    f"{HERE}/issues/new",
    "New issue in {owner}/{name}",
    web.Form("", "Create issue", {"Title": (), "Assignee": (), "Label": LABELS}),
)
SITE.change(
    f"{HERE}/issues/new",
    f"INSERT INTO issues SELECT NULL, {PATH}, coalesce(max(number), 0) + 1, :title, :title, "
    f":user, :assignee, :label, 'none', 'open', :today FROM issues WHERE project = {PATH}",
    then=f"{HERE}/issues",
)
SITE.page(
    f"{HERE}/issues/{{number}}",
    "{title}",
    web.Text("{text}"),
    web.Facts("project /{project}, author, assignee, label, milestone, state, created"),
    web.Form("", "Close issue", hidden={"new_state": "closed"}),
    web.Form("", "Reopen issue", hidden={"new_state": "open"}),
    row=f"SELECT * FROM issues WHERE project = {PATH} AND number = :number",
)
SITE.change(
    f"{HERE}/issues/{{number}}",
    f"UPDATE issues SET state = :new_state WHERE project = {PATH} AND number = :number",
)
