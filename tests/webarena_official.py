"""Write tests/data/webarena_evaluators.json: what WebArena's evaluators say about made-up cases.

Run it in another environment, because libwebarena needs packages that we do not have:

    python3.11 -m venv V && V/bin/pip install --no-deps libwebarena==0.0.5
    V/bin/pip install beartype==0.12.0 nltk requests text_generation aiolimiter openai gymnasium \
        playwright pillow beautifulsoup4
    V/bin/python tests/webarena_official.py

NLTK's model of sentences is a download; it is replaced by "the text is one sentence".
"""

import itertools
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

SHOP = "http://shop.com"
STRINGS = [  # reference_answers, answers
    ({"exact_match": "Copper Kettle"}, ["copper kettle", " 'Copper Kettle' ", "Copper Kettles"]),
    ({"exact_match": "Copper Kettle"}, ["\"'copper kettle'\"", "copper  kettle", "copper kettle."]),
    ({"exact_match": "N/A"}, ["n/a", "N/A.", "", '"N/A"']),
    ({"exact_match": "'"}, ["'", "", "''", "'''"]),
    (
        {"must_include": ["5"]},
        ["5", "it is 5.", "15", "5 kg", "5kg", "1,5", "5,", "(5)", "$5", "5%"],
    ),
    ({"must_include": ["5"]}, ["0.5", "5.0", "5-6", "a5", "no. 5!", "'5'", '"5"', "5's", "5:30"]),
    ({"must_include": ["5"]}, ["x/5", "5\n", "five", "", "#5", "5;6", "5 .", "5.)", "[5]", "5..6"]),
    ({"must_include": ["a"]}, ["a", "an", "A.", "b a c", "ba", "a-b", "a,b", "a, b"]),
    ({"must_include": ["5", "6"]}, ["56", "5 and 6", "5", "65", "-5.6"]),
    ({"must_include": ["red"]}, ["Red", "hundred", "re d", "'red'"]),
    ({"must_include": ["Anna", "Ben Ode"]}, ["anna, ben ode", "ben ode", "Anna; Ben  Ode"]),
    ({"must_include": []}, ["", "anything"]),
    ({"exact_match": "7", "must_include": ["7"]}, ["7", "7 days"]),
]
JUDGED = [  # reference, answers, replies of the judge
    (["12 minutes"], ["12min"], ["Correct.", "incorrect", "This is partially correct", "CORRECT"]),
    (["a", "b"], ["a b"], ["correct", "incorrect"]),
    ("N/A", ["n/a"], ["different", "same"]),
    ("N/A", ["there is no such road"], ["Same", "different", "the same; not different"]),
]
URLS = [  # reference_url, last URLs
    (f"{SHOP}/kettles", ["", "/", "/?page=2", "/copper", "s", "#top", "?a=1&a=2"]),
    (
        f"{SHOP}/kettles?color=red",
        ["?color=red", "?color=blue", "?color=red&page=2", "/x?color=red"],
    ),
    (
        f"{SHOP}/kettles?color=red",
        ["?color=", "?color=redder", "?Color=red", "?color=blue&color=red"],
    ),
    (
        f"{SHOP}/kettles?a=1 |OR| {SHOP}/kettles?a=2&b=3",
        ["?a=1", "?a=2&b=3", "?a=1&b=3", "?a=3&b=3"],
    ),
    (f"{SHOP}/x |OR| {SHOP}/kettles", ["", "/5", "?q=%20"]),
    ("shop.com/kettles", [""]),
    (f"{SHOP}/kettles?note=", ["", "?note=x"]),
    (f"{SHOP}/kettles/", ["", "/"]),
]
PAGES = {  # URL -> locator -> value; a locator that is not listed fails
    SHOP: {"": "<p>Tea &amp; Coffee</p>", "document.title": "Home", "document.none": None},
    f"{SHOP}/o/5": {"document.status": " Shipped ", "[...document.all].length": 3, "": "order 5"},
    "http://reddit.com/f/tea/12/": {"": "Green or black?"},
}
TARGETS = [  # url, locator, required_contents, URL of the last page
    ("last", "", {"must_include": ["Tea & Coffee"]}, SHOP),
    ("last", "", {"must_include": ["Tea &amp; Coffee"]}, SHOP),
    ("last", " ", {"must_include": ["tea", "juice |OR| coffee"]}, SHOP),
    ("last", "", {"must_include": ["tea", "juice |OR| milk"]}, SHOP),
    ("last", "document.title", {"exact_match": "home"}, SHOP),
    ("last", "document.title", {"exact_match": "hom"}, SHOP),
    ("last", "document.title", {"must_include": ["hom"]}, SHOP),
    ("last", "document.none", {"exact_match": "None"}, SHOP),
    ("last", "document.gone", {"exact_match": ""}, SHOP),
    ("last", "document.gone", {"must_include": ["x"]}, SHOP),
    (f"{SHOP}/o/5", "document.status", {"exact_match": "shipped"}, SHOP),
    (f"{SHOP}/o/5", "[...document.all].length", {"exact_match": "3"}, SHOP),
    (f"{SHOP}/o/5", "document.status", {"must_include": ["s"]}, SHOP),
    (f"{SHOP}/o/5", "", {"exact_match": "x", "must_include": ["order"]}, SHOP),
    *(
        ("func:reddit_get_post_url('__last_url__')", "", {"must_include": ["black"]}, url)
        for url in (
            "http://reddit.com/f/tea/12/green-or-black/-/comment/7",
            "http://reddit.com/f/tea/12/",
            "http://reddit.com/f/tea/12",
            "http://reddit.com/f/tea/13/",
            "http://reddit.com/user/tea/12",
        )
    ),
]


def cases() -> list[dict]:
    """Cases without results: the evaluation, the answer, the last URL, the judge's reply."""
    rows = []
    for references, answers in STRINGS:
        evaluation = {"eval_types": ["string_match"], "reference_answers": references}
        rows += [{"eval": evaluation, "answer": answer} for answer in answers]
    for reference, answers, replies in JUDGED:
        evaluation = {
            "eval_types": ["string_match"],
            "reference_answers": {"fuzzy_match": reference},
        }
        evaluation["string_note"] = "no road"
        for answer, reply in itertools.product(answers, replies):
            rows.append({"eval": evaluation, "answer": answer, "judge": reply})
    for reference, ends in URLS:
        evaluation = {"eval_types": ["url_match"], "reference_url": reference}
        rows += [{"eval": evaluation, "url": f"{SHOP}/kettles{end}"} for end in ends]
    for url, locator, required, last in TARGETS:
        target = {"url": url, "locator": locator, "required_contents": required}
        evaluation = {"eval_types": ["program_html"], "program_html": [target]}
        rows.append({"eval": evaluation, "url": last})
    both = {"eval_types": ["string_match", "url_match"], "reference_url": f"{SHOP}/kettles"}
    both["reference_answers"] = {"exact_match": "yes"}
    for answer, end in itertools.product(("yes", "no"), ("", "/../x", "s")):
        rows.append({"eval": both, "answer": answer, "url": f"{SHOP}/kettle{end}s"})
    return [{"answer": "", "url": SHOP, "judge": "", **row} for row in rows]


class FakePage:
    """Answers from PAGES."""

    def __init__(self, url: str) -> None:
        self.url, self.context = url, SimpleNamespace(new_page=lambda: FakePage(""))

    def goto(self, url: str) -> None:
        self.url = url

    def content(self) -> str:
        return PAGES.get(self.url, {}).get("", "")

    def evaluate(self, script: str) -> object:
        return PAGES[self.url][script.removeprefix("() => ")]

    def close(self) -> None:
        pass


def official(case: dict) -> float:
    for name in ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "WIKIPEDIA", "MAP", "HOMEPAGE"):
        os.environ.setdefault(name, SHOP)
    from nltk.tokenize.destructive import NLTKWordTokenizer
    from webarena.evaluation_harness import evaluators, helper_functions

    evaluators.word_tokenize = NLTKWordTokenizer().tokenize
    evaluators.time = SimpleNamespace(sleep=lambda seconds: None)
    helper_functions.generate_from_openai_chat_completion = lambda **_: case["judge"]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"intent": "?", "eval": case["eval"]}, file)
        file.flush()
        page = helper_functions.PseudoPage(FakePage(case["url"]), case["url"])
        evaluator = evaluators.evaluator_router(file.name)
        return evaluator([{}, {"answer": case["answer"]}], file.name, page, None)


if __name__ == "__main__":
    rows = [case | {"official": official(case)} for case in cases()]
    lines = ",\n".join(json.dumps(row) for row in rows)
    path = Path(__file__).parent / "data" / "webarena_evaluators.json"
    path.write_text(f'{{"pages": {json.dumps(PAGES)},\n"cases": [\n{lines}\n]}}\n')
    print(len(rows), "cases,", int(sum(row["official"] for row in rows)), "accepted")
