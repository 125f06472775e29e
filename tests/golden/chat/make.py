"""Wrote ids.json and exported.json, with the version of headway whose built-in templates were frames and not yet jinja.

Not run by the tests: what these files say must never change. `python make.py tokenizers` wrote bpe.json and sentencepiece.model.
"""

import io
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
TEXT = [
    "The river had frozen early that year, and the children crossed it.\n" * 8,
    "那年河水结冰很早，孩子们踩着冰面过河上学。\n" * 8,
]
HEADERS = [
    "system\nuser\nassistant\nYou are a helpful assistant. ### Instruction: Response: hello Hello! Hi Bye\n"
    * 8
]


def write_tokenizers() -> None:
    import sentencepiece
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXT + HEADERS, trainer)
    (HERE / "bpe.json").write_text(
        json.dumps(json.loads(backend.to_str()), ensure_ascii=False, separators=(",", ":")),
        encoding="utf-8",
    )
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(" ".join(TEXT + HEADERS).split("\n")),
        model_writer=written,
        vocab_size=380,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<eoh>", "<eoa>", "<TOKENS_UNUSED_139>", "<TOKENS_UNUSED_140>"],
        control_symbols=["<|im_start|>", "<|im_end|>", "<|role_end|>", "<|beginoftext|>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (HERE / "sentencepiece.model").write_bytes(written.getvalue())


def write_digests() -> None:
    from headway.tokenizer.to_jinja import to_jinja  # pyright: ignore[reportMissingImports] # of that version
    from support.chat_cases import TALKS, TEMPLATES, encoded, in_transformers, tokenizers_by_name

    from headway.tokenizer.chat import find_template

    loaded = tokenizers_by_name()
    ids = {
        name: {
            template: [
                encoded(turns, template, tokenizer, tools) for turns, tools in TALKS.values()
            ]
            for template in TEMPLATES
        }
        for name, tokenizer in loaded.items()
    }
    (HERE / "ids.json").write_text(json.dumps(ids, indent=0) + "\n")
    exported: dict[str, dict[str, list[str]]] = {}
    for template in TEMPLATES:
        tokenizer = loaded["bpe"]
        source = to_jinja(find_template(template, tokenizer), tokenizer)
        if source is not None:
            own = tokenizer.with_chat_template(source)
            exported[template] = {
                "transformers": [
                    in_transformers(turns, source, tokenizer, tools)
                    for turns, tools in TALKS.values()
                ],
                "tokenizer": [
                    encoded(turns, "tokenizer", own, tools) for turns, tools in TALKS.values()
                ],
            }
    (HERE / "exported.json").write_text(json.dumps(exported, indent=0) + "\n")


if __name__ == "__main__":
    write_tokenizers() if sys.argv[1:] == ["tokenizers"] else write_digests()
