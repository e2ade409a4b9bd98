"""BM25 by Lucene itself, through pyserini and a Java machine in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any, Literal

from icr_bench.retrievers.base import Document, MissingExtra, Ranking, Retriever
from icr_bench.retrievers.bm25 import MOST_K1

JAVA = 17
"""The oldest Java that is tested."""

HOMES = ("JAVA_HOME", "JDK_HOME", "JRE_HOME")
"""Variables that name the folder of a Java; the first that is set counts."""

OPTIONS = (
    "-Xrs",  # Ctrl-C stays Python's
    "-XX:-UsePerfData",  # its file in the temporary folder would outlive a process that is ended
    # the jar lacks what Lucene looks for under Java 19 to 21
    "-Dorg.apache.lucene.store.MMapDirectory.enableMemorySegments=false",
)

CHUNK = 10_000
"""Documents indexed between two signs of progress."""


class Lucene(Retriever):
    """Lucene's BM25 over Anserini's English analyser, as pyserini runs it, with unrounded scores.

    A document that shares no token with the query is never returned. Documents without tokens count neither in idf nor
    in the mean length. Lucene keeps a document's length in one byte: exact up to 40 tokens, then rounded down by less
    than a ninth. The index is a temporary folder's files, mapped into memory; the folder is gone when `index` returns.

    Needs pyserini 0.25 (extra ``lucene``) and Java 17 or newer, which JAVA_HOME names or which stands on the PATH.

    Args:
        k1: saturation of term frequency, 0 or more.
        b: length normalisation, 0 to 1.
        stopwords: ``english`` (Lucene's list) or ``none``.
        stemmer: ``porter``, ``krovetz`` or ``none``.
        threads: queries answered at once.
    """

    def __init__(
        self,
        *,
        k1: float = 0.9,
        b: float = 0.4,
        stopwords: Literal["english", "none"] = "english",
        stemmer: Literal["porter", "krovetz", "none"] = "porter",
        threads: int = 1,
    ) -> None:
        if not 0 <= k1 <= MOST_K1:
            raise ValueError(f"k1 must be {f'{MOST_K1:g} at most' if k1 > 0 else '0 or more'}, got {k1}")
        if not 0 <= b <= 1:
            raise ValueError(f"b must be between 0 and 1, got {b}")
        if threads < 1:
            raise ValueError(f"threads must be 1 or more, got {threads}")
        for package, module in (("pyserini", "pyserini"), ("pyjnius", "jnius")):
            if find_spec(module) is None:
                raise MissingExtra(package, "lucene")
        self._k1, self._b, self._stopwords, self._stemmer, self._threads = k1, b, stopwords, stemmer, threads
        self._searcher: Any = None
        self._bytes = 0

    def load(self) -> None:
        self._java = _start()
        from pyserini.analysis import get_lucene_analyzer

        self._analyser = get_lucene_analyzer(
            stemming=self._stemmer != "none", stemmer=self._stemmer, stopwords=self._stopwords == "english"
        )
        self._generator = self._class("io.anserini.search.query.BagOfWordsQueryGenerator")()
        # a long query has more words than the 1,024 that are allowed
        self._class("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(2**31 - 1)
        # Java reads Lucene's classes when they are first used, which takes seconds and is no part of indexing
        self.index([Document(0, "word")])
        self.search(["word"], 1)
        self._close()

    def _class(self, name: str) -> Any:
        return self._java.autoclass(name)

    def _close(self) -> None:
        if self._searcher is not None:
            self._searcher.getIndexReader().close()
        self._searcher, self._bytes = None, 0

    def index(self, documents: Sequence[Document]) -> None:
        self._close()
        # a network's file system keeps the files while they are mapped
        with TemporaryDirectory(prefix="icr-bench-lucene-", ignore_cleanup_errors=True) as folder:
            directory = self._class("org.apache.lucene.store.FSDirectory").open(self._java.JPaths.get(folder))
            self._write(directory, documents)
            self._bytes = sum(file.stat().st_size for file in Path(folder).iterdir())
            reader = self._class("org.apache.lucene.index.DirectoryReader").open(directory)
        # given a DirectoryReader, pyjnius takes a wrong constructor
        reader = self._java.cast("org.apache.lucene.index.IndexReader", reader)
        self._searcher = self._class("org.apache.lucene.search.IndexSearcher")(reader)
        similarity = self._class("org.apache.lucene.search.similarities.BM25Similarity")
        self._searcher.setSimilarity(similarity(self._k1, self._b))

    def _write(self, directory: Any, documents: Sequence[Document]) -> None:
        config = self._class("org.apache.lucene.index.IndexWriterConfig")(self._analyser)
        # keeps documents in their order, so that Lucene's numbers are ours, by which it ranks equal scores
        config.setMergePolicy(self._class("org.apache.lucene.index.LogDocMergePolicy")())
        writer = self._class("org.apache.lucene.index.IndexWriter")(directory, config)
        kind = self._class("org.apache.lucene.document.FieldType")()
        kind.setIndexOptions(self._class("org.apache.lucene.index.IndexOptions").DOCS_AND_FREQS)
        empty = self._java.cast("java.lang.CharSequence", self._java.JString(""))
        field = self._class("org.apache.lucene.document.Field")("contents", empty, kind)
        held = self._class("org.apache.lucene.document.Document")()
        held.add(field)
        for document in documents:
            if document.number and document.number % CHUNK == 0:
                self.progress(document.number, len(documents))
            field.setStringValue(_unicode(document.text))
            writer.addDocument(held)
        writer.forceMerge(1)
        writer.close()

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        if self._searcher is None:
            raise RuntimeError("search before index")
        if self._threads == 1:
            return [self._search(query, k) for query in queries]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(lambda query: self._search_apart(query, k), queries))

    def _search(self, query: str, k: int) -> Ranking:
        asked = self._generator.buildQuery("contents", self._analyser, _unicode(query))
        hits = self._searcher.search(asked, k).scoreDocs
        return Ranking([hit.doc for hit in hits], [hit.score for hit in hits])

    def _search_apart(self, query: str, k: int) -> Ranking:
        """The same in another thread, which Java must not know any longer when it ends."""
        from jnius import detach

        try:
            return self._search(query, k)
        finally:
            detach()

    def index_bytes(self) -> int:
        return self._bytes

    def settings(self) -> dict[str, Any]:
        words = self._class("org.apache.lucene.analysis.en.EnglishAnalyzer").ENGLISH_STOP_WORDS_SET.size()
        steps = ["Lucene's StandardTokenizer", "no possessive 's", "lower case"]
        steps += [f"{words if self._stopwords == 'english' else 0} stop words", f"stemmer {self._stemmer}"]
        return {
            "analyser": " | ".join(steps),
            "pyserini_version": version("pyserini"),
            "lucene_version": self._class("org.apache.lucene.util.Version").LATEST.toString(),
            "java_version": self._class("java.lang.System").getProperty("java.version"),
        }


def _start() -> Any:
    """Start Java; pyserini's module that makes its classes.

    Raises:
        RuntimeError: there is none, it does not start, or it is too old.
    """
    needs = f"lucene needs Java {JAVA} or newer"
    advice = f"install one, such as Debian's openjdk-{JAVA}-jre-headless, and let JAVA_HOME name its folder"
    home = next((path for name in HOMES if (path := os.environ.get(name))), None)
    if home is None:
        if (java := which("java")) is None:
            raise RuntimeError(f"{needs}, but JAVA_HOME is not set and no java is on the PATH; {advice}")
        # pyjnius would look for the compiler's folder, and a runtime has no compiler
        home = os.environ["JAVA_HOME"] = str(Path(java).resolve().parents[1])
    try:
        import jnius_config

        if not jnius_config.vm_running:
            jnius_config.add_options(*OPTIONS)
        from pyserini import pyclass
    except Exception as error:  # pyjnius raises bare ones
        why = str(error).strip().partition("\n")[0]
        raise RuntimeError(f"{needs}, but the one in {home} does not start ({why}); {advice}") from error
    system = pyclass.autoclass("java.lang.System")
    found: str = system.getProperty("java.specification.version").removeprefix("1.")  # "17", or "1.8" for Java 8
    if int(found) < JAVA:
        raise RuntimeError(f"{needs}, got Java {found} in {system.getProperty('java.home')}; {advice}")
    return pyclass


def _unicode(text: str) -> str:
    """The text with lone surrogates, which pyjnius refuses, replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
