"""Raw file formats: `read_<format>(raw, keys)` yields the `Record`s of a `RawFile` in bounded
memory, and reads only `keys` if it can.

`FORMATS` maps a file suffix (without the compression suffix) to its format. `MODULES` names the
module of a format; text files and archives have none, because `text/read.py` and `text/raw.py`
read them.
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
    "txt, md, json, jsonl, csv, tsv, parquet, arrow, mds, a MediaWiki dump (xml), zip, tar; all "
    "but zip also as .gz, .bz2, .zst, .xz; folders and globs of them; Hugging Face dataset and "
    "MDS folders"
)

MODULES = {
    "json": "json",
    "jsonl": "json",
    "csv": "csv",
    "arrow": "arrow",
    "parquet": "arrow",
    "mds": "mds",
    "mediawiki": "mediawiki",
}
