"""Rows of tables that are read in order, through ``datasets``, and not stored.

Only single files are asked of ``datasets``, and rows are counted here. The library's shuffling loses the rows in its
buffer when a run resumes (datasets#7901), and its states have skipped rows (#7538) and failed to advance (#8308).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import RunError, UsageError
from ...files import reason_of
from ...urls import credentials_of, hide_credentials, with_credentials
from ..cache import fingerprint
from ..config import TEXT_SUFFIXES, TOKEN_SUFFIXES, DataConfig, corpus_suffix, is_remote
from ..corpora import files_by_suffix
from ..ingest.bad_rows import check_first_row
from ..row_corpora import READERS, check_text_column

_ROWS_PER_BATCH = 256


class StreamedTable:
    """The text column of a ``hf:`` set or of tabular files.

    Raises:
        UsageError: the path holds no set of tables, or cannot be opened.
    """

    def __init__(self, config: DataConfig) -> None:
        self.path, self._column = config.path, config.text_field
        reader, options = "", dict[str, Any]()
        if str(config.path).startswith("hf:"):
            dataset = self._open(str(config.path).split(":", 2)[1:], {})
        else:
            suffix, files = _tables(config)
            reader, options = READERS[suffix]
            dataset = self._open([reader], options | {"data_files": files})
        if dataset.features is not None:  # the first file says what it has
            check_text_column(dataset.features, config)
        if reader == "parquet":
            # Columns that nobody reads need not come over a network.
            columns = {"data_files": self.files, "columns": [self._column]}
            dataset = self._open([reader], options | columns)
        self._dataset = dataset.with_format("arrow")
        self.n_files: int = dataset.num_shards

    def _open(self, args: list[str], options: dict[str, Any]) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise UsageError("data.stream: needs the datasets library; pip install birthmark[datasets]") from error
        # Its log lines about an unreadable file repeat the raised error. Threads read until the end.
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        try:
            builder = datasets.load_dataset_builder(*args, **options)
            self.files = [str(file) for file in builder.config.data_files["train"]]
            return builder.as_streaming_dataset(split="train")
        except Exception as error:  # many libraries speak here, without a common base class
            raise UsageError(
                f"data.path: cannot open {self.path!r} ({hide_credentials(reason_of(error))}); check the name, the "
                "network and the file"
            ) from error

    @property
    def file_names(self) -> list[str]:
        """Names of the files without credentials, fit to be shown."""
        return [hide_credentials(file) for file in self.files]

    def identity(self) -> str:
        """Hash the column's name and the names of all files.

        Sizes of local files count too; files of a hub have its revision in their names.
        """
        facts = [[Path(f).name, Path(f).stat().st_size] if Path(f).is_file() else [f] for f in self.file_names]
        return fingerprint(column=self._column, files=facts)

    def name(self, file: int) -> str:
        """Return the name of a file, for messages."""
        return self.file_names[file] if len(self.files) == self.n_files else f"{self.path!r}, file {file + 1}"

    def texts(self, file: int, first_row: int = 0) -> Iterator[str | None]:
        """Yield the texts of a file from a row on, in its order.

        Raises:
            RunError: a file cannot be read.
        """
        row = 0
        try:
            for table in self._dataset.shard(num_shards=self.n_files, index=file).iter(batch_size=_ROWS_PER_BATCH):
                if row + len(table) > first_row:
                    column = table[self._column]
                    yield from column.slice(max(0, first_row - row)).to_pylist()
                row += len(table)
        except Exception as error:
            about = "no such column" if isinstance(error, KeyError) else hide_credentials(reason_of(error))
            raise RunError(
                f"{self.name(file)}: column {self._column!r} cannot be read after row {row} ({about}); mend the file, "
                "or check data.text_field and the network, and go on with --resume"
            ) from error


def _tables(config: DataConfig) -> tuple[str, list[str]]:
    """Find the tabular files that ``data.path`` names, and the suffix of their kind; URLs may have wildcards.

    Raises:
        UsageError: there are none, or several kinds; or a local file does not begin like its kind.
    """
    remote = [entry for entry in config.entries if is_remote(entry)]
    local = files_by_suffix([entry for entry in config.entries if not is_remote(entry)])
    found = {suffix: [str(file.path.resolve()) for file in files] for suffix, files in local.items()}
    for url in remote:
        found.setdefault(corpus_suffix(url), []).append(with_credentials(url, credentials_of(url)))
    tables = [suffix for suffix in found if suffix in READERS]
    if len(tables) != 1 or found.keys() & {*TEXT_SUFFIXES, *TOKEN_SUFFIXES}:
        raise UsageError(
            f"data.stream: data.path {config.path!r} has {', '.join(sorted(found)) or 'no files'}; give tables of one "
            f"kind ({' '.join(READERS)}) or hf:NAME, or leave data.stream out"
        )
    for file in local.get(tables[0], ()):
        check_first_row(file.path, config.text_field)
    return tables[0], found[tables[0]]
