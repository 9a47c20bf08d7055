"""Fill in "official" in tests/data/webarena_evaluators.json: what WebArena's own evaluators say.

Run it in another environment, because libwebarena needs packages that we do not have:

    python3.11 -m venv V && V/bin/pip install --no-deps libwebarena==0.0.5
    V/bin/pip install beartype==0.12.0 nltk requests text_generation aiolimiter openai gymnasium \
        playwright pillow beautifulsoup4
    V/bin/python tests/webarena_official.py

NLTK's model of sentences is a download; it is replaced by "the text is one sentence".
"""

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

PATH = Path(__file__).parent / "data" / "webarena_evaluators.json"


class FakePage:
    """A page with made-up contents: locator -> value; a locator that is not listed fails."""

    def __init__(self, pages: dict, url: str) -> None:
        self.pages, self.url = pages, url
        self.context = SimpleNamespace(new_page=lambda: FakePage(pages, ""))

    def goto(self, url: str) -> None:
        self.url = url

    def content(self) -> str:
        return self.pages.get(self.url, {}).get("", "")

    def evaluate(self, script: str) -> object:
        return self.pages[self.url][script.removeprefix("() => ")]

    def close(self) -> None:
        pass


def official(case: dict, pages: dict) -> float:
    for name in ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "WIKIPEDIA", "MAP", "HOMEPAGE"):
        os.environ.setdefault(name, "http://shop.com")
    from nltk.tokenize.destructive import NLTKWordTokenizer
    from webarena.evaluation_harness import evaluators, helper_functions

    evaluators.word_tokenize = NLTKWordTokenizer().tokenize
    evaluators.time = SimpleNamespace(sleep=lambda seconds: None)
    helper_functions.generate_from_openai_chat_completion = lambda **_: case["judge"]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"intent": "?", "eval": case["eval"]}, file)
        file.flush()
        page = helper_functions.PseudoPage(FakePage(pages, case["url"]), case["url"])
        evaluator = evaluators.evaluator_router(file.name)
        return evaluator([{}, {"answer": case["answer"]}], file.name, page, None)


if __name__ == "__main__":
    table = json.loads(PATH.read_text())
    rows = [case | {"official": official(case, table["pages"])} for case in table["cases"]]
    lines = ",\n".join(json.dumps(row) for row in rows)
    PATH.write_text(f'{{"pages": {json.dumps(table["pages"])},\n"cases": [\n{lines}\n]}}\n')
    print(len(rows), "cases,", int(sum(row["official"] for row in rows)), "accepted")
