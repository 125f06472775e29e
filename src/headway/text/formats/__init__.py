"""One file per raw format: `read(raw, keys)` gives the `Record`s of a `RawFile` in bounded memory, reading only `keys` where it can.

`FORMATS` maps the suffix of a name (without that of compression) to its format.
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
    ".zip": "zip",
    ".tar": "tar",
}

SUPPORTED = (
    "txt, md, json, jsonl, csv, tsv, parquet, arrow, mds, a MediaWiki dump (xml), zip, tar; "
    "all but zip also as .gz, .bz2, .zst, .xz; folders and globs of them; Hugging Face dataset and MDS folders"
)
