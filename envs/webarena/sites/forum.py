"""The forum: boards, posts, comments, votes."""

import random
from itertools import product

import envs.webarena.sites.engine as web

SCHEMA = """
CREATE TABLE profiles (name TEXT PRIMARY KEY, joined TEXT, bio TEXT) STRICT;
CREATE TABLE boards (name TEXT PRIMARY KEY, description TEXT) STRICT;
CREATE TABLE posts (id INTEGER PRIMARY KEY, board TEXT, author TEXT, title TEXT, text TEXT,
    created TEXT, points INTEGER) STRICT;
CREATE TABLE comments (id INTEGER PRIMARY KEY, post INTEGER, author TEXT, text TEXT, created TEXT,
    UNIQUE (post, author, text)) STRICT;
CREATE TABLE votes (post INTEGER, user TEXT, value INTEGER CHECK (value IN (1, -1)),
    PRIMARY KEY (post, user)) STRICT;
CREATE INDEX comments_of_post ON comments (post);
CREATE VIEW all_posts AS SELECT p.*, points + coalesce((SELECT sum(value) FROM votes WHERE post =
    p.id), 0) AS score, (SELECT count(*) FROM comments WHERE post = p.id) AS comments FROM posts p;
"""
BOARDS = {
    "books": "novel,poem,library card,bookshelf,short story",
    "cooking": "soup,sourdough,curry,frying pan,salad",
    "cycling": "saddle,bike lane,tour,helmet,tire",
    "diy": "shelf,drill,paint,door,workbench",
    "gaming": "board game,puzzle,console,speedrun,chess opening",
    "gardening": "tomato,compost,rose,lawn,greenhouse",
    "hiking": "trail,boot,backpack,map,mountain hut",
    "movies": "documentary,sequel,soundtrack,cinema,short film",
    "music": "guitar,concert,album,piano,choir",
    "photography": "lens,portrait,tripod,film roll,darkroom",
    "programming": "compiler,database,bug,keyboard,test",
    "science": "telescope,fossil,experiment,battery,virus",
    "sports": "marathon,swimming pool,racket,referee,goalkeeper",
    "travel": "train,hostel,passport,suitcase,island",
}
TITLES = (
    "What is the best {} for a beginner?,My first {} after ten years,Why is every {} so expensive?,"
    "How I repaired an old {},Is it time for a new {}?,A {} that changed my mind,"
    "I found this {} in the attic,Unpopular opinion about the {},Please recommend a {},"
    "The history of the {}"
).split(",")
QUALITIES = "cheap,small,famous,forgotten,modern,simple,strange,yellow,local,perfect".split(",")
COMMENTS = (
    "I agree with you.,That is new to me.,Please show us a picture.,I would not do that.,"
    "This helped me a lot.,Where did you read that?,Thank you for sharing.,It depends."
).split(",")
SYLLABLES = "ba,do,fi,ka,lo,mi,nu,pe,ra,so,ti,vo,wen,zar".split(",")
USER = "marvin"


def make_rows(random: random.Random) -> web.Rows:
    names = ["".join(parts) for parts in product(SYLLABLES, SYLLABLES, ("x", "lin", "rd", "sky"))]
    users = [USER, *random.sample(names, 200)]
    for user in users:
        yield "profiles", (user, web.recent_day(random, 2000), "I am new here.")
    for number, (board, things) in enumerate(BOARDS.items()):
        yield "boards", (board, f"All about {board}.")
        topics = [*product(TITLES, QUALITIES, things.split(","))]
        for post, (title, *topic) in enumerate(random.sample(topics, 60), 60 * number + 1):
            title, date = title.format(" ".join(topic)), web.recent_day(random, 300)
            text = f"{title} Tell me what you think."
            row = board, random.choice(users[:40]), title, text, date, random.randrange(-5, 400)
            yield "posts", (post, *row)
            for remark in random.sample(COMMENTS, random.randrange(7)):
                when = max(date, web.recent_day(random, 20))
                yield "comments", (None, post, random.choice(users[1:]), remark, when)


SITE = web.Site(
    "reddit",
    "forum",
    "http://reddit.com",
    "Forum",
    nav={"Home": "/", "Boards": "/boards", "My profile": f"/users/{USER}"},
    search="Search posts",
    user=USER,
)
POSTS = web.Listing(
    "title /posts/{id}, board /boards/{board}, author /users/{author}, score, comments, created",
    "SELECT * FROM all_posts",
    [web.keyword("title")],
    {
        "Hot": f"score - 4 * (julianday('{web.TODAY}') - julianday(created)) DESC, id",
        "New": "created DESC, id DESC",
        "Top": "score DESC, id",
        "Most comments": "comments DESC, id",
    },
)
SITE.page("", "Posts", POSTS)
SITE.page("/search", "Search results", POSTS)
SITE.page("/boards", "Boards", web.Links({name: f"/boards/{name}" for name in BOARDS}))
SITE.page(
    "/boards/{board}",
    "{board}",
    web.Links({"Write a post": "/boards/{board}/submit"}),
    POSTS._replace(sql="SELECT * FROM all_posts WHERE board = :board"),
    row="SELECT * FROM boards WHERE name = :board",
)
SITE.page(
    "/boards/{board}/submit",
    "New post in {board}",
    web.Form(
        "Submit post",
        {"Title": (), "Text": ()},
        "INSERT INTO posts VALUES (NULL, :board, :user, :title, :text, :today, 1)",
        then="/posts/{new}",
    ),
    row="SELECT * FROM boards WHERE name = :board",
)
VOTE = "REPLACE INTO votes VALUES (:id, :user, {})"
SITE.page(
    "/posts/{id}",
    "{title}",
    web.Facts("text, board /boards/{board}, author /users/{author}, created, score, vote"),
    web.Form("Upvote", {}, VOTE.format(1)),
    web.Form("Downvote", {}, VOTE.format(-1)),
    web.Form(
        "Add comment",
        {"Comment": ()},
        "INSERT INTO comments VALUES (NULL, :id, :user, :comment, :today)",
    ),
    web.Listing(
        "author /users/{author}, text, created",
        "SELECT * FROM comments WHERE post = :id",
        sorts={"Oldest": "id"},
        title="Comments",
    ),
    row="SELECT p.*, CASE value WHEN 1 THEN 'up' WHEN -1 THEN 'down' ELSE 'none' END AS vote "
    "FROM all_posts p LEFT JOIN votes v ON v.post = p.id AND v.user = :user WHERE p.id = :id",
)
SITE.page(
    "/users/{name}",
    "{name}",
    web.Facts("joined, bio"),
    web.Form(
        "Save my bio",
        {"New bio": ()},
        "UPDATE profiles SET bio = :new_bio WHERE name = :user",
    ),
    POSTS._replace(sql="SELECT * FROM all_posts WHERE author = :name"),
    row="SELECT * FROM profiles WHERE name = :name",
)
