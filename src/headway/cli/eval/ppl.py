"""`headway eval ppl`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json, print_table


def command(
    model: Path = typer.Option(..., "--model", help="A run folder, a checkpoint folder or a Hugging Face folder."),
    data: list[Path] = typer.Option(..., "--data", "--input", help="Text files, folders or token stores; may be given several times."),
    window: int = typer.Option(None, help="Tokens read at once; the model's max_seq_len if not given."),
    stride: int = typer.Option(None, help="Tokens between the beginnings of windows; the window if not given (no overlap)."),
    split: str = typer.Option("file", help="A .txt file is one document (file), or each line is one (line)."),
    text_key: str = typer.Option("text", help="Key that holds the text of a record."),
    bos: bool = typer.Option(False, "--bos", help="Put the tokenizer's begin token before each text."),
    device: str = typer.Option("cpu", help="cpu or cuda."),
    json: bool = JSON_FLAG,
) -> None:
    """Perplexity of a model on text, with a sliding window where documents are longer than it."""
    from headway.errors import ConfigError
    from headway.eval.perplexity import perplexity, read_pieces
    from headway.infer.load import load_model

    if split not in ("file", "line"):
        raise ConfigError(f"--split is {split!r}; it must be 'file' or 'line'.")
    loaded = load_model(model, device=device)
    result = perplexity(loaded, read_pieces(data, loaded, split=split, text_key=text_key, bos=bos), window=window, stride=stride)
    if json:
        print_json(result.to_json())
        return
    bits = "unknown" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
    rows = [(f"{result.loss:.4f}", f"{result.perplexity:.3f}", bits, f"{result.accuracy:.1%}", result.tokens, result.documents)]
    print_table(["loss", "perplexity", "bits/byte", "accuracy", "tokens", "documents"], rows)
