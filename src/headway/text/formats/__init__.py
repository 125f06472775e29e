"""One file per raw format; each reads a `RawFile` as a stream of `Record`s in bounded memory.

`FORMATS` maps the suffix of a name (without that of compression) to the module that reads it.
"""

FORMATS = {
    ".txt": "txt",
    ".text": "txt",
    ".md": "txt",
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
    ".mds": "mds",
    ".xml": "mediawiki",
    ".zip": "archive",
    ".tar": "archive",
}

SUPPORTED = (
    "txt, md, json, jsonl, csv, tsv, parquet, arrow, mds, a MediaWiki dump (xml), zip, tar; "
    "all but zip also as .gz, .bz2, .zst, .xz; folders and globs of them; Hugging Face dataset and MDS folders"
)
