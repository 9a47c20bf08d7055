"""Retrieval by words: rankings, ties, the cache; one search for many; which retriever it is."""

import doctest
import math
import random
import re
import shutil
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from retrieval_fakes import (
    BOOK,
    Listed,
    Recorder,
    batched,
    corpus_of,
    numbers,
    random_corpus,
    write_corpus,
)

from envs.searchqa import ranking, remote, retrieval, service
from envs.searchqa.corpus import CorpusError
from envs.searchqa.ranking import Progress, QueryError, RetrievalError, Scored, best
from envs.searchqa.remote import Remote
from envs.searchqa.retrieval import BM25, Batcher, open_retriever, words

pytestmark = pytest.mark.usefixtures("own_cache")


# -------------------------------------------------------------------------------------------- BM25


@pytest.mark.parametrize(
    ("query", "number"),
    [
        ("currency of Kenya", 0),
        ("CAPITAL Kenya?", 2),
        ("capital of Cote d'Ivoire", 3),
        ("Yamoussoukro", 3),
        ("flag", 4),
    ],
)
def test_the_passage_that_shares_rare_words_comes_first(bm25s, query, number):
    assert BM25(BOOK).search([query], 1) == [[BOOK[number]]]


def slow_scores(corpus, query):
    """BM25 by its formula, a loop over words and passages."""
    bags = [Counter(words(title) * 3 + words(text)) for _, title, text in corpus]
    mean = sum(bag.total() for bag in bags) / len(bags)
    scores = [0.0] * len(bags)
    for word in set(words(query)):
        holding = sum(word in bag for bag in bags)
        idf = math.log(1 + (len(bags) - holding + 0.5) / (holding + 0.5))
        for place, bag in enumerate(bags):
            length = 1.5 * (1 - 0.75 + 0.75 * bag.total() / mean)
            scores[place] += idf * bag[word] / (bag[word] + length)
    return scores


def test_scores_are_those_of_the_formula_with_the_title_three_times(bm25s):
    corpus = random_corpus(200)
    for query in ("word1", "word2 word3 word4", "word5 nothing word5"):
        scores = [0.0] * len(corpus)
        for passage, score in BM25(corpus).scored([query], len(corpus))[0]:
            scores[passage.number] = score
        assert scores == pytest.approx(slow_scores(corpus, query), abs=1e-5)


def test_equally_good_passages_come_in_the_order_of_their_numbers_however_many_are_asked_for(bm25s):
    retriever = BM25(random_corpus(500))
    queries = ["word1", "word2 word3", "word4 word4", "word5 word6 word7 word8"]
    for query in queries:
        whole = retriever.scored([query], 500)[0]
        order = sorted(whole, key=lambda each: (-each.score, each.passage.number))
        assert whole == order
        assert len({each.score for each in whole}) < 250  # many ties
        for top_k in (1, 2, 3, 7, 50, 499, 1000):
            assert retriever.scored([query], top_k)[0] == order[:top_k]


def test_the_order_of_a_querys_words_changes_nothing(bm25s):
    retriever = BM25(random_corpus(300))
    query = [f"word{number}" for number in range(20)]
    expected = retriever.scored([" ".join(query)], 300)
    assert retriever.scored([" ".join(reversed(query))], 300) == expected


def test_best_is_a_stable_sort_of_everything():
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, 4, rng.integers(1, 30)) for _ in range(200)]
    draws += [rng.integers(0, 9_000, 4_000), np.maximum(0, rng.integers(-99, 3, 4_000))]
    for scores in (draw.astype(np.float32) for draw in draws):
        for top_k in (1, 2, 5, 40):
            expected = np.argsort(-scores, kind="stable")[:top_k]
            assert best(scores, top_k).tolist() == expected.tolist()


@pytest.mark.parametrize("query", ["", " \n", "?!", "zzzzz", "x", "\ud83d", "\x00", "日本"])
def test_a_query_without_a_known_word_gets_the_first_passages(bm25s, query):
    assert BM25(BOOK).scored([query], 2) == [[Scored(BOOK[0], 0.0), Scored(BOOK[1], 0.0)]]


def test_a_query_of_100_kb_is_answered_soon_and_counts_so_many_words(bm25s):
    corpus = random_corpus(2000, num_words=400)
    retriever = BM25(corpus)
    query = " ".join(f"word{number % 400}" for number in range(14_000))
    began = time.process_time()
    found = retriever.scored([query], 3)
    assert time.process_time() - began < 1
    first = " ".join(f"word{number}" for number in range(retrieval.MAX_QUERY_WORDS))
    assert len(query) > 100_000
    assert found == retriever.scored([first], 3)


def test_a_corpus_smaller_than_top_k_is_found_whole_and_an_empty_one_refused(bm25s):
    assert sorted(numbers(BM25(BOOK).search(["Kenya"], 99)[0])) == [0, 1, 2, 3, 4]
    with pytest.raises(RetrievalError, match="the corpus has no passages"):
        BM25(corpus_of())


def test_passages_without_words_are_found_last(bm25s):
    corpus = corpus_of(("", ""), ("", "?"), ("Kenya", ""))
    assert numbers(BM25(corpus).search(["Kenya"], 3)[0]) == [2, 0, 1]
    with pytest.raises(RetrievalError, match="no passage of the corpus has a word"):
        BM25(corpus_of(("", ""), ("", "")))


def test_an_index_is_made_once_and_loaded_at_least_three_times_faster(bm25s, monkeypatch):
    corpus = random_corpus(5000, num_words=3000)
    queries = [f"word{number} word{number + 1}" for number in range(20)]
    began = time.process_time()
    built = BM25(corpus)
    build_s = time.process_time() - began
    monkeypatch.setattr(retrieval, "_build_bm25", None)  # would be an error now
    began = time.process_time()
    loaded = BM25(corpus)
    assert 3 * (time.process_time() - began) < build_s
    assert loaded.scored(queries, 9) == built.scored(queries, 9)
    assert isinstance(loaded._index.scores["data"], np.memmap)


def test_another_corpus_has_another_index(bm25s):
    assert BM25(BOOK).folder != BM25(random_corpus(5)).folder


def test_an_index_is_whole_or_absent(bm25s, tmp_path):
    class Broken(Listed):
        def __getitem__(self, number):
            if number == 3:
                raise ValueError("line 4: no JSON")
            return super().__getitem__(number)

    with pytest.raises(ValueError, match="line 4"):
        BM25(Broken(BOOK))
    assert list((tmp_path / "cache" / "searchqa").iterdir()) == []


def test_several_that_make_an_index_at_once_get_the_same(bm25s):
    corpus = random_corpus(300)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: BM25(corpus), range(4)))
    assert {retriever.folder for retriever in made} == {made[0].folder}
    assert [each.name for each in made[0].folder.parent.iterdir()] == [made[0].folder.name]
    assert len({repr(retriever.scored(["word1"], 9)) for retriever in made}) == 1


def test_a_damaged_index_is_named_in_one_line(bm25s):
    folder = BM25(BOOK).folder
    scores = folder / "data.csc.index.npy"
    scores.write_bytes(scores.read_bytes()[:40])
    with pytest.raises(RetrievalError, match=r"bm25-\w+ is damaged \(.*\); delete it") as caught:
        BM25(BOOK)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_said_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(RetrievalError, match="bm25s is not installed; run `make setup"):
        BM25(BOOK)


def test_what_takes_long_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(Progress, "EVERY_S", 0.0)
    progress = Progress("counting", total=200, done=100)
    progress.advance(50)
    assert re.search(r"counting: 75 %, \d+ s left", capsys.readouterr().err)


# ----------------------------------------------------------------------------------------- Batcher


def test_what_many_threads_ask_is_one_search_and_each_gets_its_own():
    recorder = Recorder()
    with batched(recorder, wait_s=20.0, max_batch=16) as batcher, ThreadPoolExecutor(16) as pool:
        asked = [(f"query {number}", 1 + number % 4) for number in range(16)]
        found = list(pool.map(lambda each: batcher.search_one(*each), asked))
    assert found == [recorder.search([query], top_k)[0] for query, top_k in asked]
    assert sorted(recorder.asked[0]) == sorted(query for query, _ in asked)


def test_a_full_batch_waits_for_nobody():
    began = time.monotonic()
    with (
        batched(Recorder(), wait_s=30.0, max_batch=4) as batcher,
        ThreadPoolExecutor(4) as pool,
    ):
        list(pool.map(lambda number: batcher.search_one(str(number), 1), range(4)))
    assert time.monotonic() - began < 10


def test_equal_queries_are_searched_for_once():
    recorder = Recorder()
    with batched(recorder, wait_s=20.0, max_batch=8) as batcher, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda top_k: batcher.search_one("same", top_k), range(1, 9)))
    assert recorder.asked == [["same"]]
    assert [len(each) for each in found] == list(range(1, 9))


def test_batched_results_are_the_unbatched_ones(bm25s):
    retriever = BM25(random_corpus(400))
    rng = random.Random(1)
    asked = [
        (f"word{rng.randrange(70)} word{rng.randrange(70)}", rng.randrange(1, 9))
        for _ in range(300)
    ]
    with batched(retriever) as batcher, ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda each: batcher.search_one(*each), asked))
    assert found == [retriever.search([query], top_k)[0] for query, top_k in asked]


def test_an_error_reaches_every_caller_of_its_batch_and_the_next_batch_is_answered():
    def ask(batcher, query):
        with pytest.raises(RetrievalError, match="it broke"):
            batcher.search_one(query, 1)
        return True

    with batched(Recorder(), wait_s=20.0, max_batch=8) as batcher, ThreadPoolExecutor(8) as pool:
        queries = ["bad", *map(str, range(7))]
        assert all(pool.map(lambda query: ask(batcher, query), queries))
        found = pool.map(lambda number: batcher.search_one(f"good {number}", 2), range(8))
        assert [len(each) for each in found] == [2] * 8


class OneIsBad(Recorder):
    """A service that answers, with too little for one query of several."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def scored(self, queries, top_k):
        if "bad" in queries:
            self.asked.append(list(queries))
            raise self.error
        return super().scored(queries, top_k)


@pytest.mark.parametrize("error", [QueryError("too few"), CorpusError("line 7 is no JSON")])
def test_a_query_that_fails_by_itself_fails_alone(error):
    """What one policy wrote cost up to 31 other sessions their episode."""

    def ask(batcher, query):
        try:
            return batcher.search_one(query, 1)[0].title
        except type(error):
            return "failed"

    recorder = OneIsBad(error)
    with batched(recorder, wait_s=20.0, max_batch=8) as batcher, ThreadPoolExecutor(8) as pool:
        queries = ["bad", *map(str, range(7))]
        found = list(pool.map(lambda query: ask(batcher, query), queries))
    assert found == ["failed", *map(str, range(7))]
    assert len(recorder.asked) == 9  # together, and each alone


def test_of_a_service_that_hangs_nobody_waits_for_more_than_two_searches():
    """32 at a time, 128 sessions waited for four of them, longer than their clients wait."""

    taken: list[int] = []  # queries of each search
    hold = threading.Event()

    class Hangs(Remote):
        PAUSES_S = ()

        def scored(self, queries, top_k):
            taken.append(len(queries))
            hold.wait(20)
            raise RetrievalError("no answer")

    with batched(Hangs("http://127.0.0.1:9")) as batcher, ThreadPoolExecutor(128) as pool:
        waiting = [pool.submit(batcher.search_one, str(n), 3) for n in range(128)]
        # The first search takes whoever is there by then; the others must be waiting for theirs.
        while sum(taken) + len(batcher._waiting) < 128:
            time.sleep(0.001)
        hold.set()
        for each in waiting:
            with pytest.raises(RetrievalError, match="no answer"):
                each.result(20)
    assert len(taken) <= 2 and sum(taken) == 128
    assert 2 * 25.0 < 60.0 and Remote("http://127.0.0.1:9")._timeout_s == 25.0  # a client's step


def test_who_builds_an_index_builds_it_alone_and_deletes_what_a_killed_one_left(bm25s):
    first = BM25(BOOK)
    left = first.folder.parent / f".new-abc-{first.folder.name}"
    left.mkdir()
    (left / "ids").write_bytes(b"gigabytes")
    BM25(BOOK)
    assert left.exists()  # nothing is built
    shutil.rmtree(first.folder)
    built, build = [], retrieval._build_bm25

    def slow(corpus, new):
        built.append(new)
        time.sleep(0.2)
        build(corpus, new)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(retrieval, "_build_bm25", slow)
        list(pool.map(lambda _: BM25(BOOK), range(3)))
    assert len(built) == 1 and not left.exists()


def test_a_retriever_that_returns_too_little_is_an_error_for_its_callers():
    class Short(Recorder):
        def search(self, queries, top_k):
            return []

    with batched(Short()) as batcher, pytest.raises(ValueError, match="zip"):
        batcher.search_one("query", 1)


def test_closing_answers_what_is_under_way_and_refuses_the_rest():
    begun, go_on = threading.Event(), threading.Event()

    class Held(Recorder):
        def scored(self, queries, top_k):
            begun.set()
            go_on.wait(20)
            return super().scored(queries, top_k)

    batcher = Batcher(Held(), wait_s=0.0, max_batch=1)
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(batcher.search_one, "first", 1)
        assert begun.wait(20)
        late = [pool.submit(batcher.search_one, "late", 1) for _ in range(3)]
        while len(batcher._waiting) < 3:
            time.sleep(0.001)
        closing = pool.submit(batcher.close)
        for each in late:
            with pytest.raises(RetrievalError, match="closed"):
                each.result(20)
        go_on.set()
        assert first.result(20)[0].title == "first"
        closing.result(20)
    with pytest.raises(RetrievalError, match="closed"):
        batcher.search_one("after", 1)
    batcher.close()  # twice does no harm


def test_who_asks_first_is_answered_first():
    go_on = threading.Event()

    class Held(Recorder):
        def scored(self, queries, top_k):
            go_on.wait(20)
            return super().scored(queries, top_k)

    held = Held()
    with batched(held, wait_s=0.0, max_batch=3) as batcher, ThreadPoolExecutor(21) as pool:
        asking = [pool.submit(batcher.search_one, "first", 1)]
        while batcher._waiting or not asking[0].running():
            time.sleep(0.001)
        for number in range(20):
            asking.append(pool.submit(batcher.search_one, str(number), 1))
            while len(batcher._waiting) <= number:
                time.sleep(0.001)
        go_on.set()
        for each in asking:
            each.result(20)
    order = [query for queries in held.asked for query in queries]
    assert order == ["first", *map(str, range(20))]
    assert max(map(len, held.asked)) == 3


def test_many_sessions_share_searches_that_take_as_long_for_one_as_for_all():
    recorder = Recorder(sleep_s=0.01)
    with batched(recorder, wait_s=0.01) as batcher, ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda number: batcher.search_one(str(number), 3), range(320)))
    assert sum(map(len, recorder.asked)) == 320
    assert len(recorder.asked) <= 320 / 4


# ------------------------------------------------------------------------------------------ which


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"SEARCHQA_RETRIEVAL_METHOD": "BM25"}, "is 'BM25'; choose bm25"),
        ({"SEARCHQA_RETRIEVAL_METHOD": "remote"}, "needs SEARCHQA_RETRIEVAL_URL"),
        ({"SEARCHQA_INDEX_PATH": "a.index"}, "SEARCHQA_RETRIEVAL_METHOD=dense"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, said):
    with pytest.raises(RetrievalError, match=said):
        open_retriever(settings)


def test_the_settings_choose_the_retriever(bm25s, tmp_path):
    path = write_corpus(tmp_path / "wiki.jsonl", BOOK)
    retriever = open_retriever({"SEARCHQA_CORPUS_PATH": str(path)})
    assert isinstance(retriever, BM25)
    assert retriever.search(["Nairobi"], 1) == [[BOOK[2]]]
    url = "http://127.0.0.1:9/retrieve"
    assert isinstance(open_retriever({"SEARCHQA_RETRIEVAL_URL": url}), Remote)
    both = {"SEARCHQA_RETRIEVAL_URL": url, "SEARCHQA_RETRIEVAL_METHOD": "bm25"}
    assert isinstance(open_retriever(both | {"SEARCHQA_CORPUS_PATH": str(path)}), BM25)


def test_the_examples_in_the_docstrings_run():
    for module in (ranking, remote, retrieval, service):
        assert doctest.testmod(module).failed == 0
